#include <cstddef>

#include "../common/launch.cuh"
#include "../common/record.cuh"
#include "../common/wait.cuh"
#include "exchange.h"
#include "plan_device.cuh"

namespace tilemoe::exchange {
namespace {

constexpr size_t kDynamicLimit = 232448 - 2048;  // of shared memory; the rest is static
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
  if constexpr (kFault != Fault::counters_not_zeroed) {
    for (int32_t i = threadIdx.x; i < flags; i += kThreads) words[i] = 0;
  }
  auto* const slots = reinterpret_cast<uint4*>(slot_rows_of(p.view, p.view.rank, epoch));
  const int32_t vectors = static_cast<int32_t>(p.view.offsets.slot_half_bytes / sizeof(uint4));
  if constexpr (kFault != Fault::rows_not_zeroed) {
    for (int32_t i = threadIdx.x; i < vectors; i += kThreads) slots[i] = {0, 0, 0, 0};
  }
  if constexpr (kFault != Fault::arrivals_not_zeroed) {
    for (int32_t s = threadIdx.x; s < p.view.world; s += kThreads) {
      *arrival_word(p.view, p.view.rank, epoch, s) = 0;
    }
  }
}

__device__ __forceinline__ int32_t own_count(const ExchangeParams& p, int32_t experts,
                                             int32_t expert) {
  return p.status == 0 && expert < experts ? p.own_counts[expert] : 0;
}

// `first`: own_count of the expert that has this thread's number.
__device__ void send_counts(const ExchangeParams& p, uint64_t epoch, int32_t experts,
                            int32_t first) {
  const RankView& view = p.view;
  for (int32_t expert = threadIdx.x; expert < experts; expert += kThreads) {
    const int32_t count = expert < kThreads ? first : own_count(p, experts, expert);
    for (int32_t peer = 0; peer < view.world; ++peer) {
      counts_of(count_row(view, peer, epoch, view.rank))[expert] = count;
    }
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

// What the ranks said, for one thread to judge without going to memory row by row.
struct Said {
  uint64_t layer[kMaxWorld];
  int64_t tokens[kMaxWorld];
  int32_t status[kMaxWorld];
};

__device__ bool await_counts(const ExchangeParams& p, uint64_t epoch, Said& said) {
  const RankView& view = p.view;
  bool good = true;
  random_delay(view);
  for (int32_t s = threadIdx.x; s < view.world; s += kThreads) {
    const CountRow& row = count_row(view, view.rank, epoch, s);
    uint64_t polls = 0;
    if constexpr (kFault != Fault::no_count_wait) {
      good = good && wait_equal(view, p.group_timeout_ns, epoch, Wait::counts, s, -1, epoch, &polls,
                                [&] { return read_system(&row.ready); });
    }
    said.layer[s] = row.layer;
    said.tokens[s] = row.tokens;
    said.status[s] = row.status;
  }
  return __syncthreads_and(good);
}

// One thread, in front of everything. True if this rank has gone on behind a failure that its host
// had not heard of, which fails the group. `unheard`: State::unheard.
__device__ bool fail_if_out_of_step(const RankView& view, uint64_t unheard, uint64_t epoch) {
  if (unheard == 0) return false;
  const int32_t peer = state_of(view).unheard_peer;
  fail_group(view, {Outcome::out_of_step, Wait::none, view.rank, peer, -1, unheard, 0, epoch});
  return true;
}

// This rank's host knows why without being told: it raises that in this very call.
__device__ bool is_at_fault(const ExchangeParams& p) {
  return p.status == 1 || (p.status == 0 && p.tokens > p.max_tokens);
}

// Every rank judges the same rows in the same order, so every rank finds the same. One thread.
__device__ ErrorRecord judge(const ExchangeParams& p, uint64_t epoch, const Said& said) {
  const RankView& view = p.view;
  ErrorRecord error{Outcome::ok, Wait::none, view.rank, -1, -1, 0, 0, epoch, p.layer};
  int32_t failed = -1, changed = -1, changes = 0;  // the first of each kind
  for (int32_t s = view.world - 1; s >= 0; --s) {
    if (said.status[s] == 0) continue;
    if (said.status[s] == 2) {
      changed = s, ++changes;
    } else {
      failed = s;
    }
  }
  if (failed >= 0 || changed >= 0) {
    // A rank that has failed is the cause, whoever has changed beside it: it has raised why.
    error.outcome = Outcome::rank_failure;
    error.peer = failed >= 0 ? failed : changed;
    error.seen = failed >= 0 ? 0 : changes;
    error.wanted = view.world;
    return error;
  }
  for (int32_t s = 1; s < view.world; ++s) {
    if (said.layer[s] == said.layer[0]) continue;
    error.outcome = Outcome::layer_mismatch;
    error.peer = s;
    error.seen = said.layer[s];
    error.wanted = said.layer[0];
    return error;
  }
  for (int32_t s = 0; s < view.world; ++s) {
    if (said.tokens[s] <= p.max_tokens) continue;
    error.outcome = Outcome::capacity;
    error.peer = s;
    error.seen = said.tokens[s];
    error.wanted = p.max_tokens;
    return error;
  }
  return error;
}

// Leaves C in shared memory, for the planner, and in plan.counts.
__device__ void exchange(const ExchangeParams& p, uint64_t epoch, uint64_t unheard, int32_t experts,
                         int32_t* counts) {
  const RankView& view = p.view;
  State& state = state_of(view);
  __shared__ Said said;
  __shared__ Outcome outcome;
  const int32_t first = own_count(p, experts, threadIdx.x);  // under way meanwhile
  zero_half(p, epoch);
  bool good = !__syncthreads_or(threadIdx.x == 0 &&
                                (fail_if_out_of_step(view, unheard, epoch) || group_failed(view)));
  if (good) {
    send_counts(p, epoch, experts, first);
    good = await_counts(p, epoch, said);
  }
  // GEMM 1's CTAs may come while the plan is made, not before: what the peers sent may itself have
  // waited for kernels that need these SMs.
  if (threadIdx.x == 0) {
    allow_dependents();
    ErrorRecord error{};
    if (good) {
      error = judge(p, epoch, said);
    } else {
      error = failure_of(view, view.rank).record;
      // Without C there is no plan, whatever stands there.
      if (error.outcome == Outcome::ok) error.outcome = Outcome::deadline;
    }
    outcome = error.outcome;
    state.outcome = outcome;
    if (outcome != Outcome::ok && !(good && is_at_fault(p))) {
      if (good) {
        state.unheard = epoch;
        state.unheard_peer = error.peer;
      }
      tell_host(view, error);
    }
  }
  __syncthreads();
  const bool use = outcome == Outcome::ok;
  for (int32_t i = threadIdx.x; i < view.world * experts; i += kThreads) {
    const int32_t source = i / experts;
    counts[i] =
        use ? counts_of(count_row(view, view.rank, epoch, source))[i - source * experts] : 0;
    p.plan.counts[i] = counts[i];
  }
  __syncthreads();
}

// The CTA beside the exchange, one thread.
__device__ void ship_last_record(const ExchangeParams& p) {
  allow_dependents();  // they come when the exchange allows it, too
  if (p.behind_router == 0) await_prerequisites();
  ship_record(p.view, p.records, state_of(p.view).exchanges++);
}

__global__ void __launch_bounds__(kThreads, 1)
    exchange_kernel(const __grid_constant__ ExchangeParams p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<plan::Shared*>(shared_bytes);
  if (blockIdx.x != 0) {
    if (threadIdx.x == 0) ship_last_record(p);
    return;
  }
  await_prerequisites();  // the router, whose counts go out, and all of the call before
  State& state = state_of(p.view);
  const uint64_t epoch = state.epoch + 1;
  const uint64_t unheard = state.unheard;
  int32_t consumer_ctas = p.consumer_ctas;
  uint64_t start_ns = 0;
  if (threadIdx.x == 0) {
    start_ns = now_ns();
    // Under way to the host's memory until the plan is made.
    if (p.wanted_ctas != nullptr)
      consumer_ctas = *static_cast<const volatile int32_t*>(p.wanted_ctas);
  }
  __syncthreads();  // all have read the epoch
  exchange(p, epoch, unheard, p.view.world * p.plan.params.local_experts, shared.counts);
  plan::Planner planner(p.plan, shared);
  planner.make();
  if (threadIdx.x != 0) return;
  const PlanSizes sizes = planner.sizes();
  const bool fits = planner.fits();
  state.epoch = epoch;
  state.bands = fits ? sizes.bands : 0;
  state.chunks = fits ? sizes.chunks : 0;
  state.segments = fits ? sizes.segments : 0;
  state.consumer_ctas = max(consumer_ctas, 0);
  if (p.records == nullptr) state.exchanges = epoch;
  CallFacts& facts = half_at(p.view, epoch).facts;
  facts.layer = p.layer;
  facts.tokens = p.tokens;
  facts.rows = fits ? sizes.valid_rows : 0;
  facts.remote_rows = fits ? planner.remote_rows() : 0;
  facts.router_start_ns = state.router_start_ns;
  state.router_start_ns = 0;  // the next call may have no router of ours
  facts.exchange_start_ns = start_ns;
  facts.exchange_end_ns = now_ns();
  facts.segments = state.segments;
  facts.bands = state.bands;
  facts.consumer_ctas = state.consumer_ctas;
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

__global__ void record_kernel(const __grid_constant__ RankView view, CallRecord* records) {
  ship_record(view, records, state_of(view).epoch);
}

bool valid(const ExchangeParams& p) {
  const RankView& view = p.view;
  const PlanParams& params = p.plan.params;
  if (!plan::valid(params)) return false;
  const int64_t experts = int64_t{params.world} * params.local_experts;
  return view.world == params.world && view.rank == params.rank && params.world <= kMaxWorld &&
         count_row_bytes(experts) <= view.offsets.count_row_bytes && p.plan.counts != nullptr &&
         (p.status != 0 || p.own_counts != nullptr) && p.tokens >= 0 &&
         view.half_bytes >= half_bytes(p.plan.capacity.bands);
}

}  // namespace
}  // namespace tilemoe::exchange

void tilemoe_block_offsets(const tilemoe::BlockShape* shape, tilemoe::BlockOffsets* offsets) {
  *offsets = tilemoe::block_offsets(*shape);
}
int64_t tilemoe_half_bytes(int32_t max_bands) { return tilemoe::half_bytes(max_bands); }
int64_t tilemoe_state_bytes(int32_t max_bands) { return tilemoe::state_bytes(max_bands); }

cudaError_t tilemoe_exchange_load() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, tilemoe::exchange::record_kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(tilemoe::exchange::exchange_kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tilemoe::exchange::kDynamicLimit);
}

cudaError_t tilemoe_record_launch(const tilemoe::RankView* view, tilemoe::CallRecord* records,
                                  cudaStream_t stream) {
  using namespace tilemoe;
  if (view == nullptr || view->state == nullptr || records == nullptr) return cudaErrorInvalidValue;
  return launch(exchange::record_kernel, 1, 1, 0, stream, false, *view, records);
}

cudaError_t tilemoe_say_heard(const tilemoe::RankView* view, cudaStream_t stream) {
  if (view == nullptr || view->state == nullptr) return cudaErrorInvalidValue;
  return cudaMemsetAsync(view->state + offsetof(tilemoe::State, unheard), 0, sizeof(uint64_t),
                         stream);
}

cudaError_t tilemoe_exchange_launch(const tilemoe::ExchangeParams* params, cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || !exchange::valid(*params)) return cudaErrorInvalidValue;
  const size_t bytes = plan::shared_bytes(params->plan.params);
  if (bytes > exchange::kDynamicLimit) return cudaErrorInvalidValue;
  const int64_t ctas = params->records != nullptr ? 2 : 1;
  return launch(exchange::exchange_kernel, ctas, exchange::kThreads, bytes, stream, true, *params);
}
