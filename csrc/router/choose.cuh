// From logits to choices: a warp a token. Softmax, top-k, and what the CTA's tokens add to the
// counts and to the sums of gate probabilities (l_aux).
//
// The softmax is torch.softmax's to the last bit for rows of up to 1024: lane l holds columns l,
// l + 32, ...; a lane adds its exponentials in that order from 0, then the lanes are added by
// exchange over 16, 8, 4, 2, 1; no reciprocal. Choices depend on it: torch compares probabilities,
// and two logits that differ may have the same one.
#pragma once

#include "work.cuh"

namespace tilemoe::router {

inline size_t choose_bytes(int32_t stride) { return sizeof(float) * stride * (kWarps + 1); }

// Whether there is such a column: kColumns is the least power of two that holds E, so that half of
// a lane's columns are there without asking.
template <int kColumns>
__device__ __forceinline__ bool is_column(int i, int32_t experts) {
  return i < kColumns / 2 || i * 32 + static_cast<int>(threadIdx.x % 32) < experts;
}

// The columns of one token that a lane holds. What was made in parts is added, the smallest first.
template <int kColumns>
__device__ __forceinline__ void load_logits(const Work& w, int32_t token, int32_t last,
                                            float (&x)[kColumns]) {
  const int lane = threadIdx.x % 32;
  const int32_t experts = w.r.places.experts;
  const int32_t parts = w.r.logit_parts;
  const int64_t row = int64_t{parts} * experts;
  const int64_t slice = w.r.places.tokens * row;
  const float* const of_token = w.r.logits + token * row;
  const auto add_slices = [&](const float* at) {
    float sum = *at;
#pragma unroll 4
    for (int s = 1; s < w.r.logit_slices; ++s) sum += at[s * slice];
    return sum;
  };
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    x[i] = -INFINITY;
    if (token >= last || !is_column<kColumns>(i, experts)) continue;
    const float* const at = of_token + i * 32 + lane;
    x[i] = add_slices(at + (parts - 1) * experts);
    for (int part = parts - 2; part >= 0; --part) x[i] += add_slices(at + part * experts);
  }
}

template <int kColumns>
__device__ __forceinline__ void softmax(const float (&x)[kColumns], float (&gates)[kColumns]) {
  float most = x[0];
#pragma unroll
  for (int i = 1; i < kColumns; ++i) most = fmaxf(most, x[i]);
  most = value_of(__reduce_max_sync(kAllLanes, key_of(most)));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    gates[i] = expf(x[i] - most);
    sum += gates[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) gates[i] = gates[i] / sum;
}

// The greatest of keys, one a lane, and its column; of equal ones the lowest column.
struct Best {
  uint32_t key;
  int32_t column;
};
__device__ __forceinline__ Best best_of_warp(uint32_t key, uint32_t column) {
  const uint32_t most = __reduce_max_sync(kAllLanes, key);
  const uint32_t first = __reduce_min_sync(kAllLanes, key == most ? column : UINT32_MAX);
  return {most, static_cast<int32_t>(first)};
}

struct Choice {
  int32_t expert = -1;
  float gate = 0.0f;
};

// The column with the greatest value, other than `taken`, and its gate.
template <int kColumns>
__device__ __forceinline__ Choice best_choice(const float (&values)[kColumns],
                                              const float (&gates)[kColumns], int32_t experts,
                                              int32_t taken) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
  int32_t column = lane;
  float gate = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int32_t e = i * 32 + lane;
    const bool is_free = is_column<kColumns>(i, experts) && e != taken;
    const uint32_t key = is_free ? key_of(values[i]) : 0;
    if (key > most) most = key, column = e, gate = gates[i];
  }
  const Best best = best_of_warp(most, column);
  return {best.column, __shfl_sync(kAllLanes, gate, best.column % 32)};
}

