// How a CTA ships: the consumer kernel's work and the producer's last role.
//
// Warp 0 claims chunks, waits for their bands and hands them over through a ring in shared memory;
// the other warps copy, each its own pieces, and meet only at the ring: a warp that has done its
// part of a chunk goes on to the next. So the claim of a chunk and the look at its flags cost
// nothing while the one before is copied.
#pragma once

#include "../common/barriers.cuh"
#include "../common/wait.cuh"
#include "../common/warp.cuh"
#include "consumer.h"

namespace tilemoe::consumer {

constexpr int kSlots = 3;    // chunks handed over and not yet copied
constexpr int kWindow = 32;  // chunks whose place a warp looks up at once
constexpr int kUnroll = 2;   // 16-byte loads of a thread before its stores: docs/gpu-notes.md

struct Work {
  const uint4* from;
  uint4* to;
  int32_t vectors;  // of 16 bytes; -1: nothing is left
};

struct Shared {
  Work work[kSlots];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
  uint32_t rows[kMaxWorld];  // shipped to each owner
};

// By one thread, before a CTA barrier in front of ship().
__device__ inline void init(Shared& shared, int copy_warps) {
  for (int i = 0; i < kSlots; ++i) {
    barrier_init(shared.full[i], 1);
    barrier_init(shared.empty[i], copy_warps);
  }
  for (uint32_t& rows : shared.rows) rows = 0;
}

// Of a CTA of a consumer kernel: it is one too many in this call.
__device__ __forceinline__ bool not_in_split(const ShipParams& p) {
  return p.device_split != 0 && static_cast<int32_t>(blockIdx.x) >= state_of(p.view).consumer_ctas;
}

// One lane's chunk of a window.
struct Place {
  Work work;
  int32_t rows;
  int32_t owner;
  int32_t band_begin;
  int32_t band_count;
};

// `mapped`: `to` is in the owner's block; else it is the same place in this rank's own block.
__device__ __forceinline__ Place look_up(const ShipParams& p, uint32_t index, bool mapped) {
  const Chunk chunk = p.chunks[index];
  const Segment segment = p.segments[chunk.segment];
  const RankView& view = p.view;
  const std::byte* const from = static_cast<const std::byte*>(p.rows);
  std::byte* const to = view.blocks[mapped ? segment.owner : view.rank] + view.offsets.recv;
  return {{reinterpret_cast<const uint4*>(from + (segment.src_row + chunk.row) * p.row_bytes),
           reinterpret_cast<uint4*>(to + (segment.dst_row + chunk.row) * p.row_bytes),
           static_cast<int32_t>(chunk.rows * (p.row_bytes / 16))},
          chunk.rows,
          segment.owner,
          segment.band_begin,
          segment.band_count};
}

__device__ __forceinline__ bool wait_bands(const ShipParams& p, const uint32_t* flags,
                                           const Place& place, uint64_t epoch, uint64_t* polls) {
  if constexpr (kFault == Fault::no_wait) return true;
  for (int32_t i = 0; i < place.band_count; ++i) {
    const int32_t band = place.band_begin + i;
    if (!wait_equal(p.view, p.view.wait_timeout_ns, p.n_tiles, Wait::band, p.view.rank, band, epoch,
                    polls, [&] { return read_band_flag(&flags[band]); })) {
      return false;
    }
  }
  return true;
}

// Warp 0, until no chunk is left or a wait has ended without its bands. Returns the chunks it has
// handed over; *counted (lane 0) are those of them that it has added to chunks_shipped.
__device__ inline uint32_t hand_over(const ShipParams& p, Shared& shared, Half& half,
                                     uint64_t epoch, uint32_t* counted) {
  const int lane = threadIdx.x % 32;
  const uint32_t chunks = state_of(p.view).chunks;
  const uint32_t* const flags = band_flags_of(half);
  uint64_t polls = 0;
  uint32_t handed = 0;
  uint32_t window = 0;
  bool looked_up = false;
  Place place{};
  Turn<kSlots> turn;
  uint32_t next = 0;
  if (lane == 0) next = claim_next(&half.chunk_claim);
  bool going = true;
  while (true) {
    const uint32_t claim = __shfl_sync(kAllLanes, next, 0);
    going = going && claim < chunks;
    if (going) {
      // In flight while this chunk is prepared.
      if (lane == 0) next = claim_next(&half.chunk_claim);
      if (!looked_up || claim - window >= kWindow) {
        window = claim;
        looked_up = true;
        if (claim + lane < chunks) place = look_up(p, claim + lane, true);
      }
    }
    const bool mine = lane == (going ? claim - window : 0);
    barrier_wait(shared.empty[turn.slot], turn.parity ^ 1);
    if (handed >= kSlots && lane == 0) {  // the slot's former chunk is on its way
      add_count(&half.chunks_shipped, 1);
      ++*counted;
    }
    random_delay(p.view);
    bool ready = false;
    if (going && mine) ready = wait_bands(p, flags, place, epoch, &polls);
    if (mine) {
      Work& work = shared.work[turn.slot];
      work = place.work;
      if (ready) {
        shared.rows[place.owner] += place.rows;
      } else {
        work.vectors = -1;
      }
      barrier_arrive(shared.full[turn.slot]);
    }
    turn.advance();
    __syncwarp();  // the next lane adds to the same sums
    if (!__any_sync(kAllLanes, ready)) break;
    ++handed;
  }
  if (polls > 0) add_count(&half.idle_spins, polls);
  return handed;
}

// The lane that gives the slot back is the only one that reads it, or racecheck sees a race.
__device__ __forceinline__ Work read_slot(const Work& slot, int lane) {
  Work work{};
  if (lane == 0) work = slot;
  const auto from = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(work.from), 0);
  const auto to = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(work.to), 0);
  return {reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
          __shfl_sync(kAllLanes, work.vectors, 0)};
}

