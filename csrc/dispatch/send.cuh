// Dispatch, a role of GEMM 1's kernel: rows of this rank's tokens go straight into the layouts of
// their experts' ranks, this rank's own among them.
//
// A warp works alone: it claims a piece, which is up to 32 rows that follow each other in
// `sources`, copies them, and adds them to the counters of the slots where they lie. Each lane
// knows where one row comes from and goes to. Nobody ever waits for anybody here, so whatever is
// resident sends all there is to send, and a loader that waits for rows waits only for warps that
// run.
//
// Who sends, before a CTA's first tile (begin): all warps of the first num_dispatch_ctas CTAs send
// to peers until nothing is left; all others bring one piece of the rank's own rows each, which is
// what the first tiles want (but for warp 0, which claims the first tile meanwhile). If no more
// rows go to peers than there are warps, all CTAs send, and every row is on its way at once. Beside
// the tiles (go_on): a spare warp of each CTA sends to peers and one brings own rows, and either
// then helps the other. They cost no SM, but have few registers and no shared memory.
//
// So there are two ways to copy: by bulk copies through the memory of the GEMM's operands as long
// as no tile is in it (bulk.cuh; a CTA sends 43 GB/s), and through registers beside the tiles.
//
// Order: a peer's rows are claimed by expert, ascending, as its GEMM 1 wants them
// (ProducerParams::front_bands), and the peers in turn, so that all links are busy.
#pragma once

#include "bulk.cuh"

namespace tilemoe::dispatch {

constexpr int kUnroll = 8;

// Lanes go over the piece in 16-byte vectors, neighbours side by side.
__device__ __forceinline__ void copy(const DispatchParams& p, const Piece& piece, const Row& mine) {
  constexpr uint32_t kNowhere = 0xffffffffu;
  const int32_t lane = threadIdx.x % 32;
  const int32_t vectors = static_cast<int32_t>(p.row_bytes / 16);  // of a row
  const int32_t all = piece.rows * vectors;
  const int32_t row_step = 32 / vectors;
  const int32_t column_step = 32 - row_step * vectors;
  const uint4* const from = static_cast<const uint4*>(p.x);
  uint4* const to = reinterpret_cast<uint4*>(p.view.blocks[piece.rank] + p.view.offsets.dispatch);
  __builtin_assume(__isGlobal(from));  // the compiler cannot see it of an address out of memory
  __builtin_assume(__isGlobal(to));
  int32_t row = lane / vectors;
  int32_t column = lane - row * vectors;
#pragma unroll 1
  for (int32_t at = lane; at - lane < all; at += 32 * kUnroll) {
    uint4 values[kUnroll];
    uint32_t targets[kUnroll];  // in vectors: neither x nor a room has 2^32
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t token = __shfl_sync(kAllLanes, mine.token, row);
      const uint32_t place = __shfl_sync(kAllLanes, mine.place, row);
      const bool here = at + 32 * i < all && static_cast<int32_t>(place) >= 0;
      targets[i] = here ? place * vectors + column : kNowhere;
      values[i] =
          from[here ? token * vectors + column : 0];  // no branch: all are in flight at once
      row += row_step;
      column += column_step;
      if (column >= vectors) column -= vectors, ++row;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (targets[i] != kNowhere) to[targets[i]] = values[i];
    }
  }
}

// A warp's pieces through registers.
class PlainCopy {
 public:
  __device__ PlainCopy(const DispatchParams& p, uint64_t epoch) : p_(p), epoch_(epoch) {}

  __device__ void take(const Piece& piece, const Row& row) { copy(p_, piece, row); }
  __device__ void settle(const Piece& piece, const Row& row) {
    signal(p_, piece.rank, row.place, epoch_);
  }
  __device__ void finish() {}

 private:
  const DispatchParams& p_;
  const uint64_t epoch_;
};

// The same in all warps of a kernel, as a claim must mean the same piece to all.
__device__ __forceinline__ int32_t shares(const DispatchParams& p, bool own, int warps_a_cta) {
  const int32_t ctas = gridDim.x;
  if (own) return ctas * warps_a_cta;
  return kLeastPieces * (ctas * kSpareWarps + min(p.num_dispatch_ctas, ctas) * warps_a_cta);
}

