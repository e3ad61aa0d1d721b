// The producer's epilogue: MMA warps fill shared memory and go on; the store warp writes it out and
// raises the flags.
#pragma once

#include "../common/wait.cuh"
#include "element_math.cuh"
#include "traits.cuh"

namespace tilemoe::producer {

// ---- MMA warp groups.

// Registers -> shared memory, one sub-tile after another, in the 128-byte swizzle of the map of D.
// Thread layout of a wgmma accumulator: lane / 4 is the row in each half of 8, and value 4 j + v is
// column 8 j + 2 (lane % 4) + v % 2, row + 8 (v / 2).
template <class T, Activation kActivation, class Accumulators>
__device__ __forceinline__ void fill_store_buffers(Accumulators& accumulators, bool has_bias,
                                                   const uint32_t* bias, int group,
                                                   uint32_t tiles_done,
                                                   typename T::Shared& shared) {
  using E = typename T::Element;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + (lane / 8 % 2) * 8 + lane % 8;  // that this lane addresses
  const int upper_half = lane / 16;
  const auto value = [&](int j, int v) {
    float x = accumulators(4 * j + v);
    if (has_bias) {
      const float2 pair = unpack(E{}, bias[4 * j + lane % 4]);
      x += v % 2 == 0 ? pair.x : pair.y;
    }
    return x;
  };
  const auto result = [&](int j, int v) {
    const float x = activate<kActivation>(value(j, v));
    if constexpr (T::kGated) {
      return x * value(j + T::kOutN / 8, v);
    } else {
      return x;
    }
  };
  CUTLASS_PRAGMA_UNROLL
  for (int s = 0; s < T::kSubTiles; ++s) {
    const int buffer = s % T::kStoreBuffers;
    const uint32_t use = tiles_done * T::kUsesPerTile + s / T::kStoreBuffers;
    wait_for(shared.store_empty[group][buffer], (use & 1) ^ 1);
    char* const base = reinterpret_cast<char*>(shared.store[group][buffer]) + row * 128;
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kSubTileN / 16; ++pair) {
      const int j = s * (kSubTileN / 8) + 2 * pair;
      const int piece = (2 * pair + upper_half) ^ (row % 8);
      cute::SM90_U32x4_STSM_N::copy(pack(E{}, result(j, 0), result(j, 1)),
                                    pack(E{}, result(j, 2), result(j, 3)),
                                    pack(E{}, result(j + 1, 0), result(j + 1, 1)),
                                    pack(E{}, result(j + 1, 2), result(j + 1, 3)),
                                    *reinterpret_cast<cute::uint128_t*>(base + piece * 16));
    }
    cute::tma_store_fence();  // each writer, before the barrier: the copy engine reads next
    __syncwarp();
    if (lane == 0) arrive_at(shared.store_full[group][buffer]);
  }
}

// A warp none of whose rows is valid: as fill_store_buffers, but nothing is filled.
template <class T>
__device__ __forceinline__ void pass_store_buffers(int group, uint32_t tiles_done,
                                                   typename T::Shared& shared) {
  for (int s = 0; s < T::kSubTiles; ++s) {
    const int buffer = s % T::kStoreBuffers;
    const uint32_t use = tiles_done * T::kUsesPerTile + s / T::kStoreBuffers;
    wait_for(shared.store_empty[group][buffer], (use & 1) ^ 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at(shared.store_full[group][buffer]);
  }
}

// ---- Store warp: one thread.
__device__ __forceinline__ void raise_flag(const ProducerParams& params, int32_t band,
                                           int64_t shift) {
  uint32_t* const flag = shifted(params.band_flags, shift) + band;
  if (params.ship.view.state == nullptr) {
    raise_band_flag(flag);
    return;
  }
  random_delay(params.ship.view);
  if (band != 0) {
    raise_band_flag(flag);
  } else if (raise_and_read_band_flag(flag) + 1 == uint32_t(params.ship.n_tiles)) {
    // Segment 0, if there is one, waits for band 0 alone.
    const State& state = state_of(params.ship.view);
    if (state.segments > 0) half_at(params.ship.view, state.epoch).first_ready_ns = now_ns();
  }
}

// The CTA that adds the rank's last tiles sees the producer's end.
template <class T>
__device__ void count_tiles(const ProducerParams& params, uint32_t tiles_done) {
  const State& state = state_of(params.ship.view);
  Half& half = half_at(params.ship.view, state.epoch);
  const uint32_t tiles = uint32_t(state.bands) * uint32_t((params.n + T::kOutN - 1) / T::kOutN);
  if (add_and_read_count(&half.tiles_flagged, tiles_done) + tiles_done == tiles) {
    half.backlog = state.chunks - read_count(&half.chunks_shipped);
  }
}

template <class T>
__device__ void store_tiles(const ProducerParams& params, typename T::Shared& shared) {
  using namespace cute;
  Turn<kRing> turn;
  uint32_t tiles_done = 0;
  while (true) {
    wait_for(shared.ring_full[turn.slot], turn.parity);
    const Tile tile = shared.ring[turn.slot];
    arrive_at(shared.ring_empty[turn.slot]);
    turn.advance();
    if (tile.band < 0) break;

    const int32_t column = tile.n_tile * T::kOutN;
    const TensorMap* const map = tile.rows <= kProducerFewRows ? &params.d_few : &params.d;
    uint64_t* last_empty = nullptr;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < T::kSubTiles; ++s) {
      const int buffer = s % T::kStoreBuffers;
      const uint32_t parity = (tiles_done * T::kUsesPerTile + s / T::kStoreBuffers) & 1;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < 2; ++group) {
        wait_for(shared.store_full[group][buffer], parity);
        // Columns behind n are dropped by the map; a box that lies wholly there is legal too.
        if (group * kProducerStoreRows < tile.rows) {
          SM90_TMA_STORE_2D::copy(map, shared.store[group][buffer], column + s * kSubTileN,
                                  tile.row + group * kProducerStoreRows);
        }
        tma_store_arrive();
        wait_bulk_stores_read<1>();
        if (last_empty != nullptr) arrive_at(*last_empty);
        last_empty = &shared.store_empty[group][buffer];
      }
    }
    wait_bulk_stores_read<0>();
    arrive_at(*last_empty);
    ++tiles_done;
    if (params.band_flags != nullptr) {
      wait_bulk_stores();
      raise_flag(params, tile.band, shared.half_shift);
    }
  }
  wait_bulk_stores();  // shared memory lives until the stores have read it
  if (tiles_done == 0) return;
  if (params.end_ns != nullptr) {
    record_latest(shifted(params.end_ns, shared.half_shift), now_ns());
  }
  if (params.ship.view.state != nullptr) count_tiles<T>(params, tiles_done);
}

}  // namespace tilemoe::producer
