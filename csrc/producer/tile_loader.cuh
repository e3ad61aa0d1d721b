// The producer's loader: one thread claims tiles, tells the other roles and feeds A and B.
#pragma once

#include "traits.cuh"

namespace tilemoe::producer {

struct FirstTile {
  Tile tile;
  uint32_t claim;
};

// Tiles in the order in which they are claimed. One thread.
template <class T>
class TileOrder {
 public:
  __device__ TileOrder(const ProducerParams& params, const typename T::Shared& shared)
      : params_(params),
        shared_(shared),
        bands_(*params.band_count),
        n_tiles_((params.n + T::kOutN - 1) / T::kOutN),
        tiles_(static_cast<uint32_t>(bands_) * static_cast<uint32_t>(n_tiles_)) {}

  __device__ uint32_t claim() const {
    const volatile int64_t& shift = shared_.half_shift;  // read again: registers are scarce here
    return claim_next(shifted(params_.tile_claim, shift));
  }
  __device__ void find_place(uint32_t claim, Tile& tile) const {
    tile.band = -1;
    if (claim >= tiles_) return;
    const TileIndex index = tile_of_claim(claim, bands_, n_tiles_, params_.group_bands);
    tile.band = params_.front_bands == nullptr ? index.band : params_.front_bands[index.band];
    tile.n_tile = index.n_tile;
  }
  __device__ void find_band(Tile& tile) const {
    if (tile.band < 0) return;
    const Band band = params_.bands[tile.band];
    tile.row = static_cast<int32_t>(band.row);
    tile.expert = band.expert;
    tile.rows = band.rows;
  }
  __device__ FirstTile first() const {
    FirstTile first{};
    first.claim = claim();
    find_place(first.claim, first.tile);
    find_band(first.tile);
    return first;
  }

 private:
  const ProducerParams& params_;
  const typename T::Shared& shared_;
  const int32_t bands_;
  const int32_t n_tiles_;
  const uint32_t tiles_;
};

// Warp 0: the CTA's first tile, for lane 0.
template <class T>
__device__ FirstTile claim_first_tile(const ProducerParams& params,
                                      const typename T::Shared& shared) {
  const int lane = threadIdx.x % 32;
  // The maps of B lie in global memory and may have been rebuilt since the last launch.
  const int32_t maps = T::kGated ? 2 * params.experts : params.experts;
  for (int32_t i = lane; i < maps; i += 32) {
    cute::tma_descriptor_fence_acquire(reinterpret_cast<const cute::TmaDescriptor*>(&params.b[i]));
  }
  __syncwarp();
  return lane == 0 ? TileOrder<T>(params, shared).first() : FirstTile{};
}

// One k-block of B into `smem`, its stage's.
template <class T>
__device__ __forceinline__ void load_weights(const ProducerParams& params, const Tile& tile,
                                             int32_t column, uint64_t* full,
                                             typename T::Element* smem) {
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const TensorMap* const map = &params.b[tile.expert];
  const int32_t row = tile.n_tile * T::kOutN;
  cute::SM90_TMA_LOAD_2D::copy(map, full, kHint, smem, column, row);
  if constexpr (T::kGated) {
    cute::SM90_TMA_LOAD_2D::copy(map + params.experts, full, kHint,
                                 smem + T::kTileN * kProducerTileK / 2, column, row);
  }
}

template <class T>
__device__ void load_tiles(const ProducerParams& params, typename T::Shared& shared,
                           typename T::Pipeline& pipeline, const FirstTile& first) {
  using namespace cute;
  const TileOrder<T> order(params, shared);
  const bool dispatching = params.dispatch.view.state != nullptr;
  const int32_t k_blocks = (params.k + kProducerTileK - 1) / kProducerTileK;
  const int32_t claim_at = max(k_blocks - kClaimAhead, 0);
  const int32_t place_at = max(k_blocks - kPlaceAhead, 0);
  const int32_t band_at = max(k_blocks - kBandAhead, 0);
  typename T::Element* const smem_a = shared.operands.smem_A.data();
  typename T::Element* const smem_b = shared.operands.smem_B.data();
  constexpr int kStageA = kProducerTileM * kProducerTileK;
  constexpr int kStageB = T::kTileN * kProducerTileK;
  // What a stage of few rows lacks; its other rows of A are what was there before, of any value.
  constexpr int kLackBytes = (kProducerTileM - kProducerFewRows) * kProducerTileK * 2;
  constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);

  auto write = cutlass::make_producer_start_state<typename T::Pipeline>();
  Turn<kRing> turn;
  Tile tile = first.tile;
  uint32_t claim = first.claim;
  // Behind a GEMM 1 weights fill the stages while that ends, and only the rows are waited for.
  int32_t loaded = 0;  // of this tile's k-blocks of B
  if (params.behind_front != 0) {
    if (tile.band >= 0) loaded = min(k_blocks, T::kStages);
    for (auto early = write; static_cast<int32_t>(early.count()) < loaded; ++early) {
      pipeline.producer_acquire(early);
      load_weights<T>(params, tile, static_cast<int32_t>(early.count()) * kProducerTileK,
                      pipeline.producer_get_barrier(early), smem_b + early.index() * kStageB);
    }
    await_prerequisites();
  }
  // With dispatch its first CTA has said so.
  if (claim == 0 && params.start_ns != nullptr && !dispatching) {
    *shifted(params.start_ns, shared.half_shift) = now_ns();
  }
  while (true) {
    wait_for(shared.ring_empty[turn.slot], turn.parity ^ 1);
    shared.ring[turn.slot] = tile;
    arrive_at(shared.ring_full[turn.slot]);
    turn.advance();
    if (tile.band < 0) return;
    if (dispatching) {  // the stages of the tile before are full meanwhile
      T::Rows::await(params.dispatch.view, shared.slot_rows, tile.row, tile.rows);
    }
    const bool few = tile.rows <= kProducerFewRows;
    const TensorMap* const map_a = few ? &params.a_few : &params.a;
    Tile next{};
    for (int32_t k = 0; k < k_blocks; ++k) {
      if (k == claim_at) claim = order.claim();
      if (k == place_at) order.find_place(claim, next);
      if (k == band_at) order.find_band(next);
      if (k >= loaded) pipeline.producer_acquire(write);
      auto* const full = pipeline.producer_get_barrier(write);
      const int32_t column = k * kProducerTileK;
      SM90_TMA_LOAD_2D::copy(map_a, full, kHint, smem_a + write.index() * kStageA, column,
                             tile.row);
      if (few) cutlass::arch::ClusterTransactionBarrier::complete_transaction(full, 0, kLackBytes);
      if (k >= loaded) {
        load_weights<T>(params, tile, column, full, smem_b + write.index() * kStageB);
      }
      ++write;
    }
    tile = next;
    loaded = 0;
  }
}

}  // namespace tilemoe::producer
