// Where each route stands, from the counts of all CTAs; which are dropped by position; the summary.
#pragma once

#include "work.cuh"

namespace tilemoe::router {

// Shared memory. Arrays of two lists hold [lists, stride].
struct Tables {
  float4* partial;  // [kThreads], of the summary
  uint64_t* marks;  // of two lists: tokens of a chunk that have a route to the expert, a bit each
  int32_t* before;  // of two lists: routes of earlier tokens
  int32_t* total;   // of two lists: routes of all tokens
  int32_t* first_row;  // [stride] placed routes of lower experts
  int32_t* kept_row;   // [stride] kept routes of lower experts
  int32_t* sums;       // [kWarps]

  __device__ Tables(const Work& w, unsigned char* shared) {
    partial = reinterpret_cast<float4*>(shared);
    marks = reinterpret_cast<uint64_t*>(partial + kThreads);
    before = reinterpret_cast<int32_t*>(marks + w.lists * w.stride);
    total = before + w.lists * w.stride;
    first_row = total + w.lists * w.stride;
    kept_row = first_row + w.stride;
    sums = kept_row + w.stride;
  }
};

inline size_t place_bytes(int32_t stride, int32_t lists) {
  return sizeof(float4) * kThreads + (sizeof(uint64_t) + 2 * sizeof(int32_t)) * lists * stride +
         sizeof(int32_t) * (2 * stride + kWarps);
}

// A thread's share of a sum over all CTAs: four experts, of the CTAs group, group + groups, ...
struct Share {
  int32_t quads;
  int32_t groups;
  int32_t group;  // from groups on the thread has no share
  int32_t quad;

  __device__ explicit Share(const Work& w) {
    quads = w.stride / 4;
    groups = min(min(kThreads / quads, 32), w.ctas);  // one thread adds up the groups of an expert
    group = threadIdx.x / quads;
    quad = threadIdx.x - group * quads;
  }
};

// Routes that an expert keeps: first choices before second ones.
struct Room {
  int32_t first;
  int32_t second;

  __device__ Room(const Work& w, const Tables& s, int32_t expert, int32_t limit) {
    first = min(s.total[expert], limit);
    second = w.lists == 2 ? min(s.total[w.stride + expert], limit - first) : 0;
  }
};

// One CTA, places alone: counts its routes.
__device__ inline void count_routes(const Work& w, int32_t cta, const Tables& s) {
  const PlacesParams& p = w.r.places;
  const Range tokens = tokens_of(w, cta);
  for (int32_t e = threadIdx.x; e < w.stride; e += kThreads) s.marks[e] = 0, s.total[e] = 0;
  __syncthreads();
  for (int32_t chunk = tokens.first; chunk < tokens.last; chunk += kChunkTokens) {
    const int32_t routes = min(kChunkTokens, tokens.last - chunk) * p.topk;
    const int32_t* const ids = p.expert_ids + static_cast<int64_t>(chunk) * p.topk;
    for (int32_t r = threadIdx.x; r < routes; r += kThreads) {
      const int32_t e = ids[r];
      if (static_cast<uint32_t>(e) >= static_cast<uint32_t>(p.experts)) continue;
      atomicOr(reinterpret_cast<unsigned long long*>(&s.marks[e]), 1ull << (r / p.topk));
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < w.stride; e += kThreads) {
      s.total[e] += __popcll(s.marks[e]);
      s.marks[e] = 0;
    }
    __syncthreads();
  }
  for (int32_t e = threadIdx.x; e < w.stride; e += kThreads) {
    w.counts[static_cast<int64_t>(cta) * w.stride + e] = s.total[e];
  }
}

// `before` and `total` from the counts of all CTAs; clears `marks`.
__device__ inline void read_counts(const Work& w, int32_t cta, const Tables& s) {
  for (int32_t i = threadIdx.x; i < w.lists * w.stride; i += kThreads) {
    s.before[i] = 0;
    s.total[i] = 0;
    s.marks[i] = 0;
  }
  __syncthreads();
  const auto [quads, groups, group, quad] = Share(w);
  if (group < groups) {
    const auto* const rows = reinterpret_cast<const uint4*>(w.counts);
    int32_t before[2][4] = {};
    int32_t total[2][4] = {};
#pragma unroll 8
    for (int32_t c = group; c < w.ctas; c += groups) {
      const uint4 row = rows[static_cast<int64_t>(c) * quads + quad];
      const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t low = w.lists == 2 ? words[i] & 0xffff : words[i];
        const int32_t high = w.lists == 2 ? words[i] >> 16 : 0;
        total[0][i] += low, total[1][i] += high;
        if (c < cta) before[0][i] += low, before[1][i] += high;
      }
    }
#pragma unroll
    for (int list = 0; list < 2; ++list) {
      if (list == w.lists) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t at = list * w.stride + quad * 4 + i;
        if (total[list][i] != 0) atomicAdd(&s.total[at], total[list][i]);
        if (before[list][i] != 0) atomicAdd(&s.before[at], before[list][i]);
      }
    }
  }
  __syncthreads();
}

