// The producer: a persistent grouped GEMM that makes tiles in the plan's order and raises a flag
// for each finished one. CUTLASS supplies the main loop (TMA + wgmma pipeline); the kernel around
// it is ours, because CUTLASS's grouped kernel allows only its own static scheduler and epilogue.
//
// One CTA an SM, 3 warp groups:
//   - warp 0, the loader: claims tiles, tells the others through a ring in shared memory, feeds A
//     and B
//   - warp 1, the store warp: issues a tile's TMA stores, waits until they are performed, raises
//     the flag
//   - warps 4-11, two MMA warp groups of 64 rows each: wgmma, registers to shared memory, and on
//
// MMA warps never wait for global memory: the wait for a tile's stores costs them nothing, and the
// only thing that they can wait for in the epilogue is shared memory that the last but one store is
// still reading.
//
// A CTA that finds no tile left ships chunks with all its warps (`drain`): its last role.
//
// Pad rows: a band's rows behind its valid ones are padding of its own expert, so whole boxes are
// stored; what is in them is never read.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <cutlass/gemm/collective/collective_builder.hpp>

#include "../consumer/ship.cuh"
#include "element_math.cuh"
#include "instances.h"

namespace tilemoe::producer {

// The kernel takes the C ABI's params as they are; only the type of the maps differs.
static_assert(sizeof(TensorMap) == sizeof(cute::TmaDescriptor));

constexpr int kThreads = 384;
constexpr int kMmaThreads = 256;
constexpr int kMmaWarps = kMmaThreads / 32;
constexpr int kRing = 4;  // tiles announced and not yet finished by all roles
constexpr int kLoadRegisters = 40;
constexpr int kMmaRegisters = 232;
constexpr int kEntryRegisters = 168;  // what every warp starts with, and drains with
static_assert(kEntryRegisters * kThreads ==
              kLoadRegisters * (kThreads - kMmaThreads) + kMmaRegisters * kMmaThreads);
constexpr int kSubTileN = 64;    // columns of one store: 128 bytes, one swizzle span
constexpr int kClaimAhead = 5;   // k-blocks before a tile's last at which the next is claimed
constexpr int kDecodeAhead = 2;  // and at which the claim is looked at; between, it is in flight

struct alignas(16) Tile {
  int32_t row;   // a TMA coordinate: layouts have fewer than 2^31 rows
  int32_t band;  // -1: no tile is left
  int32_t expert;
  int32_t n_tile;
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
  };
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

// ---- Loader: one thread.
template <class T>
__device__ void load_tiles(const ProducerParams& params, typename T::Shared& shared,
                           typename T::Pipeline& pipeline) {
  using namespace cute;
  const int32_t bands = *params.band_count;
  const int32_t n_tiles = (params.n + T::kOutN - 1) / T::kOutN;
  const int32_t k_blocks = (params.k + kProducerTileK - 1) / kProducerTileK;
  const uint32_t tiles = static_cast<uint32_t>(bands) * static_cast<uint32_t>(n_tiles);
  const int32_t claim_at = k_blocks > kClaimAhead ? k_blocks - kClaimAhead : 0;
  const int32_t decode_at = k_blocks > kDecodeAhead ? k_blocks - kDecodeAhead : k_blocks - 1;
  typename T::Element* const smem_a = shared.operands.smem_A.data();
  typename T::Element* const smem_b = shared.operands.smem_B.data();
  constexpr int kStageA = kProducerTileM * kProducerTileK;
  constexpr int kStageB = T::kTileN * kProducerTileK;
  constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);

  const auto decode = [&](uint32_t claim) -> Tile {
    if (claim >= tiles) return {0, -1, 0, 0};
    const TileIndex index = tile_of_claim(claim, bands, n_tiles, params.group_bands);
    const Band band = params.bands[index.band];
    return {static_cast<int32_t>(band.row), index.band, band.expert, index.n_tile};
  };

