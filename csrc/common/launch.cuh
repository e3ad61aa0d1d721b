// Launches, early ones among them: whose kernel may come while the one in front still runs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tilemoe {

// `early`: the kernel may come while the kernel in front of it in the stream still runs, and waits
// by itself (await_prerequisites, flags.cuh). Behind a kernel that does not allow dependents, or
// another operation of the stream, it comes when that has ended. An error is returned and not left
// for the next launch of this thread to find.
template <class... Params>
cudaError_t launch_grid(void (*kernel)(Params...), dim3 ctas, int threads, size_t shared_bytes,
                        cudaStream_t stream, bool early, const Params&... params) {
  cudaLaunchAttribute programmatic{};
  programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  programmatic.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &programmatic;
  config.numAttrs = early ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

template <class... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t ctas, int threads, size_t shared_bytes,
                   cudaStream_t stream, bool early, const Params&... params) {
  return launch_grid(kernel, dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, stream,
                     early, params...);
}

}  // namespace tilemoe
