#include "../common/wait.cuh"
#include "exchange.h"
#include "plan_device.cuh"

namespace tilemoe::exchange {
namespace {

constexpr size_t kSharedLimit = 232448;
constexpr int kThreads = plan::kThreads;

__device__ __forceinline__ CountRow& count_row(const RankView& view, int32_t block, uint64_t epoch,
                                               int32_t source) {
  constexpr int32_t kHalvesOfC = kFault == Fault::one_half ? 1 : kCountHalves;
  const int64_t row = static_cast<int64_t>(epoch % kHalvesOfC) * view.world + source;
  return *reinterpret_cast<CountRow*>(view.blocks[block] + view.offsets.counts +
                                      row * view.offsets.count_row_bytes);
}
__device__ __forceinline__ int32_t* counts_of(CountRow& row) {
  return reinterpret_cast<int32_t*>(&row + 1);
}

// Nobody else touches this epoch's half before it has the count row that is sent behind this.
__device__ void zero_half(const ExchangeParams& p, uint64_t epoch) {
  auto* const words = reinterpret_cast<uint32_t*>(half_of(p.view, epoch));
  const int32_t flags = static_cast<int32_t>(sizeof(Half) / 4) + p.plan.capacity.bands;
  for (int32_t i = threadIdx.x; i < flags; i += kThreads) words[i] = 0;
  for (int32_t s = threadIdx.x; s < p.view.world; s += kThreads) {
    *arrival_word(p.view, p.view.rank, epoch, s) = 0;
  }
}

__device__ void send_counts(const ExchangeParams& p, uint64_t epoch, int32_t experts) {
  const RankView& view = p.view;
  for (int32_t i = threadIdx.x; i < view.world * experts; i += kThreads) {
    const int32_t peer = i / experts;
    const int32_t expert = i - peer * experts;
    counts_of(count_row(view, peer, epoch, view.rank))[expert] =
        p.status == 0 ? p.own_counts[expert] : 0;
  }
  for (int32_t peer = threadIdx.x; peer < view.world; peer += kThreads) {
    CountRow& row = count_row(view, peer, epoch, view.rank);
    row.layer = p.layer;
    row.tokens = p.tokens;
    row.status = p.status;
  }
  random_delay(view);
  __syncthreads();
  for (int32_t peer = threadIdx.x; peer < view.world; peer += kThreads) {
    publish_ready(&count_row(view, peer, epoch, view.rank).ready, epoch);
  }
}

__device__ bool await_counts(const ExchangeParams& p, uint64_t epoch) {
  const RankView& view = p.view;
  bool good = true;
  random_delay(view);
  for (int32_t s = threadIdx.x; s < view.world; s += kThreads) {
    const uint64_t* const ready = &count_row(view, view.rank, epoch, s).ready;
    uint64_t polls = 0;
    good = good && wait_equal(view, p.group_timeout_ns, epoch, Wait::counts, s, -1, epoch, &polls,
                              [&] { return read_system(ready); });
  }
  return __syncthreads_and(good);
}

// Every rank judges the same rows in the same order, so every rank finds the same. One thread.
__device__ ErrorRecord judge(const ExchangeParams& p, uint64_t epoch) {
  const RankView& view = p.view;
  const auto row = [&](int32_t s) -> const CountRow& {
    return count_row(view, view.rank, epoch, s);
  };
  ErrorRecord error{Outcome::ok, Wait::none, view.rank, -1, -1, 0, 0, epoch};
  for (int32_t s = 0; s < view.world; ++s) {
    if (row(s).status == 0) continue;
    error.outcome = Outcome::rank_failure;
    error.peer = s;
    return error;
  }
  for (int32_t s = 1; s < view.world; ++s) {
    if (row(s).layer == row(0).layer) continue;
    error.outcome = Outcome::layer_mismatch;
    error.peer = s;
    error.seen = row(s).layer;
    error.wanted = row(0).layer;
    return error;
  }
  for (int32_t s = 0; s < view.world; ++s) {
    if (row(s).tokens <= p.max_tokens) continue;
    error.outcome = Outcome::capacity;
    error.peer = s;
    error.seen = row(s).tokens;
    error.wanted = p.max_tokens;
    return error;
  }
  return error;
}

__device__ void exchange(const ExchangeParams& p, uint64_t epoch, int32_t experts) {
  const RankView& view = p.view;
  State& state = state_of(view);
  __shared__ Outcome outcome;
  zero_half(p, epoch);
  bool good = !__syncthreads_or(threadIdx.x == 0 && group_failed(view));
  if (good) {
    send_counts(p, epoch, experts);
    good = await_counts(p, epoch);
  }
  if (threadIdx.x == 0) {
    ErrorRecord error{};
    if (good) {
      error = judge(p, epoch);
    } else {
      error = failure_of(view, view.rank).record;
    }
    outcome = error.outcome;
    state.outcome = outcome;
    if (outcome != Outcome::ok) tell_host(view, error);
  }
  __syncthreads();
  const bool use = outcome == Outcome::ok;
  for (int32_t i = threadIdx.x; i < view.world * experts; i += kThreads) {
    const int32_t source = i / experts;
    p.counts[i] =
        use ? counts_of(count_row(view, view.rank, epoch, source))[i - source * experts] : 0;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1)
    exchange_kernel(const __grid_constant__ ExchangeParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  State& state = state_of(p.view);
  const uint64_t epoch = state.epoch + 1;
  __syncthreads();  // all have read it
  const int32_t experts = p.view.world * p.plan.params.local_experts;
  exchange(p, epoch, experts);
  plan::Planner(p.plan, *reinterpret_cast<plan::Shared*>(shared_bytes)).make();
  if (threadIdx.x != 0) return;
  state.epoch = epoch;
  const PlanSizes sizes = *p.plan.sizes;
  const bool fits = *p.plan.overflow == 0;
  state.bands = fits ? sizes.bands : 0;
  state.chunks = fits ? sizes.chunks : 0;
  state.segments = fits ? sizes.segments : 0;
  if (fits) return;
  // Peers follow their own plans and would wait for this rank's rows.
  state.outcome = Outcome::plan_overflow;
  const ErrorRecord error{Outcome::plan_overflow,
                          Wait::none,
                          p.view.rank,
                          p.view.rank,
                          -1,
                          static_cast<uint64_t>(sizes.rows),
                          static_cast<uint64_t>(p.plan.capacity.rows),
                          epoch};
  fail_group(p.view, error);
  tell_host(p.view, error);
}

bool valid(const ExchangeParams& p) {
  const PlanParams& plan = p.plan.params;
  return p.view.world == plan.world && p.view.rank == plan.rank && plan.world >= 1 &&
         plan.world <= kMaxWorld && plan.rank >= 0 && plan.rank < plan.world &&
         plan.local_experts >= 1 && plan.local_experts <= kPlanMaxLocalExperts &&
         plan.tile_m >= 1 && plan.bands_per_segment >= 1 && plan.local_tail_bands >= -1 &&
         plan.chunk_rows >= 1 &&
         (plan.layout == Layout::compact || plan.layout == Layout::aligned) &&
         p.counts == p.plan.counts && p.tokens >= 0 &&
         p.view.half_bytes >= half_bytes(p.plan.capacity.bands);
}

}  // namespace
}  // namespace tilemoe::exchange

void tilemoe_block_offsets(const tilemoe::BlockShape* shape, tilemoe::BlockOffsets* offsets) {
  *offsets = tilemoe::block_offsets(*shape);
}
int64_t tilemoe_half_bytes(int32_t max_bands) { return tilemoe::half_bytes(max_bands); }
int64_t tilemoe_state_bytes(int32_t max_bands) { return tilemoe::state_bytes(max_bands); }

cudaError_t tilemoe_exchange_load() {
  return cudaFuncSetAttribute(tilemoe::exchange::exchange_kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tilemoe::exchange::kSharedLimit - 1024);
}

cudaError_t tilemoe_exchange_launch(const tilemoe::ExchangeParams* params, cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || !exchange::valid(*params)) return cudaErrorInvalidValue;
  const size_t bytes = plan::shared_bytes(params->plan.params);
  if (bytes > exchange::kSharedLimit - 1024) return cudaErrorInvalidValue;
  exchange::exchange_kernel<<<1, exchange::kThreads, bytes, stream>>>(*params);
  return cudaGetLastError();
}
