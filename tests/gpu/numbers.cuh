// Numbers that any rank can predict, as elements of either type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace harness {

__host__ __device__ inline uint32_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ull ^ (b + 1) * 0xD1B54A32D192ED03ull;
  x ^= x >> 32;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 29;
  return static_cast<uint32_t>(x);
}

template <class E>
__device__ E cast(float value);
template <>
__device__ inline __nv_bfloat16 cast<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half cast<__half>(float value) {
  return __float2half_rn(value);
}

}  // namespace harness
