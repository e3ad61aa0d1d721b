#include <algorithm>

#include "../common/flags.cuh"
#include "../common/launch.cuh"
#include "choose.cuh"
#include "logits.h"
#include "place.cuh"
#include "select.cuh"
#include "widen.h"

namespace tilemoe::router {
namespace {

// Kernels behind the first one of a call are launched programmatically: their CTAs may come while
// the kernel in front still runs, and wait for its end before they read anything.
__device__ __forceinline__ unsigned char* begin_kernel(bool first) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  if (threadIdx.x == 0) allow_dependents();
  if (!first) await_prerequisites();
  return shared_bytes;
}

__device__ __forceinline__ void record_start(const Work& w) {
  if (w.r.start_ns != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *w.r.start_ns = now_ns();
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1) choose_kernel(const __grid_constant__ Work w) {
  record_start(w);
  choose<kColumns>(w, blockIdx.x, begin_kernel(true));
}

__global__ void __launch_bounds__(kThreads, 1) count_kernel(const __grid_constant__ Work w) {
  count_routes(w, blockIdx.x, Tables(w, begin_kernel(true)));
}

__global__ void __launch_bounds__(kThreads, 1) place_kernel(const __grid_constant__ Work w) {
  const Tables s(w, begin_kernel(false));
  const int32_t cta = blockIdx.x;
  find_places(w, cta, s);
  if (cta < w.ctas) {
    place_routes(w, cta, s);
  } else {
    write_summary(w, s);
  }
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ Work w) {
  select_routes(w, blockIdx.x, *reinterpret_cast<Selection*>(begin_kernel(false)));
}

__global__ void __launch_bounds__(kSelectThreads) finish_kernel(const __grid_constant__ Work w) {
  begin_kernel(false);
  const int64_t token = blockIdx.x * int64_t{kSelectThreads} + threadIdx.x;
  if (token < w.r.places.tokens) finish_token(w, static_cast<int32_t>(token));
}

// All of it, for few tokens.
template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1) one_kernel(const __grid_constant__ Work w) {
  record_start(w);
  unsigned char* const shared = begin_kernel(true);
  choose<kColumns>(w, 0, shared);
  __syncthreads();
  const Tables s(w, shared);
  find_places(w, 0, s);
  place_routes(w, 0, s);
  if (w.keep < w.limit) {
    select_in_one(w, s);
    const int32_t token = threadIdx.x;
    if (token < w.r.places.tokens) finish_token(w, token);
  }
  write_summary(w, s);
}

__global__ void __launch_bounds__(kThreads, 1) one_places_kernel(const __grid_constant__ Work w) {
  const Tables s(w, begin_kernel(true));
  count_routes(w, 0, s);
  __syncthreads();
  find_places(w, 0, s);
  place_routes(w, 0, s);
  write_summary(w, s);
}

using Kernel = void (*)(Work);

struct Kernels {
  Kernel choose;
  Kernel one;
};

// By columns a lane holds: the next power of two of E / 32.
constexpr Kernels kByColumns[] = {
    {choose_kernel<1>, one_kernel<1>},   {choose_kernel<2>, one_kernel<2>},
    {choose_kernel<4>, one_kernel<4>},   {choose_kernel<8>, one_kernel<8>},
    {choose_kernel<16>, one_kernel<16>}, {choose_kernel<32>, one_kernel<32>},
};

const Kernels& kernels_for(int32_t experts) {
  int i = 0;
  while ((32 << i) < experts) ++i;
  return kByColumns[i];
}

// Without outputs and scratch.
Work cut(int32_t tokens, int32_t experts) {
  Work w{};
  w.cta_tokens = kOneCtaTokens;
  if (tokens > kOneCtaTokens) w.cta_tokens = ceil_div(tokens, kMaxCtas * kWarps) * kWarps;
  w.ctas = std::max(1, ceil_div(tokens, w.cta_tokens));
  w.stride = static_cast<int32_t>(round_up(experts, 4));
  w.lists = 1;
  w.limit = kNoLimit;
  w.keep = kNoLimit;
  return w;
}

int64_t rows_bytes(const Work& w) { return int64_t{4} * w.ctas * w.stride; }  // of counts, of sums

bool valid(const PlacesParams& p) {
  return p.tokens >= 0 && p.topk >= 1 && p.topk <= kMaxTopk && p.experts >= 1 &&
         p.experts <= kMaxRouterExperts && int64_t{p.tokens} * p.topk <= INT32_MAX &&
         cut(p.tokens, p.experts).cta_tokens <= 0xffff && p.counts != nullptr &&
         p.scratch != nullptr &&
         (p.tokens == 0 ||
          (p.expert_ids != nullptr && p.positions != nullptr && p.sources != nullptr));
}

bool valid(const RouterParams& r) {
  const bool ruled = r.drop == Drop::none || (r.drop == Drop::position && r.places.topk <= 2) ||
                     (r.drop == Drop::probability && r.places.topk > 2);
  return valid(r.places) && ruled && r.places.topk <= r.places.experts &&
         (r.drop == Drop::none || r.capacity >= 0) && r.places.expert_ids == r.expert_ids &&
         r.l_aux != nullptr && r.exp_counts != nullptr && r.scratch != nullptr &&
         (r.logit_parts == 1 || r.logit_parts == kLogitParts) && r.logit_slices >= 1 &&
         (r.places.tokens == 0 || (r.logits != nullptr && r.weights != nullptr));
}

Work work_of(const PlacesParams& p) {
  Work w = cut(p.tokens, p.experts);
  w.r.places = p;
  w.counts = reinterpret_cast<uint32_t*>(p.scratch);
  return w;
}

Work work_of(const RouterParams& r) {
  const PlacesParams& p = r.places;
  Work w = work_of(p);
  w.r = r;
  w.lists = p.topk == 2 ? 2 : 1;
  // A token names an expert once, so that an expert gets at most T routes.
  if (r.capacity >= p.tokens) w.r.drop = Drop::none;
  if (w.r.drop != Drop::none) w.keep = r.capacity;
  if (w.r.drop == Drop::position) w.limit = r.capacity;
  auto* const bytes = static_cast<unsigned char*>(r.scratch);
  w.gate_sums = reinterpret_cast<float*>(bytes);
  w.totals = reinterpret_cast<int32_t*>(bytes + rows_bytes(w));
  w.first_row = w.totals + w.stride;
  w.kept_row = w.first_row + w.stride;
  w.candidates = reinterpret_cast<Candidate*>(w.kept_row + w.stride);
  return w;
}

}  // namespace
}  // namespace tilemoe::router

