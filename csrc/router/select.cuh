// Dropping by probability: each expert keeps the candidates with the greatest gate probabilities,
// of equal ones those of lower tokens; then the weights of what is left.
#pragma once

#include "place.cuh"

namespace tilemoe::router {

constexpr int kSelectThreads = 256;
constexpr int kBins = 2048;

// Shared memory.
struct Selection {
  int32_t bins[kBins];
  int32_t sums[2][kSelectThreads / 32];  // scans take turns
  int32_t digit;
  int32_t above;
};

// The key of the candidate that is number `keep` from the top, and how many with this key are kept.
struct Cut {
  uint32_t key;
  int32_t ties;
};

// One CTA of kSelectThreads: digit by digit from the top.
__device__ inline Cut find_cut(const Candidate* candidates, int32_t count, int32_t keep,
                               Selection& s) {
  constexpr int kDigits[3] = {11, 11, 10};
  uint32_t prefix = 0;
  uint32_t known = 0;  // bits of the key that prefix holds
  int shift = 32;
  for (const int bits : kDigits) {
    shift -= bits;
    const int32_t size = 1 << bits;
    for (int32_t i = threadIdx.x; i < size; i += kSelectThreads) s.bins[i] = 0;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < count; i += kSelectThreads) {
      const uint32_t key = candidates[i].key;
      if ((key & known) == prefix) atomicAdd(&s.bins[(key >> shift) & (size - 1)], 1);
    }
    __syncthreads();
    const int32_t each = size / kSelectThreads;
    const int32_t top = size - 1 - threadIdx.x * each;  // this thread's bins: top, top - 1, ...
    int32_t sum = 0;
    for (int32_t i = 0; i < each; ++i) sum += s.bins[top - i];
    int32_t all;
    int32_t above = cta_scan<kSelectThreads>(sum, s.sums[0], &all);
    if (above < keep && keep <= above + sum) {
      int32_t digit = top;
      while (above + s.bins[digit] < keep) above += s.bins[digit--];
      s.digit = digit;
      s.above = above;
    }
    __syncthreads();
    keep -= s.above;
    prefix |= static_cast<uint32_t>(s.digit) << shift;
    known |= static_cast<uint32_t>(size - 1) << shift;
    __syncthreads();
  }
  return {prefix, keep};
}

// One CTA of kSelectThreads: one expert.
__device__ inline void select_routes(const Work& w, int32_t expert, Selection& s) {
  const PlacesParams& p = w.r.places;
  const int32_t count = w.totals[expert];
  const Candidate* const candidates = w.candidates + w.first_row[expert];
  Cut cut = {0, 0};  // every key is greater
  if (w.keep == 0) {
    cut.key = UINT32_MAX;
  } else if (count > w.keep) {
    cut = find_cut(candidates, count, w.keep, s);
  }
  int32_t greater = 0;  // of the candidates so far
  int32_t equal = 0;
  for (int32_t chunk = 0; chunk < count; chunk += kSelectThreads) {
    const int32_t i = chunk + threadIdx.x;
    const Candidate mine = i < count ? candidates[i] : Candidate{0, 0};
    const bool is_greater = i < count && mine.key > cut.key;
    const bool is_equal = i < count && mine.key == cut.key;
    int32_t all;  // two sums in one, neither above kSelectThreads
    const int32_t both = (is_equal ? 0x10000 : 0) + (is_greater ? 1 : 0);
    const int32_t turn = chunk / kSelectThreads % 2;
    const int32_t earlier = cta_scan<kSelectThreads>(both, s.sums[turn], &all);
    const int32_t greater_before = greater + (earlier & 0xffff);
    const int32_t equal_before = equal + (earlier >> 16);
    greater += all & 0xffff;
    equal += all >> 16;
    if (i >= count) continue;
    if (is_greater || (is_equal && equal_before < cut.ties)) {
      put(p, mine.route, mine.route / p.topk, w.kept_row[expert],
          greater_before + min(equal_before, cut.ties));
    } else {
      p.positions[mine.route] = -1;  // for finish_token
    }
  }
}

// One CTA with all routes: the same, each candidate compared with all others of its expert.
// `marks` is clear and has a bit a token.
__device__ inline void select_in_one(const Work& w, const Tables& s) {
  const PlacesParams& p = w.r.places;
  const int32_t routes = p.tokens * p.topk;
  for (int32_t i = threadIdx.x; i < routes; i += kThreads) {
    const Candidate mine = w.candidates[i];
    const int32_t e = p.expert_ids[mine.route];
    const int32_t count = s.total[e];
    int32_t better = 0;
    for (int32_t j = s.first_row[e]; count > w.keep && j < s.first_row[e] + count; ++j) {
      const uint32_t key = w.candidates[j].key;
      better += key > mine.key || (key == mine.key && j < i) ? 1 : 0;
    }
    if (better < w.keep) {
      atomicOr(reinterpret_cast<unsigned long long*>(&s.marks[e]), 1ull << (mine.route / p.topk));
    }
  }
  __syncthreads();
  for (int32_t route = threadIdx.x; route < routes; route += kThreads) {
    const int32_t e = p.expert_ids[route];
    const int32_t token = route / p.topk;
    const uint64_t marks = s.marks[e];
    if ((marks >> token & 1) != 0) {
      put(p, route, token, s.kept_row[e], __popcll(marks & ((1ull << token) - 1)));
    } else {
      p.positions[route] = -1;
    }
  }
  __syncthreads();
}

// One thread, when all routes of the token are decided: its ids and weights.
__device__ __forceinline__ void finish_token(const Work& w, int32_t token) {
  const PlacesParams& p = w.r.places;
  const int64_t first = static_cast<int64_t>(token) * p.topk;
  double kept = 0.0;
  for (int64_t route = first; route < first + p.topk; ++route) {
    if (p.positions[route] >= 0) kept += w.r.weights[route];
  }
  for (int64_t route = first; route < first + p.topk; ++route) {
    if (p.positions[route] >= 0) {
      w.r.weights[route] = normalise(w.r.weights[route], kept);
    } else {
      w.r.expert_ids[route] = -1;
      w.r.weights[route] = 0.0f;
    }
  }
}

}  // namespace tilemoe::router
