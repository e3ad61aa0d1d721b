// How the router's work is cut, and its scratch.
//
// Tokens go to CTAs in equal blocks of consecutive ones. A CTA counts its routes to each expert
// (choose.cuh), and the counts of all CTAs before it say where its own routes stand (place.cuh). Of
// k = 2 first and second choices are counted apart: they are dropped in that order. Where routes
// are kept by probability, what is placed are candidates of the experts at first (select.cuh).
#pragma once

#include <cstdint>

#include "../common/integers.h"
#include "../common/warp.cuh"
#include "router.h"

namespace tilemoe::router {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCtas = 128;      // every CTA reads the counts of all
constexpr int kChunkTokens = 64;   // bits of a mark
constexpr int kOneCtaTokens = 16;  // up to here one launch of one CTA does it all
constexpr int32_t kNoLimit = INT32_MAX;
constexpr float kEpsilon = 1.1920928955078125e-07f;  // torch.finfo(torch.float32).eps

static_assert(kOneCtaTokens <= kChunkTokens);

// A candidate of an expert, where routes are kept by probability.
struct alignas(8) Candidate {
  uint32_t key;   // key_of its gate
  int32_t route;  // token * K + k
};

struct Work {
  RouterParams r;  // for places alone: only r.places
  int32_t ctas;
  int32_t cta_tokens;  // tokens a CTA, the last one fewer; at most 65535
  int32_t stride;      // E, a multiple of 4: a row of counts or sums is read in 16 bytes
  int32_t lists;       // 2 where first and second choices are told apart (k = 2), else 1
  int32_t limit;       // routes that an expert may place
  int32_t keep;        // routes that it keeps in the end; less than limit only by probability
  uint32_t* counts;    // [ctas, stride] routes of a CTA: first list low, second list high 16 bits
  float* gate_sums;    // [ctas, stride] sums of gate probabilities
  int32_t* totals;     // [stride] routes before dropping; this and below only by probability
  int32_t* first_row;  // [stride] candidates of lower experts
  int32_t* kept_row;   // [stride] kept routes of lower experts
  Candidate* candidates;  // [T * K] in order of (expert, token)
};

struct Range {
  int32_t first;
  int32_t last;  // one behind
};

__device__ __forceinline__ Range tokens_of(const Work& w, int32_t cta) {
  const int32_t first = cta * w.cta_tokens;
  return {first, min(first + w.cta_tokens, w.r.places.tokens)};
}

// Order of floats as unsigned numbers from 1 on (0 is for nothing); NaN is the greatest, as in
// torch.
__device__ __forceinline__ uint32_t key_of(float value) {
  if (isnan(value)) return UINT32_MAX;
  const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);  // -0 and 0 are equal
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

// A kept route's weight; DeepSpeed renormalises where k > 1.
__device__ __forceinline__ float normalise(float gate, double kept_gates) {
  return gate / fmaxf(static_cast<float>(kept_gates), kEpsilon);
}

}  // namespace tilemoe::router
