// The gate's fp32 weights as three bf16 matrices whose sum they are (all 24 bits of weights from
// 2^-110 up to the largest bf16), for tensor cores: each product with a bf16 token is exact in
// fp32.
#include <cuda_bf16.h>

#include <algorithm>

#include "../common/integers.h"
#include "../common/launch.cuh"
#include "split.h"

namespace tilemoe::router {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCtas = 1024;

__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* __restrict__ weights, __nv_bfloat16* parts, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    float rest = weights[i];
#pragma unroll
    for (int part = 0; part < kLogitParts; ++part) {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(rest);
      parts[part * count + i] = rounded;
      // Exact: both have the same last bit or a higher one. An infinity has no rest.
      const float taken = __bfloat162float(rounded);
      rest = isinf(taken) ? 0.0f : rest - taken;
    }
  }
}

}  // namespace

cudaError_t load_split() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, split_kernel);
}

cudaError_t launch_split(const float* weights, void* parts, int64_t count, cudaStream_t stream) {
  const int64_t ctas = std::min<int64_t>(ceil_div(count, kThreads), kMaxCtas);
  return launch(split_kernel, ctas, kThreads, 0, stream, false, weights,
                static_cast<__nv_bfloat16*>(parts), count);
}

}  // namespace tilemoe::router
