#include "../common/launch.cuh"
#include "consumer.h"
#include "ship.cuh"

namespace tilemoe::consumer {
namespace {

constexpr int kThreads = 1024;
constexpr int kSharedBytes = 120 * 1024;  // more than half of an SM's: two CTAs never share one

__global__ void __launch_bounds__(kThreads, 1)
    consumer_kernel(const __grid_constant__ ShipParams params) {
  __shared__ Shared shared;
  if (not_in_split(params)) return;
  if (threadIdx.x == 0) init(shared, kThreads / 32 - 1);
  __syncthreads();
  ship(params, shared, kThreads / 32 - 1, false);
}

}  // namespace
}  // namespace tilemoe::consumer

cudaError_t tilemoe_consumer_load() {
  return cudaFuncSetAttribute(tilemoe::consumer::consumer_kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tilemoe::consumer::kSharedBytes);
}

cudaError_t tilemoe_consumer_launch(const tilemoe::ShipParams* params, int32_t ctas,
                                    cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || ctas < 0 || !valid(*params)) return cudaErrorInvalidValue;
  if (ctas == 0) return cudaSuccess;
  return launch(consumer::consumer_kernel, ctas, consumer::kThreads, consumer::kSharedBytes, stream,
                false, *params);
}
