// The producer's loader: one thread claims tiles, tells the other roles and feeds A and B.
#pragma once

#include "traits.cuh"

namespace tilemoe::producer {

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
  // Returns its valid rows.
  __device__ int32_t find_band(Tile& tile) const {
    if (tile.band < 0) return 0;
    const Band band = params_.bands[tile.band];
    tile.row = static_cast<int32_t>(band.row);
    tile.expert = band.expert;
    return band.rows;
  }
  __device__ Tile first() const {
    const uint32_t claimed = claim();
    // With dispatch its first CTA has said so.
    if (claimed == 0 && params_.start_ns != nullptr && params_.dispatch.view.state == nullptr) {
      *shifted(params_.start_ns, shared_.half_shift) = now_ns();
    }
    Tile tile{};
    find_place(claimed, tile);
    find_band(tile);
    return tile;
  }

 private:
  const ProducerParams& params_;
  const typename T::Shared& shared_;
  const int32_t bands_;
  const int32_t n_tiles_;
  const uint32_t tiles_;
};

// Warp 0: the CTA's first tile, for lane 0. With dispatch the first weights are fetched into L2
// meanwhile, as the rows are still to come.
template <class T>
__device__ Tile claim_first_tile(const ProducerParams& params, const typename T::Shared& shared) {
  const int lane = threadIdx.x % 32;
  // The maps of B lie in global memory and may have been rebuilt since the last launch.
  const int32_t maps = T::kGated ? 2 * params.experts : params.experts;
  for (int32_t i = lane; i < maps; i += 32) {
    cute::tma_descriptor_fence_acquire(reinterpret_cast<const cute::TmaDescriptor*>(&params.b[i]));
  }
  __syncwarp();
  if (lane != 0) return {};
  const Tile tile = TileOrder<T>(params, shared).first();
  if (tile.band < 0 || params.dispatch.view.state == nullptr) return tile;
  const TensorMap* const map_b = &params.b[tile.expert];
  for (int32_t column = 0; column < min(params.k, kEarlyBlocks * kProducerTileK);
       column += kProducerTileK) {
    cute::SM90_TMA_LOAD_2D::PREFETCH::copy(map_b, column, tile.n_tile * T::kOutN);
    if constexpr (T::kGated) {
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(map_b + params.experts, column,
                                             tile.n_tile * T::kOutN);
    }
  }
  return tile;
}

// `tile`: the CTA's first.
template <class T>
__device__ void load_tiles(const ProducerParams& params, typename T::Shared& shared,
                           typename T::Pipeline& pipeline, Tile tile) {
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
  uint32_t claim = 0;
  int32_t rows = tile.band < 0 ? 0 : params.bands[tile.band].rows;
  while (true) {
    wait_for(shared.ring_empty[turn.slot], turn.parity ^ 1);
    shared.ring[turn.slot] = tile;
    arrive_at(shared.ring_full[turn.slot]);
    turn.advance();
    if (tile.band < 0) return;
    if (dispatching) {  // the stages of the tile before are full meanwhile
      T::Rows::await(params.dispatch.view, shared.slot_rows, tile.row, rows);
    }

    const int32_t row_b = tile.n_tile * T::kOutN;
    const TensorMap* const map_b = &params.b[tile.expert];
    const bool few = rows <= kProducerFewRows;
    const TensorMap* const map_a = few ? &params.a_few : &params.a;
    Tile next{};
    for (int32_t k = 0; k < k_blocks; ++k) {
      if (k == claim_at) claim = order.claim();
      if (k == place_at) order.find_place(claim, next);
      if (k == band_at) rows = order.find_band(next);
      pipeline.producer_acquire(write);
      auto* const full = pipeline.producer_get_barrier(write);
      const int32_t column = k * kProducerTileK;
      SM90_TMA_LOAD_2D::copy(map_a, full, kHint, smem_a + write.index() * kStageA, column,
                             tile.row);
      if (few) cutlass::arch::ClusterTransactionBarrier::complete_transaction(full, 0, kLackBytes);
      SM90_TMA_LOAD_2D::copy(map_b, full, kHint, smem_b + write.index() * kStageB, column, row_b);
      if constexpr (T::kGated) {
        SM90_TMA_LOAD_2D::copy(map_b + params.experts, full, kHint,
                               smem_b + write.index() * kStageB + kStageB / 2, column, row_b);
      }
      ++write;
    }
    tile = next;
  }
}

}  // namespace tilemoe::producer
