// Waits of kernels: each has a deadline, and a failed group ends them all.
#pragma once

#include "control.h"
#include "flags.cuh"

namespace tilemoe {

constexpr uint32_t kPollsPerLook = 32;  // at the clock and at the failure word

__device__ __forceinline__ State& state_of(const RankView& view) {
  return *reinterpret_cast<State*>(view.state);
}
__device__ __forceinline__ Half& half_at(const RankView& view, uint64_t epoch) {
  return *reinterpret_cast<Half*>(half_of(view, epoch));
}
__device__ __forceinline__ uint32_t* band_flags_of(Half& half) {
  return reinterpret_cast<uint32_t*>(&half + 1);
}
__device__ __forceinline__ Failure& failure_of(const RankView& view, int32_t rank) {
  return *reinterpret_cast<Failure*>(view.blocks[rank]);
}
// Rows that `source` has put into the receive room of `owner`.
__device__ __forceinline__ uint64_t* arrival_word(const RankView& view, int32_t owner,
                                                  uint64_t epoch, int32_t source) {
  return reinterpret_cast<uint64_t*>(view.blocks[owner] + arrival_offset(view, epoch, source));
}

// Rows that have come into each slot of the layout of `rank`.
__device__ __forceinline__ uint32_t* slot_rows_of(const RankView& view, int32_t rank,
                                                  uint64_t epoch) {
  return reinterpret_cast<uint32_t*>(view.blocks[rank] + view.offsets.slot_rows +
                                     static_cast<int64_t>(epoch % 2) *
                                         view.offsets.slot_half_bytes);
}

__device__ __forceinline__ bool group_failed(const RankView& view) {
  return read_failure(&failure_of(view, view.rank).code);
}

// For the host: a record stays until the host has taken it and has set its outcome to ok.
__device__ inline void tell_host(const RankView& view, const ErrorRecord& record) {
  if (view.host_error == nullptr) return;
  volatile ErrorRecord& told = *view.host_error;
  if (told.outcome != Outcome::ok) return;
  told.wait = record.wait;
  told.rank = record.rank;
  told.peer = record.peer;
  told.band = record.band;
  told.seen = record.seen;
  told.wanted = record.wanted;
  told.epoch = record.epoch;
  told.layer = record.layer;
  fence_system();
  told.outcome = record.outcome;
}

// Marks the group failed in every block: all waits end. The first cause of each block stays, but
// for one that its rank does not raise in time.
__device__ inline void fail_group(const RankView& view, const ErrorRecord& record) {
  for (int32_t i = 0; i < view.world; ++i) {
    Failure& failure = failure_of(view, (view.rank + i) % view.world);
    if (!claim_failure(&failure.claimed)) {
      // Whoever has claimed it is about to raise it: behind this every block has failed, with its
      // record, so that a rank that goes on with what did not come cannot be believed by a third.
      // One that has died in between never raises it, and then it is done here.
      const uint64_t start = now_ns();
      bool raised;
      while (!(raised = read_failure(&failure.code)) &&
             now_ns() - start < static_cast<uint64_t>(view.wait_timeout_ns)) {
      }
      if (raised) continue;
    }
    failure.record = record;
    raise_failure(&failure.code);
  }
}

// Polls until read() == wanted; false if the group has failed or fails now by the deadline.
template <class Read>
__device__ bool wait_equal(const RankView& view, int64_t timeout_ns, uint64_t wanted, Wait what,
                           int32_t peer, int64_t band, uint64_t epoch, uint64_t* polls, Read read) {
  if (read() == wanted) return true;
  const uint64_t start = now_ns();
  for (uint32_t poll = 1;; ++poll) {
    const uint64_t seen = read();
    if (seen == wanted) {
      *polls += poll;
      return true;
    }
    if (poll % kPollsPerLook != 0) continue;
    if (group_failed(view)) return false;
    if (now_ns() - start > static_cast<uint64_t>(timeout_ns)) {
      fail_group(view, {Outcome::deadline, what, view.rank, peer, band, seen, wanted, epoch});
      return false;
    }
  }
}

// Sleeps a random time, mostly none: races need both. Off unless a test sets the view's limit.
__device__ __forceinline__ void random_delay(const RankView& view) {
  if (view.random_delay_ns == 0) return;
  uint64_t x = now_ns() * 0x9E3779B97F4A7C15ull + blockIdx.x * 0xD1B54A32D192ED03ull + threadIdx.x;
  x ^= x >> 31;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 29;
  if (x % 4 == 0) __nanosleep(static_cast<uint32_t>((x >> 8) % view.random_delay_ns));
}

}  // namespace tilemoe
