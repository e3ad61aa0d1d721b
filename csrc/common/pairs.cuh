// Two neighbouring 16-bit elements in one word, and as floats. An element type is one of CUDA's, or
// one that says which of them it is like (Pair).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilemoe {

template <class E>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
};

// The first argument only names the type.
template <class E>
__device__ __forceinline__ uint32_t pack(E, float low, float high) {
  return Pair<E>::pack(low, high);
}
template <class E>
__device__ __forceinline__ float2 unpack(E, uint32_t pair) {
  return Pair<E>::unpack(pair);
}

}  // namespace tilemoe