// One warp: pieces until none is left, or (`once`) one.
template <class Copy>
__device__ __forceinline__ void move(const DispatchParams& p, uint64_t epoch, bool own,
                                     int warps_a_cta, bool once, Copy& copy) {
  Half& half = half_at(p.view, epoch);
  uint32_t* const claims = own ? &half.gather_claim : &half.dispatch_claim;
  const auto claim = [&] {
    random_delay(p.view);
    return threadIdx.x % 32 == 0 ? claim_next(claims) : 0;
  };
  const uint32_t first = claim();  // in flight while the pieces are counted
  const Pieces pieces(p, own, shares(p, own, warps_a_cta));
  const auto piece_of = [&](uint32_t mine) {
    const uint32_t claimed = __shfl_sync(kAllLanes, mine, 0);
    return claimed < static_cast<uint32_t>(pieces.count()) ? pieces.at(claimed) : Piece{0, 0, 0};
  };
  Piece piece = piece_of(first);
  Row row = look_up(p, piece);
#pragma unroll 1
  while (piece.rows > 0) {
    const uint32_t next = once ? 0xffffffffu : claim();
    copy.take(piece, row);
    // Looked up while stores are under way.
    const Piece following = piece_of(next);
    const Row its_row = look_up(p, following);
    copy.settle(piece, row);
    piece = following;
    row = its_row;
  }
  copy.finish();
}

// CTAs that send to peers before their tiles, in the order of their start: as many as were asked
// for, or all if that takes each warp a row or less.
__device__ __forceinline__ int32_t senders(const DispatchParams& p, int warps_a_cta) {
  const int64_t* const own = p.recv_row + p.view.rank * p.local_experts;
  const int64_t remote =
      p.recv_row[p.view.world * p.local_experts] - (own[p.local_experts] - own[0]);
  const int32_t ctas = gridDim.x;
  return remote <= int64_t{ctas} * warps_a_cta ? ctas : p.num_dispatch_ctas;
}

// Brings a piece or two before its tiles.
__device__ __forceinline__ bool is_short(uint32_t ticket, int32_t senders) {
  return senders == static_cast<int32_t>(gridDim.x) || static_cast<int32_t>(ticket) >= senders;
}

// A warp of CTA number `ticket` of those that have started, before its tiles. `memory` and
// `barriers` are its own. A CTA barrier comes next.
__device__ __forceinline__ void begin(const DispatchParams& p, uint32_t ticket, int32_t senders,
                                      int warps_a_cta, void* memory, SlotBarriers& barriers) {
  const uint64_t epoch = state_of(p.view).epoch;
  BulkCopy copy(p, memory, barriers, epoch);
  const bool sender = static_cast<int32_t>(ticket) < senders;
  // Where all send, every other CTA begins with own rows, so that these do not come last.
  const bool own_first = senders == static_cast<int32_t>(gridDim.x) && ticket % 2 == 1;
#pragma unroll 1
  for (int turn = sender ? 0 : 1; turn < 2; ++turn) {
    const bool own = (turn == 1) != own_first;
    move(p, epoch, own, warps_a_cta, own, copy);
  }
}

// Spare warp number `spare` of a CTA, beside its tiles.
__device__ __forceinline__ void go_on(const DispatchParams& p, int spare, int warps_a_cta) {
  const uint64_t epoch = state_of(p.view).epoch;
  PlainCopy copy(p, epoch);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    move(p, epoch, (turn + spare) % 2 == 0, warps_a_cta, false, copy);
  }
}

// The loader, before it loads a band: its rows are here, or the group has failed and what is loaded
// does not matter.
__device__ __forceinline__ void await_rows(const RankView& view, const uint32_t* slot_rows,
                                           int32_t row, int32_t rows) {
  const int32_t slot = row / kProducerTileM;
  const uint32_t* const word = slot_rows + slot;
  if constexpr (kFault != Fault::no_row_wait) {
    if (read_slot_rows(word) != static_cast<uint32_t>(rows)) {
      uint64_t polls = 0;
      if (!wait_equal(view, view.wait_timeout_ns, rows, Wait::dispatch, -1, slot,
                      state_of(view).epoch, &polls, [&] { return read_slot_rows(word); })) {
        // Rows made of what did not come will be shipped: all ranks have to know it before.
        fail_group(view, failure_of(view, view.rank).record);
      }
    }
  }
  fence_async_proxy();
}

}  // namespace tilemoe::dispatch
