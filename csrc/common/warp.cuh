// Prefix sums over the threads of a warp and of a CTA.
#pragma once

#include <cstdint>

namespace tilemoe {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Inclusive, over the lanes of a warp.
__device__ __forceinline__ int32_t warp_scan(int32_t value) {
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Sum over the threads before this one, of a CTA of kCtaThreads; *total over all. sums: one word a
// warp, free again behind the CTA's next barrier, which may be that of a scan with other words: two
// rows of them that take turns need no barrier between scans.
template <int kCtaThreads>
__device__ __forceinline__ int32_t cta_scan(int32_t value, int32_t* sums, int32_t* total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t inside = warp_scan(value);
  if (lane == 31) sums[warp] = inside;
  __syncthreads();
  const int32_t of_warps = warp_scan(lane < kCtaThreads / 32 ? sums[lane] : 0);
  *total = __shfl_sync(kAllLanes, of_warps, 31);
  const int32_t before = __shfl_sync(kAllLanes, of_warps, (warp + 31) % 32);
  return inside - value + (warp > 0 ? before : 0);
}

}  // namespace tilemoe
