// The record of a call that has ended, on its way to the host: beside the next call's exchange,
// where nobody waits for it, or by a kernel of its own.
#pragma once

#include <cstddef>
#include <cstring>

#include "wait.cuh"

namespace tilemoe {

// Times of a record: 0 where there is none.
__device__ __forceinline__ int64_t since(uint64_t begin_ns, uint64_t time_ns) {
  return begin_ns == 0 || time_ns == 0 ? 0 : static_cast<int64_t>(time_ns - begin_ns);
}

__device__ __forceinline__ CallRecord make_record(const RankView& view, uint64_t epoch) {
  const Half& half = half_at(view, epoch);
  const CallFacts& facts = half.facts;
  const uint64_t call_ns = facts.exchange_start_ns;
  CallRecord record{};
  record.iteration.first_segment_ready = since(half.start_ns, half.first_ready_ns);
  record.iteration.producer_end = since(half.start_ns, half.end_ns);
  record.iteration.last_put = since(half.start_ns, half.last_put_ns);
  record.iteration.last_arrival = since(half.start_ns, half.last_arrival_ns);
  record.iteration.segments = facts.segments;
  record.iteration.backlog_at_producer_end = half.backlog;
  record.iteration.chunks_drained = half.chunks_drained;
  record.iteration.idle_spins = static_cast<int64_t>(half.idle_spins);
  record.iteration.epoch = static_cast<int64_t>(epoch);
  record.times.router_start = since(call_ns, facts.router_start_ns);
  record.times.exchange_end = since(call_ns, facts.exchange_end_ns);
  record.times.front_start = since(call_ns, half.front_start_ns);
  record.times.front_end = since(call_ns, half.front_end_ns);
  record.times.down_start = since(call_ns, half.start_ns);
  record.times.down_end = since(call_ns, half.end_ns);
  record.times.last_arrival = since(call_ns, half.last_arrival_ns);
  record.times.scale_end = since(call_ns, half.scale_end_ns);
  record.layer = facts.layer;
  record.tokens = facts.tokens;
  record.rows = facts.rows;
  record.remote_rows = facts.remote_rows;
  record.consumer_ctas = facts.consumer_ctas;
  record.bands = facts.bands;
  return record;
}

// One thread, behind the end of call `epoch`: its record, unless it had no scale or the host has
// it.
__device__ __forceinline__ void ship_record(const RankView& view, CallRecord* records,
                                            uint64_t epoch) {
  State& state = state_of(view);
  if (state.recorded == epoch) return;
  state.recorded = epoch;
  if (half_at(view, epoch).scale_end_ns == 0) return;
  CallRecord& slot = records[epoch % kCallRecords];
  take_back(&slot.epoch);
  fence_system();
  const CallRecord record = make_record(view, epoch);
  static_assert(offsetof(CallRecord, epoch) == sizeof(CallRecord) - sizeof(uint64_t));
  constexpr int kWords = sizeof(CallRecord) / sizeof(uint64_t) - 1;
  uint64_t words[kWords];
  memcpy(words, &record, sizeof(words));
  auto* const to = reinterpret_cast<volatile uint64_t*>(&slot);
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = words[i];
  fence_system();
  publish_ready(&slot.epoch, epoch);
}

}  // namespace tilemoe