// Exclusive prefix over experts of what each keeps of `limit`.
__device__ inline void find_rows(const Work& w, const Tables& s, int32_t limit, int32_t* rows) {
  constexpr int kEach = kMaxRouterExperts / kThreads;
  int32_t kept[kEach];
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t e = threadIdx.x * kEach + i;
    kept[i] = 0;
    if (e < w.r.places.experts) {
      const Room room(w, s, e, limit);
      kept[i] = room.first + room.second;
    }
    sum += kept[i];
  }
  int32_t all;
  int32_t row = cta_scan<kThreads>(sum, s.sums, &all);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t e = threadIdx.x * kEach + i;
    if (e < w.stride) rows[e] = row;
    row += kept[i];
  }
  __syncthreads();
}

// A kept route's place among its expert's.
__device__ __forceinline__ void put(const PlacesParams& p, int64_t route, int32_t token,
                                    int32_t first_row, int32_t position) {
  p.positions[route] = position;
  p.sources[first_row + position] = token;
}

// One CTA: places its tokens' routes, or lists them as candidates of their experts.
__device__ inline void place_routes(const Work& w, int32_t cta, const Tables& s) {
  const PlacesParams& p = w.r.places;
  const Range tokens = tokens_of(w, cta);
  const bool drops = w.limit != kNoLimit;
  for (int32_t chunk = tokens.first; chunk < tokens.last; chunk += kChunkTokens) {
    const int32_t routes = min(kChunkTokens, tokens.last - chunk) * p.topk;
    const int64_t first_route = static_cast<int64_t>(chunk) * p.topk;
    for (int32_t r = threadIdx.x; r < routes; r += kThreads) {
      const int32_t e = p.expert_ids[first_route + r];
      if (static_cast<uint32_t>(e) >= static_cast<uint32_t>(p.experts)) continue;
      const int32_t list = w.lists == 2 ? r % 2 : 0;
      atomicOr(reinterpret_cast<unsigned long long*>(&s.marks[list * w.stride + e]),
               1ull << (r / p.topk));
    }
    __syncthreads();
    for (int32_t pass = 0; pass < routes; pass += kThreads) {  // whole warps, for the exchange
      const int32_t r = pass + threadIdx.x;
      const int64_t route = first_route + r;
      const int32_t token = chunk + r / p.topk;
      const int32_t e = r < routes ? p.expert_ids[route] : -1;
      bool kept = static_cast<uint32_t>(e) < static_cast<uint32_t>(p.experts);
      if (kept) {
        const uint64_t earlier = (1ull << (token - chunk)) - 1;
        const int32_t first = s.before[e] + __popcll(s.marks[e] & earlier);
        int32_t second = 0;
        if (w.lists == 2) {
          second = s.before[w.stride + e] + __popcll(s.marks[w.stride + e] & earlier);
        }
        const Room room(w, s, e, w.limit);
        kept = w.lists == 2 && r % 2 == 1 ? second < room.second : first < room.first;
        const int32_t position = min(first, room.first) + min(second, room.second);
        if (w.keep < w.limit) {
          w.candidates[s.first_row[e] + first] = {key_of(w.r.weights[route]),
                                                  static_cast<int32_t>(route)};
        } else if (kept) {
          put(p, route, token, s.first_row[e], position);
        }
      }
      if (!drops) continue;
      const float gate = kept ? w.r.weights[route] : 0.0f;
      const float other = __shfl_xor_sync(kAllLanes, gate, 1);  // the token's other route, k = 2
      if (r >= routes) continue;
      if (!kept) w.r.expert_ids[route] = -1;
      if (p.topk == 2 || !kept) {
        w.r.weights[route] = kept ? normalise(gate, double{gate} + other) : 0.0f;
      }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < w.lists * w.stride; i += kThreads) {
      s.before[i] += __popcll(s.marks[i]);
      s.marks[i] = 0;
    }
    __syncthreads();
  }
}

