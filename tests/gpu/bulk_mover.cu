// Warp 0 claims, waits and hands over as in the product (consumer/ship.cuh). One thread of warp 1
// moves: global -> shared -> the owner's memory, in pieces through a ring in shared memory, half of
// the ring loading while the other half is stored. Not part of the package.
#include "bulk_mover.h"
#include "consumer/ship.cuh"

namespace {

using namespace tilemoe;
using consumer::kSlots;

constexpr int kThreads = 64;
constexpr int kLeastShared = 120 * 1024;  // two CTAs never share an SM

__device__ void load_piece(void* shared, const void* from, uint32_t bytes, uint64_t& full) {
  const uint32_t barrier = shared_address(&full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ void store_piece(void* to, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// One thread. Piece i is loaded when piece i - kPieces has left its place, and stored kPieces / 2
// pieces later, so that at each time half of the ring is on its way in and half on its way out.
template <int kPieces>
__device__ void move_chunks(consumer::Shared& shared, unsigned char* ring, uint64_t* full) {
  constexpr int kLag = kPieces / 2;
  std::byte* to[kPieces] = {};
  uint32_t size[kPieces] = {};
  uint32_t loaded = 0, stored = 0;
  const auto store_next = [&] {
    const uint32_t slot = stored % kPieces;
    barrier_wait(full[slot], stored / kPieces % 2);
    store_piece(to[slot], ring + slot * kBulkPieceBytes, size[slot]);
    ++stored;
  };
  Turn<kSlots> turn;
  while (true) {
    barrier_wait(shared.full[turn.slot], turn.parity);
    const consumer::Work work = shared.work[turn.slot];
    if (work.vectors < 0) break;
    // The flags were acquired by loads; the copy engine reads next.
    asm volatile("fence.proxy.async;" ::: "memory");
    const std::byte* const from = reinterpret_cast<const std::byte*>(work.from);
    const int64_t bytes = int64_t{work.vectors} * 16;
    for (int64_t at = 0; at < bytes; at += kBulkPieceBytes) {
      const uint32_t piece = static_cast<uint32_t>(min(bytes - at, int64_t{kBulkPieceBytes}));
      // loaded - kPieces is stored, if it was; all but the newest of the stores have read theirs.
      wait_bulk_stores_read<kPieces - kLag - 1>();
      const uint32_t slot = loaded % kPieces;
      to[slot] = reinterpret_cast<std::byte*>(work.to) + at;
      size[slot] = piece;
      load_piece(ring + slot * kBulkPieceBytes, from + at, piece, full[slot]);
      if (++loaded - stored > kLag) store_next();
    }
    barrier_arrive(shared.empty[turn.slot]);
    turn.advance();
  }
  while (stored < loaded) store_next();
  wait_bulk_stores();  // performed, not only read: arrivals are next
}

template <int kPieces>
__global__ void __launch_bounds__(kThreads, 1)
    bulk_kernel(const __grid_constant__ ShipParams params) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ consumer::Shared shared;
  __shared__ uint64_t full[kPieces];
  if (threadIdx.x == 0) {
    consumer::init(shared, 1);
    for (uint64_t& barrier : full) barrier_init(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const RankView& view = params.view;
  const uint64_t epoch = state_of(view).epoch;
  Half& half = half_at(view, epoch);
  uint32_t handed = 0, counted = 0;
  if (threadIdx.x < 32) {
    handed = consumer::hand_over(params, shared, half, epoch, &counted);
  } else if (threadIdx.x == 32) {
    move_chunks<kPieces>(shared, ring, full);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int32_t owner = 0; owner < view.world; ++owner) {
    if (shared.rows[owner] == 0) continue;
    add_arrivals(arrival_word(view, owner, epoch, view.rank), shared.rows[owner]);
  }
  if (handed == 0) return;
  record_latest(&half.last_put_ns, now_ns());
  fence_gpu();
  if (handed > counted) add_count(&half.chunks_shipped, handed - counted);
}

template <int kPieces>
cudaError_t launch(const ShipParams& params, int ctas, cudaStream_t stream) {
  constexpr int kBytes =
      kPieces * kBulkPieceBytes > kLeastShared ? kPieces * kBulkPieceBytes : kLeastShared;
  const cudaError_t error = cudaFuncSetAttribute(
      bulk_kernel<kPieces>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  bulk_kernel<kPieces><<<ctas, kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t bulk_consumer_launch(const ShipParams* params, int ctas, int pieces,
                                 cudaStream_t stream) {
  switch (pieces) {
    case 4:
      return launch<4>(*params, ctas, stream);
    case 6:
      return launch<6>(*params, ctas, stream);
    case 12:
      return launch<12>(*params, ctas, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
