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
// GEMM 1 brings the rows it works on itself (`dispatch`, see dispatch/send.cuh): all warps before
// the CTA's first tile, through the memory of the operands, and the two spare warps of the load
// warp group beside its tiles.
//
// A CTA that finds no tile left ships chunks with all its warps (`drain`): its last role.
//
// Pad rows: a band's rows behind its valid ones are padding of its own expert, so whole boxes are
// stored; what is in them is never read.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.cuh"
#include "../common/warp.cuh"
#include "../consumer/ship.cuh"
#include "epilogue.cuh"
#include "instances.h"
#include "tile_loader.cuh"
#include "traits.cuh"

namespace tilemoe::producer {

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
    tile.band = __shfl_sync(kAllLanes, tile.band, 0);
    tile.expert = __shfl_sync(kAllLanes, tile.expert, 0);
    tile.n_tile = __shfl_sync(kAllLanes, tile.n_tile, 0);
    tile.rows = __shfl_sync(kAllLanes, tile.rows, 0);
    turn.advance();
    if (tile.band < 0) return;

    if (group * kProducerStoreRows >= tile.rows) {  // nothing of it is this group's
      // Without wgmma to tie them, warps of the group may be a stage apart: all threads arrive at a
      // stage's empty barrier (CUTLASS 4.2.0, clusters of one), so none comes a phase too early.
      for (int32_t k = 0; k < k_blocks; ++k, ++read) {
        pipeline.consumer_wait(read);
        pipeline.consumer_release(read);
      }
      pass_store_buffers<T>(group, tiles_done, shared);
      continue;
    }

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
    // or (pass_store_buffers) when this tile has been stored, for both of which all warps have read
    // it.
    uint32_t* const bias = shared.bias[group][tiles_done % 2];
    if (has_bias) {
      if (thread_in_group < T::kTileN / 2) bias[thread_in_group] = bias_pair;
      cutlass::arch::NamedBarrier::sync(128, 1 + group);
    }
    if (group * kProducerStoreRows + thread_in_group / 32 * 16 >= tile.rows) {
      pass_store_buffers<T>(group, tiles_done, shared);
      continue;
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

// The grid is the whole device and the consumer beside it gets the SMs that these CTAs leave. A CTA
// that leaves has claimed nothing.
__device__ __forceinline__ bool leaves_its_sm(const ShipParams& ship) {
  if (ship.device_split == 0) return false;
  const int32_t stay = static_cast<int32_t>(gridDim.x) - state_of(ship.view).consumer_ctas;
  return static_cast<int32_t>(blockIdx.x) >= max(stay, 1);
}

// One thread of each CTA: its number in the order of their start. The first one's is GEMM 1's.
__device__ __forceinline__ uint32_t draw_ticket(const ProducerParams& params) {
  const State& state = state_of(params.dispatch.view);
  Half& half = half_at(params.dispatch.view, state.epoch);
  const uint32_t ticket = claim_next(&half.dispatch_ticket);
  if (ticket == 0) half.front_start_ns = now_ns();
  return ticket;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    producer_kernel(const __grid_constant__ ProducerParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(shared_bytes);
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = threadIdx.x % 32;
  const bool dispatching = params.dispatch.view.state != nullptr;

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
    for (dispatch::SlotBarriers& slots : shared.slots) dispatch::init(slots);
    cutlass::arch::fence_barrier_init();
    consumer::init(shared.ship, kThreads / 32 - 1);
  }
  // In all threads of all CTAs: who waits for the end of this kernel takes all before it for ended.
  // Behind a GEMM 1 not before the barrier, and the loader when it has asked for weights.
  const bool behind_front = params.behind_front != 0;
  if (!behind_front) await_prerequisites();
  if (leaves_its_sm(params.ship)) {
    await_prerequisites();
    return;
  }
  if (threadIdx.x == 0) {
    shared.half_shift = params.epoch == nullptr || *params.epoch % 2 == 0 ? 0 : params.half_bytes;
  }
  if (threadIdx.x == 32 && dispatching) {
    const RankView& view = params.dispatch.view;
    const int32_t senders = dispatch::senders(params.dispatch, kThreads / 32 - 1);  // under way
    shared.ticket = draw_ticket(params);
    shared.senders = senders;
    shared.slot_rows = slot_rows_of(view, view.rank, state_of(view).epoch);
  }
  __syncthreads();
  if (behind_front && warp != 0) await_prerequisites();
  FirstTile first{};
  bool has_first = false;
  if (dispatching) {
    // A CTA that sends at length claims nothing before it is done.
    has_first = dispatch::is_short(shared.ticket, shared.senders);
    if (warp == 0 && has_first) {
      first = claim_first_tile<T>(params, shared);
    } else {
      auto* const memory = reinterpret_cast<unsigned char*>(&shared.operands);
      dispatch::begin(params.dispatch, shared.ticket, shared.senders, kThreads / 32 - 1,
                      memory + warp * dispatch::kWarpBytes, shared.slots[warp]);
    }
    __syncthreads();  // the operands' memory is the pipeline's
  }
  const bool drain = params.drain != 0;

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
    if (warp == 0) {
      if (!has_first) first = claim_first_tile<T>(params, shared);
      if (lane == 0) {
        load_tiles<T>(params, shared, pipeline, first);
        if (!drain) allow_dependents();  // the drain does so itself
      } else if (behind_front) {
        await_prerequisites();
      }
    } else if (warp == 1) {
      if (lane == 0) store_tiles<T>(params, shared);
    } else if (dispatching) {
      dispatch::go_on(params.dispatch, warp - 2, kThreads / 32 - 1);
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
    return tilemoe::launch(producer_kernel<T>, grid, kThreads, kSharedBytes, stream, true, params);
  }
};

template <class T>
constexpr InstanceEntry make_entry() {
  return {Instance<T>::load, Instance<T>::launch};
}

}  // namespace tilemoe::producer