  auto write = cutlass::make_producer_start_state<typename T::Pipeline>();
  Turn<kRing> turn;
  const auto claim_tile = [&] {
    const volatile int64_t& shift = shared.half_shift;  // read again: registers are scarce here
    return claim_next(shifted(params.tile_claim, shift));
  };
  uint32_t claim = claim_tile();
  if (claim == 0 && params.start_ns != nullptr) {
    *shifted(params.start_ns, shared.half_shift) = now_ns();
  }
  Tile tile = decode(claim);
  while (true) {
    wait_for(shared.ring_empty[turn.slot], turn.parity ^ 1);
    shared.ring[turn.slot] = tile;
    arrive_at(shared.ring_full[turn.slot]);
    turn.advance();
    if (tile.band < 0) return;

    const int32_t row_b = tile.n_tile * T::kOutN;
    const TensorMap* const map_b = &params.b[tile.expert];
    Tile next;
    for (int32_t k = 0; k < k_blocks; ++k) {
      if (k == claim_at) claim = claim_tile();
      if (k == decode_at) next = decode(claim);
      pipeline.producer_acquire(write);
      auto* const full = pipeline.producer_get_barrier(write);
      const int32_t column = k * kProducerTileK;
      SM90_TMA_LOAD_2D::copy(&params.a, full, kHint, smem_a + write.index() * kStageA, column,
                             tile.row);
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
    uint64_t* last_empty = nullptr;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < T::kSubTiles; ++s) {
      const int buffer = s % T::kStoreBuffers;
      const uint32_t parity = (tiles_done * T::kUsesPerTile + s / T::kStoreBuffers) & 1;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < 2; ++group) {
        wait_for(shared.store_full[group][buffer], parity);
        // Columns behind n are dropped by the map; a box that lies wholly there is legal too.
        SM90_TMA_STORE_2D::copy(&params.d, shared.store[group][buffer], column + s * kSubTileN,
                                tile.row + group * kProducerStoreRows);
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

template <class T>
__device__ void multiply_tiles(const ProducerParams& params, typename T::Shared& shared,
                               typename T::Pipeline& pipeline) {
  using namespace cute;
  using E = typename T::Element;
  const int thread = threadIdx.x - (kThreads - kMmaThreads);
  const int group = thread / 128;
  const int thread_in_group = thread % 128;
  const int32_t k_blocks = (params.k + kProducerTileK - 1) / kProducerTileK;
  const bool has_bias = params.bias != nullptr;
  typename T::Mainloop mainloop;
  const typename T::Mainloop::Params unread{};  // mma() names its params and does not read them
  typename T::PipelineState read;
  Turn<kRing> turn;

  for (uint32_t tiles_done = 0;; ++tiles_done) {
    Tile tile;
    if (thread % 32 == 0) {  // the lane that gives the slot back is the only one that reads it
      wait_for(shared.ring_full[turn.slot], turn.parity);
      tile = shared.ring[turn.slot];
      arrive_at(shared.ring_empty[turn.slot]);
    }
    tile.band = __shfl_sync(0xffffffffu, tile.band, 0);
    tile.expert = __shfl_sync(0xffffffffu, tile.expert, 0);
    tile.n_tile = __shfl_sync(0xffffffffu, tile.n_tile, 0);
    turn.advance();
    if (tile.band < 0) return;

    // This thread's two bias elements are on their way while the main loop runs.
    uint32_t bias_pair = 0;
    if (has_bias && thread_in_group < T::kTileN / 2) {
      const bool up = T::kGated && thread_in_group >= T::kOutN / 2;
      const int32_t pair = thread_in_group - (up ? T::kOutN / 2 : 0);
      const int32_t column = tile.n_tile * T::kOutN + 2 * pair;
      const void* const bias = params.bias[tile.expert + (up ? params.experts : 0)];
      if (column < params.n) bias_pair = static_cast<const uint32_t*>(bias)[column / 2];
    }

    auto accumulators =
        partition_fragment_C(typename T::Mainloop::TiledMma{}, take<0, 2>(typename T::TileShape{}));
    mainloop.mma(pipeline, read, accumulators, k_blocks, thread, shared.operands, unread);
    mainloop.mma_tail(pipeline, read, k_blocks);
    read.advance(k_blocks);

    // Two halves by tile parity: a warp comes back to a half only behind the next tile's barrier,
    // which all warps reach after they have read this one.
    uint32_t* const bias = shared.bias[group][tiles_done % 2];
    if (has_bias) {
      if (thread_in_group < T::kTileN / 2) bias[thread_in_group] = bias_pair;
      cutlass::arch::NamedBarrier::sync(128, 1 + group);
    }
    switch (params.activation) {
      case Activation::gelu:
        fill_store_buffers<T, Activation::gelu>(accumulators, has_bias, bias, group, tiles_done,
                                                shared);
        break;
      case Activation::silu:
        fill_store_buffers<T, Activation::silu>(accumulators, has_bias, bias, group, tiles_done,
                                                shared);
        break;
      case Activation::relu:
        fill_store_buffers<T, Activation::relu>(accumulators, has_bias, bias, group, tiles_done,
                                                shared);
        break;
      default:
        fill_store_buffers<T, Activation::none>(accumulators, has_bias, bias, group, tiles_done,
                                                shared);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    producer_kernel(const __grid_constant__ ProducerParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(shared_bytes);
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = threadIdx.x % 32;

  typename T::Pipeline::Params pipeline_params;
  pipeline_params.transaction_bytes = T::Mainloop::TmaTransactionBytes;
  pipeline_params.role =
      warp < 4 ? T::Pipeline::ThreadCategory::Producer : T::Pipeline::ThreadCategory::Consumer;
  pipeline_params.is_leader = threadIdx.x == 0;
  pipeline_params.num_consumers = kMmaThreads;
  typename T::Pipeline pipeline(shared.pipeline, pipeline_params, typename T::ClusterShape{});
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) {
      cutlass::arch::ClusterBarrier::init(&shared.ring_full[i], 1);
      cutlass::arch::ClusterBarrier::init(&shared.ring_empty[i], kMmaWarps + 1);
    }
    for (int group = 0; group < 2; ++group) {
      for (int i = 0; i < T::kStoreBuffers; ++i) {
        cutlass::arch::ClusterBarrier::init(&shared.store_full[group][i], kMmaWarps / 2);
        cutlass::arch::ClusterBarrier::init(&shared.store_empty[group][i], 1);
      }
    }
    cutlass::arch::fence_barrier_init();
    consumer::init(shared.ship, kThreads / 32 - 1);
    shared.half_shift = params.epoch == nullptr || *params.epoch % 2 == 0 ? 0 : params.half_bytes;
  }
  __syncthreads();
  const bool drain = params.drain != 0;

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
    if (warp == 0) {
      // The maps of B lie in global memory and may have been rebuilt since the last launch.
      const int32_t maps = T::kGated ? 2 * params.experts : params.experts;
      for (int32_t i = lane; i < maps; i += 32) {
        cute::tma_descriptor_fence_acquire(
            reinterpret_cast<const cute::TmaDescriptor*>(&params.b[i]));
      }
      __syncwarp();
      if (lane == 0) load_tiles<T>(params, shared, pipeline);
    } else if (warp == 1) {
      if (lane == 0) store_tiles<T>(params, shared);
    }
    if (!drain) return;
    // A warp group may change its registers again only when all its warps have done so before.
    __syncwarp();
    cutlass::arch::NamedBarrier::sync(128, 3);
    cutlass::arch::warpgroup_reg_alloc<kEntryRegisters>();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMmaRegisters>();
    multiply_tiles<T>(params, shared, pipeline);
    if (!drain) return;
    cutlass::arch::NamedBarrier::sync(128, 1 + (warp - 4) / 4);
    cutlass::arch::warpgroup_reg_dealloc<kEntryRegisters>();
  }
  // No chunk is claimed before the CTA's last tile is flagged.
  __syncthreads();
  consumer::ship(params.ship, shared.ship, kThreads / 32 - 1, true);
}

template <class T>
struct Instance {
  static constexpr int kSharedBytes = sizeof(typename T::Shared);
  static_assert(kSharedBytes <= 232448, "a CTA gets at most 227 KiB of shared memory");

  static cudaError_t load() {
    return cudaFuncSetAttribute(producer_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kSharedBytes);
  }
  static cudaError_t launch(const ProducerParams& params, int32_t grid, cudaStream_t stream) {
    producer_kernel<T><<<grid, kThreads, kSharedBytes, stream>>>(params);
    return cudaGetLastError();
  }
};

template <class T>
constexpr InstanceEntry make_entry() {
  return {Instance<T>::load, Instance<T>::launch};
}

}  // namespace tilemoe::producer