// Lane 0 gets the first choice, all others the second one, if there is one.
template <int kColumns>
__device__ __forceinline__ Choice choose_two(const float (&x)[kColumns],
                                             const float (&gates)[kColumns], int32_t experts,
                                             int32_t topk) {
  const Choice first = best_choice(gates, gates, experts, -1);
  if (topk == 1) return first;
  // DeepSpeed's top2gating compares logits for the second choice.
  const Choice second = best_choice(x, gates, experts, first.expert);
  return threadIdx.x % 32 == 0 ? first : second;
}

// Lane k gets choice k.
template <int kColumns>
__device__ __forceinline__ Choice choose_many(const float (&gates)[kColumns], int32_t experts,
                                              int32_t topk) {
  const int lane = threadIdx.x % 32;
  uint32_t keys[kColumns];  // 0 when taken
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    keys[i] = is_column<kColumns>(i, experts) ? key_of(gates[i]) : 0;
  Choice mine;
  for (int k = 0; k < topk; ++k) {
    uint32_t most = keys[0];
    int32_t column = lane;
#pragma unroll
    for (int i = 1; i < kColumns; ++i) {
      if (keys[i] > most) most = keys[i], column = i * 32 + lane;
    }
    const Best best = best_of_warp(most, column);
    if (lane == k) mine = {best.column, value_of(best.key)};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (best.column == i * 32 + lane) keys[i] = 0;
    }
  }
  return mine;
}

// One CTA. Writes choices, gates (weights where nothing is dropped), counts and sums of its tokens.
template <int kColumns>
__device__ void choose(const Work& w, int32_t cta, unsigned char* shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t experts = w.r.places.experts;
  const int32_t topk = w.r.places.topk;
  auto* const counts = reinterpret_cast<uint32_t*>(shared);        // [stride]
  auto* const sums = reinterpret_cast<float*>(counts + w.stride);  // [kWarps, stride]
  float* const own_sums = sums + warp * w.stride;
  for (int32_t e = threadIdx.x; e < w.stride; e += kThreads) counts[e] = 0;
  for (int32_t e = lane; e < w.stride; e += 32) own_sums[e] = 0.0f;
  __syncthreads();

  constexpr bool kAhead = kColumns <= 8;  // more would not fit into registers
  const Range tokens = tokens_of(w, cta);
  float next[kColumns];
  if (kAhead) load_logits(w, tokens.first + warp, tokens.last, next);
#pragma unroll 1
  for (int32_t t = tokens.first + warp; t < tokens.last; t += kWarps) {
    float x[kColumns];
    float gates[kColumns];
    if (kAhead) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[i] = next[i];
      load_logits(w, t + kWarps, tokens.last, next);
    } else {
      load_logits(w, t, tokens.last, x);
    }
    softmax(x, gates);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (is_column<kColumns>(i, experts)) own_sums[i * 32 + lane] += gates[i];
    }
    const Choice choice =
        topk <= 2 ? choose_two(x, gates, experts, topk) : choose_many(gates, experts, topk);
    float weight = choice.gate;
    if (w.r.drop == Drop::none && topk > 1) {
      double all = 0.0;
      for (int k = 0; k < topk; ++k) all += __shfl_sync(kAllLanes, choice.gate, k);
      weight = normalise(choice.gate, all);
    }
    if (lane < topk) {
      const int64_t route = static_cast<int64_t>(t) * topk + lane;
      w.r.expert_ids[route] = choice.expert;
      w.r.weights[route] = weight;
      atomicAdd(&counts[choice.expert], w.lists == 2 && lane == 1 ? 0x10000u : 1u);
    }
  }

  __syncthreads();
  const int64_t row = static_cast<int64_t>(cta) * w.stride;
  for (int32_t e = threadIdx.x; e < w.stride; e += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += sums[i * w.stride + e];
    w.gate_sums[row + e] = sum;
    w.counts[row + e] = counts[e];
  }
}

}  // namespace tilemoe::router