// One CTA: l_aux. DeepSpeed's is the sum over experts of (mean gate) x (share of tokens), times E;
// the share is that of first choices for k <= 2, and that of all routes, over k, for more.
__device__ inline void write_loss(const Work& w, const Tables& s) {
  const PlacesParams& p = w.r.places;
  const auto [quads, groups, group, quad] = Share(w);
  if (group < groups) {
    const auto* const rows = reinterpret_cast<const float4*>(w.gate_sums);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int32_t c = group; c < w.ctas; c += groups) {
      const float4 row = rows[static_cast<int64_t>(c) * quads + quad];
      sum.x += row.x, sum.y += row.y, sum.z += row.z, sum.w += row.w;
    }
    s.partial[group * quads + quad] = sum;
  }
  __syncthreads();
  const auto* const partial = reinterpret_cast<const float*>(s.partial);  // [groups, stride]
  const float tokens = static_cast<float>(max(p.tokens, 1));
  float loss = 0.0f;
  for (int32_t e = threadIdx.x; e < p.experts; e += kThreads) {
    float sum = 0.0f;
    for (int32_t i = 0; i < groups; ++i) sum += partial[i * w.stride + e];
    loss += (sum / tokens) * (static_cast<float>(s.total[e]) / tokens);
  }
  for (int step = 16; step > 0; step /= 2) loss += __shfl_xor_sync(kAllLanes, loss, step);
  auto* const of_warps = reinterpret_cast<float*>(s.sums);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = loss;
  __syncthreads();
  if (threadIdx.x != 0) return;
  loss = 0.0f;
  for (int i = 0; i < kWarps; ++i) loss += of_warps[i];
  loss *= static_cast<float>(p.experts);
  *w.r.l_aux = p.topk > 2 ? loss / static_cast<float>(p.topk) : loss;
}

// One CTA: what is said once of all tokens.
__device__ inline void write_summary(const Work& w, const Tables& s) {
  for (int32_t e = threadIdx.x; e < w.r.places.experts; e += kThreads) {
    const int32_t all = s.total[e] + (w.lists == 2 ? s.total[w.stride + e] : 0);
    const Room room(w, s, e, w.keep);
    w.r.places.counts[e] = room.first + room.second;
    if (w.r.exp_counts != nullptr) w.r.exp_counts[e] = all;
    if (w.keep == w.limit) continue;
    w.totals[e] = all;
    w.first_row[e] = s.first_row[e];
    w.kept_row[e] = s.kept_row[e];
  }
  if (w.r.l_aux != nullptr) write_loss(w, s);
}

// One CTA: fills the tables from the counts of all.
__device__ inline void find_places(const Work& w, int32_t cta, const Tables& s) {
  read_counts(w, cta, s);
  find_rows(w, s, w.limit, s.first_row);
  if (w.keep < w.limit) find_rows(w, s, w.keep, s.kept_row);
}

}  // namespace tilemoe::router
