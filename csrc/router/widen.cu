#include <algorithm>

#include "../common/integers.h"
#include "../common/launch.cuh"
#include "../common/pairs.cuh"
#include "widen.h"

namespace tilemoe::router {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCtas = 132 * 8;  // of an H200, all at once
constexpr int kElements = 8;       // 16 bytes to read

template <class E>
__device__ __forceinline__ void widen(const Widening& w, int64_t vector) {
  const uint4 words = static_cast<const uint4*>(w.source)[vector];
  const float2 a = unpack(E{}, words.x), b = unpack(E{}, words.y);
  const float2 c = unpack(E{}, words.z), d = unpack(E{}, words.w);
  auto* const to = reinterpret_cast<float4*>(w.wide) + 2 * vector;
  to[0] = {a.x, a.y, b.x, b.y};
  to[1] = {c.x, c.y, d.x, d.y};
}

__global__ void __launch_bounds__(kThreads) widen_kernel(Widening first, Widening second) {
  const int64_t of_first = first.count / kElements;
  const int64_t all = of_first + second.count / kElements;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all;
       i += int64_t{gridDim.x} * kThreads) {
    const bool is_first = i < of_first;
    const Widening& w = is_first ? first : second;
    const int64_t vector = is_first ? i : i - of_first;
    if (w.is_half != 0) {
      widen<__half>(w, vector);
    } else {
      widen<__nv_bfloat16>(w, vector);
    }
  }
}

bool valid(const Widening* w) {
  return w != nullptr && w->count >= 0 && w->count % kElements == 0 &&
         reinterpret_cast<uintptr_t>(w->source) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(w->wide) % 16 == 0 &&
         (w->count == 0 || (w->source != nullptr && w->wide != nullptr));
}

}  // namespace

cudaError_t load_widen() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, widen_kernel);
}

}  // namespace tilemoe::router

cudaError_t tilemoe_widen_launch(const tilemoe::Widening* first, const tilemoe::Widening* second,
                                 cudaStream_t stream) {
  using namespace tilemoe::router;
  if (!valid(first) || !valid(second)) return cudaErrorInvalidValue;
  const int64_t vectors = (first->count + second->count) / kElements;
  if (vectors == 0) return cudaSuccess;
  const int64_t ctas = std::min<int64_t>(tilemoe::ceil_div(vectors, kThreads), kMaxCtas);
  return tilemoe::launch(widen_kernel, ctas, kThreads, 0, stream, false, *first, *second);
}
