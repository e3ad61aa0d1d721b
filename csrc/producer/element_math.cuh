// What the producer's epilogue does to single values: conversions and activations.
#pragma once

#include <cutlass/numeric_types.h>

#include "../common/pairs.cuh"
#include "producer.h"

namespace tilemoe {

template <>
struct Pair<cutlass::bfloat16_t> : Pair<__nv_bfloat16> {};
template <>
struct Pair<cutlass::half_t> : Pair<__half> {};

}  // namespace tilemoe

namespace tilemoe::producer {

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