// The other warps. The units of a chunk (512 bytes) go round over the warps and on from chunk to
// chunk, so that no warp has more to do than another.
__device__ inline void copy_chunks(const ShipParams& p, Shared& shared, int copy_warps) {
  const int lane = threadIdx.x % 32;
  int first = threadIdx.x / 32 - 1;
  Turn<kSlots> turn;
  while (true) {
    barrier_wait(shared.full[turn.slot], turn.parity);
    const Work work = read_slot(shared.work[turn.slot], lane);
    if (work.vectors < 0) return;
    __builtin_assume(__isGlobal(work.from));  // the compiler cannot see it through shared memory
    __builtin_assume(__isGlobal(work.to));
    random_delay(p.view);
    const int step = 32 * copy_warps;
    for (int at = 32 * first + lane; at < work.vectors; at += kUnroll * step) {
      uint4 values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at + i * step < work.vectors) values[i] = work.from[at + i * step];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at + i * step < work.vectors) work.to[at + i * step] = values[i];
      }
    }
    const int units = (work.vectors + 31) / 32;
    first -= units % copy_warps;
    if (first < 0) first += copy_warps;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty[turn.slot]);
    turn.advance();
  }
}

// All threads of the CTA, which has `copy_warps` + 1 warps, behind init() and a CTA barrier.
__device__ inline void ship(const ShipParams& p, Shared& shared, int copy_warps, bool draining) {
  const uint64_t epoch = state_of(p.view).epoch;
  Half& half = half_at(p.view, epoch);
  uint32_t handed = 0, counted = 0;
  if (threadIdx.x == 0) allow_dependents();
  if (threadIdx.x < 32) {
    handed = hand_over(p, shared, half, epoch, &counted);
  } else {
    copy_chunks(p, shared, copy_warps);
  }
  random_delay(p.view);
  __syncthreads();  // behind the CTA's last store
  const int32_t owner = threadIdx.x;
  if (owner < p.view.world && shared.rows[owner] > 0) {
    add_arrivals(arrival_word(p.view, owner, epoch, p.view.rank), shared.rows[owner]);
  }
  if (threadIdx.x == 0 && handed > 0) {
    record_latest(&half.last_put_ns, now_ns());
    if (draining) add_count(&half.chunks_drained, handed);
    fence_gpu();  // whoever sees that all chunks are shipped sees these, too
    if (handed > counted) add_count(&half.chunks_shipped, handed - counted);
  }
}

}  // namespace tilemoe::consumer
