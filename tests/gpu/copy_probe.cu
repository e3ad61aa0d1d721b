// Whether a copy needs SMs: how long it takes beside a kernel that holds a GPU for a second, one
// CTA of it and as many as the GPU has room for. Copies inside a GPU do, copies to the host do not.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdio>

#include "host.cuh"

namespace {

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void hold(uint64_t ns) {
  const uint64_t end = now_ns() + ns;
  while (now_ns() < end) {
  }
}

enum class Copy { plain, boxes, to_host, memset };
constexpr const char* kNames[] = {"copy", "2D copy", "copy to host", "memset"};
constexpr size_t kBytes = 64 << 20, kRow = 8192;

}  // namespace

int main() {
  cudaStream_t holding, copying;
  CHECK_CUDA(cudaStreamCreateWithFlags(&holding, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
  char *to, *from, *host;
  CHECK_CUDA(cudaMalloc(&to, kBytes));
  CHECK_CUDA(cudaMalloc(&from, kBytes));
  CHECK_CUDA(cudaMallocHost(&host, kBytes));
  cudaEvent_t done;
  CHECK_CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  const auto copy = [&](Copy kind) {
    switch (kind) {
      case Copy::plain:
        return cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, copying);
      case Copy::boxes:
        return cudaMemcpy2DAsync(to, kRow, from, kRow, kRow, kBytes / kRow, cudaMemcpyDefault,
                                 copying);
      case Copy::to_host:
        return cudaMemcpyAsync(host, from, kBytes, cudaMemcpyDefault, copying);
      default:
        return cudaMemsetAsync(to, 1, kBytes, copying);
    }
  };
  const Copy kinds[] = {Copy::plain, Copy::boxes, Copy::to_host, Copy::memset};
  hold<<<1, 1024, 0, holding>>>(1000);
  for (Copy kind : kinds) CHECK_CUDA(copy(kind));  // what is loaded late would wait, too
  CHECK_CUDA(cudaDeviceSynchronize());
  int sms = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  for (Copy kind : kinds) {
    for (int ctas : {1, 2 * sms}) {
      hold<<<ctas, 1024, 0, holding>>>(1'000'000'000);
      CHECK_CUDA(cudaGetLastError());
      CHECK_CUDA(copy(kind));
      CHECK_CUDA(cudaEventRecord(done, copying));
      int ms = 0;
      for (; cudaEventQuery(done) == cudaErrorNotReady && ms < 3000; ++ms) usleep(1000);
      std::printf("%s beside %d waiting CTAs of 1024 threads (1 s): done after %d ms\n",
                  kNames[static_cast<int>(kind)], ctas, ms);
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }
}