int64_t tilemoe_places_scratch_bytes(int32_t tokens, int32_t experts) {
  using namespace tilemoe::router;
  return rows_bytes(cut(tokens, experts));
}

int64_t tilemoe_router_scratch_bytes(int32_t tokens, int32_t topk, int32_t experts) {
  using namespace tilemoe::router;
  const Work w = cut(tokens, experts);
  const int64_t candidates = topk > 2 ? int64_t{tokens} * topk : 0;
  return rows_bytes(w) + int64_t{4} * 3 * w.stride + int64_t{sizeof(Candidate)} * candidates;
}

cudaError_t tilemoe_router_load() {
  using namespace tilemoe::router;
  const auto load = [](Kernel kernel, size_t shared) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(shared));
  };
  const size_t choose = choose_bytes(tilemoe::kMaxRouterExperts);
  const size_t place = place_bytes(tilemoe::kMaxRouterExperts, 2);
  cudaError_t error = cudaSuccess;
  for (const Kernels& kernels : kByColumns) {
    if (error == cudaSuccess) error = load(kernels.choose, choose);
    if (error == cudaSuccess) error = load(kernels.one, std::max(choose, place));
  }
  for (const Kernel kernel :
       {Kernel{count_kernel}, Kernel{place_kernel}, Kernel{one_places_kernel}}) {
    if (error == cudaSuccess) error = load(kernel, place);
  }
  if (error == cudaSuccess) error = load(select_kernel, sizeof(Selection));
  if (error == cudaSuccess) error = load(finish_kernel, 0);
  if (error == cudaSuccess) error = load_logits();
  if (error == cudaSuccess) error = load_widen();
  return error;
}

cudaError_t tilemoe_places_launch(const tilemoe::PlacesParams* params, cudaStream_t stream) {
  using namespace tilemoe::router;
  if (params == nullptr || !valid(*params)) return cudaErrorInvalidValue;
  const Work w = work_of(*params);
  const size_t shared = place_bytes(w.stride, w.lists);
  if (params->tokens <= kOneCtaTokens) {
    return tilemoe::launch(one_places_kernel, 1, kThreads, shared, stream, false, w);
  }
  const cudaError_t error =
      tilemoe::launch(count_kernel, w.ctas, kThreads, shared, stream, false, w);
  if (error != cudaSuccess) return error;
  return tilemoe::launch(place_kernel, w.ctas + 1, kThreads, shared, stream, true, w);
}

cudaError_t tilemoe_router_launch(const tilemoe::RouterParams* params, cudaStream_t stream) {
  using namespace tilemoe::router;
  if (params == nullptr || !valid(*params)) return cudaErrorInvalidValue;
  const Work w = work_of(*params);
  const int32_t tokens = w.r.places.tokens;
  const int32_t experts = w.r.places.experts;
  const Kernels& kernels = kernels_for(experts);
  const size_t choose = choose_bytes(w.stride);
  const size_t place = place_bytes(w.stride, w.lists);
  if (tokens <= kOneCtaTokens) {
    return tilemoe::launch(kernels.one, 1, kThreads, std::max(choose, place), stream, false, w);
  }
  cudaError_t error = tilemoe::launch(kernels.choose, w.ctas, kThreads, choose, stream, false, w);
  if (error == cudaSuccess) {
    error = tilemoe::launch(place_kernel, w.ctas + 1, kThreads, place, stream, true, w);
  }
  if (error != cudaSuccess || w.keep == w.limit) return error;
  error =
      tilemoe::launch(select_kernel, experts, kSelectThreads, sizeof(Selection), stream, true, w);
  if (error != cudaSuccess) return error;
  return tilemoe::launch(finish_kernel, tilemoe::ceil_div(tokens, kSelectThreads), kSelectThreads,
                         0, stream, true, w);
}
