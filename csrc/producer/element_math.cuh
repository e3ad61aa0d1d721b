// What the producer's epilogue does to single values: conversions and activations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include "producer.h"

namespace tilemoe::producer {

__device__ __forceinline__ uint32_t pack(cutlass::bfloat16_t, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(cutlass::half_t, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 unpack(cutlass::bfloat16_t, uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
__device__ __forceinline__ float2 unpack(cutlass::half_t, uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

__device__ __forceinline__ float relu(float x) {
  return x < 0.0f ? 0.0f : x;  // keeps NaN, as torch does
}

__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// All MMA warps sit in the epilogue at once, so its instructions count: erff would take 6 us a
// tile. Here GELU is max(x, 0) - |x| (1 - Phi(|x|)) with Abramowitz and Stegun 7.1.26 for the
// second factor: absolute error below 4e-7, and better than 0.5 x (1 + erff(x / sqrt 2)) for x < 0,
// which cancels. SiLU: relative error below 1e-5 (0 instead of 1e-36 for x below -87).
// GELU gives NaN for infinite x.
template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::gelu) {
    const float t = __fdividef(1.0f, fmaf(0.23164189f, fabsf(x), 1.0f));
    float tail = fmaf(0.5307027145f, t, -0.7265760135f);
    tail = fmaf(tail, t, 0.7107068705f);
    tail = fmaf(tail, t, -0.142248368f);
    tail = fmaf(tail, t, 0.127414796f) * t;
    tail *= exp2_approx(x * x * -0.72134752f);
    return fmaf(-fabsf(x), tail, relu(x));
  } else if constexpr (kActivation == Activation::silu) {
    return __fdividef(x, 1.0f + exp2_approx(x * -1.44269504f));
  } else if constexpr (kActivation == Activation::relu) {
    return relu(x);
  } else {
    return x;
  }
}

}  // namespace tilemoe::producer
