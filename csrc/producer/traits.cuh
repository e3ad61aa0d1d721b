// What the roles of the producer share: sizes, the compiled GEMM, shared memory, barriers.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include <cutlass/gemm/collective/collective_builder.hpp>

#include "../consumer/ship.cuh"
#include "../dispatch/send.cuh"
#include "producer.h"

namespace tilemoe::producer {

// The kernel takes the C ABI's params as they are; only the type of the maps differs.
static_assert(sizeof(TensorMap) == sizeof(cute::TmaDescriptor));

constexpr int kThreads = 384;
constexpr int kMmaThreads = 256;
constexpr int kMmaWarps = kMmaThreads / 32;
constexpr int kRing = 4;  // tiles announced and not yet finished by all roles
constexpr int kLoadRegisters = 56;
constexpr int kMmaRegisters = 224;
constexpr int kEntryRegisters = 168;  // what every warp starts with, and drains with
static_assert(kEntryRegisters * kThreads ==
              kLoadRegisters * (kThreads - kMmaThreads) + kMmaRegisters * kMmaThreads);
constexpr int kSubTileN = 64;  // columns of one store: 128 bytes, one swizzle span
// k-blocks before a tile's end at which the next one is claimed, at which its place in the order is
// looked up, and its band; between, what was asked for is in flight.
constexpr int kClaimAhead = 6;
constexpr int kPlaceAhead = 3;
constexpr int kBandAhead = 2;

struct alignas(16) Tile {
  int32_t row;   // a TMA coordinate: layouts have fewer than 2^31 rows
  int32_t band;  // -1: no tile is left
  int32_t expert;
  int32_t n_tile;
  int32_t rows;  // valid ones
};

template <class Element_, int kTileN_, bool kGated_, int kStages_, int kStoreBuffers_>
struct Traits {
  using Element = Element_;
  static constexpr int kTileN = kTileN_;  // accumulator columns
  static constexpr bool kGated = kGated_;
  static constexpr int kStages = kStages_;
  static constexpr int kStoreBuffers = kStoreBuffers_;  // a warp group
  static constexpr int kOutN = kGated ? kTileN / 2 : kTileN;
  static constexpr int kBoxRowsB = kOutN;
  static constexpr int kSubTiles = kOutN / kSubTileN;
  static constexpr int kUsesPerTile = kSubTiles / kStoreBuffers;  // of each store buffer
  static_assert(kSubTiles % kStoreBuffers == 0);

  using TileShape =
      cute::Shape<cute::Int<kProducerTileM>, cute::Int<kTileN>, cute::Int<kProducerTileK>>;
  // Cluster 1: a cluster of two needs two free SMs of one GPC and breaks beside a consumer kernel.
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8,
      Element, cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<kStages>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using PipelineState = typename Mainloop::PipelineState;
  static_assert(cute::size(typename Mainloop::TiledMma{}) == kMmaThreads);

  // How the loader waits for the rows of a band. A bench may put its own in this place.
  struct Rows {
    static __device__ void await(const RankView& view, const uint32_t* slot_rows, int32_t row,
                                 int32_t rows) {
      dispatch::await_rows(view, slot_rows, row, rows);
    }
  };

  struct Shared {
    alignas(1024) typename Mainloop::TensorStorage operands;
    alignas(1024) Element store[2][kStoreBuffers][kProducerStoreRows * kSubTileN];
    uint32_t bias[2][2][kTileN / 2];  // [warp group][tile parity]: pairs of elements
    Tile ring[kRing];
    alignas(8) typename Mainloop::PipelineStorage pipeline;
    uint64_t ring_full[kRing];
    uint64_t ring_empty[kRing];
    uint64_t store_full[2][kStoreBuffers];
    uint64_t store_empty[2][kStoreBuffers];
    consumer::Shared ship;
    int64_t half_shift;  // bytes from the counters of half 0 to this epoch's
    // Of dispatch:
    dispatch::SlotBarriers slots[kThreads / 32];
    const uint32_t* slot_rows;  // this rank's counters of this epoch
    uint32_t ticket;            // of this CTA
    int32_t senders;            // tickets below it send first
  };
  static_assert(sizeof(typename Mainloop::TensorStorage) >= kThreads / 32 * dispatch::kWarpBytes);
};

// CUTLASS's barrier functions carry no "memory" clobber: without these the compiler could move a
// plain access to shared memory over them.
__device__ __forceinline__ void wait_for(uint64_t& barrier, uint32_t parity) {
  cutlass::arch::ClusterBarrier::wait(&barrier, parity);
  asm volatile("" ::: "memory");
}
__device__ __forceinline__ void arrive_at(uint64_t& barrier) {
  asm volatile("" ::: "memory");
  cutlass::arch::ClusterBarrier::arrive(&barrier);
}

template <class Word>
__device__ __forceinline__ Word* shifted(Word* word, int64_t bytes) {
  return reinterpret_cast<Word*>(reinterpret_cast<char*>(word) + bytes);
}

}  // namespace tilemoe::producer
