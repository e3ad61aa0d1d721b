// A launch whose kernel may come while the kernel in front of it in the stream still runs.
#pragma once

#include <cuda_runtime.h>

namespace tilemoe {

// The kernel waits by itself (await_prerequisites, flags.cuh), in every thread and before it reads
// or writes anything. Behind a kernel that does not allow dependents, or another operation of the
// stream, it comes when that has ended. `behind` false: an ordinary launch.
template <class Params>
cudaError_t launch_behind(void (*kernel)(Params), int64_t ctas, int threads, size_t shared_bytes,
                          const Params& params, cudaStream_t stream, bool behind = true) {
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &programmatic;
  config.numAttrs = behind ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace tilemoe
