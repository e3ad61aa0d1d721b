// What a warp of dispatch works on: pieces, which are up to 32 rows that follow each other in
// `sources`, and where each of their rows comes from and goes to.
#pragma once

#include "../common/wait.cuh"
#include "../common/warp.cuh"
#include "../producer/producer.h"
#include "dispatch.h"

namespace tilemoe::dispatch {

constexpr int32_t kPieceBytes = 32 << 10;  // at most, but for longer rows
// Peers' pieces that a sending warp gets at least, as long as they have a row each: a spare warp is
// some times slower than one of a sending CTA, and the last rows are waited for.
constexpr int32_t kLeastPieces = 4;
constexpr int kSpareWarps = 2;  // of a CTA
constexpr int kPlaceWords = (kMaxWorld + 31) / 32;

// Rows [begin, begin + rows) of `sources`, all for experts of `rank`.
struct Piece {
  int32_t rank;
  int32_t begin;
  int32_t rows;
};

// The pieces of one role, a rank a lane: places 0 to W - 2 are the peers, from this rank + 1 on,
// and place W - 1 is this rank itself. All lanes call everything here.
class Pieces {
 public:
  // A role's rows are shared out by `shares`, the same number in all warps.
  __device__ Pieces(const DispatchParams& p, bool own, int32_t shares) : p_(p) {
    const int lane = threadIdx.x % 32;
    const int32_t world = p.view.world;
    lists_ = own ? 1 : world - 1;
    int32_t rows = 0;
#pragma unroll
    for (int w = 0; w < kPlaceWords; ++w) {
      const int32_t place = 32 * w + lane;
      pieces_[w] = 0;
      if (place < world && (place == world - 1) == own) {
        const int32_t rank = rank_at(place);
        pieces_[w] = first_row(rank + 1) - first_row(rank);
        rows += pieces_[w];
      }
    }
    rows = __reduce_add_sync(kAllLanes, rows);
    const int64_t fit = kPieceBytes / p.row_bytes;
    piece_rows_ = max(1, min(min(32, static_cast<int32_t>(fit)), ceil_div(rows, shares)));
    longest_ = 0;
#pragma unroll
    for (int w = 0; w < kPlaceWords; ++w) {
      pieces_[w] = ceil_div(pieces_[w], piece_rows_);
      longest_ = max(longest_, pieces_[w]);
    }
    longest_ = __reduce_max_sync(kAllLanes, longest_);
    count_ = within(longest_);
  }

  __device__ int32_t count() const { return count_; }

  // Round after round over the ranks that have a piece left.
  __device__ Piece at(int32_t claim) const {
    const int lane = threadIdx.x % 32;
    int32_t round = claim / lists_;
    int32_t step = 1;
    while (round + step < longest_ && within(round + step) <= claim) round += step, step *= 2;
    for (int32_t end = min(round + step, longest_); end - round > 1;) {
      const int32_t middle = (round + end) / 2;
      if (within(middle) <= claim) {
        round = middle;
      } else {
        end = middle;
      }
    }
    int32_t index = claim - within(round);  // among the ranks of that round
    int32_t rank = p_.view.rank;
#pragma unroll
    for (int w = 0; w < kPlaceWords; ++w) {
      const bool here = pieces_[w] > round;
      const uint32_t all = __ballot_sync(kAllLanes, here);
      const int32_t before = __popc(all & ((1u << lane) - 1));
      const uint32_t found = __ballot_sync(kAllLanes, here && before == index);
      if (found != 0) rank = rank_at(32 * w + __ffs(found) - 1);
      index -= __popc(all);  // negative behind the word that had it
    }
    const int32_t begin = first_row(rank) + round * piece_rows_;
    return {rank, begin, min(piece_rows_, first_row(rank + 1) - begin)};
  }

 private:
  __device__ int32_t rank_at(int32_t place) const {
    const int32_t rank = p_.view.rank + 1 + place;
    return rank < p_.view.world ? rank : rank - p_.view.world;
  }
  __device__ int32_t first_row(int32_t rank) const {
    return static_cast<int32_t>(p_.recv_row[rank * p_.local_experts]);
  }
  // Pieces of the first `rounds` rounds.
  __device__ int32_t within(int32_t rounds) const {
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kPlaceWords; ++w) {
      if (32 * w < p_.view.world) sum += __reduce_add_sync(kAllLanes, min(pieces_[w], rounds));
    }
    return sum;
  }

  const DispatchParams& p_;
  int32_t lists_;
  int32_t piece_rows_;
  int32_t longest_;
  int32_t count_;
  int32_t pieces_[kPlaceWords];
};

// A lane's row of a piece.
struct Row {
  int32_t token;
  int32_t place;  // row of the layout; -1: none
};

// A lane an expert, so that all of it is one wait for memory. A place outside of the room, which
// only a plan that does not fit has, is none: that rank fails the call, and its peers must not
// write over what lies behind.
__device__ __forceinline__ Row look_up(const DispatchParams& p, const Piece& piece) {
  const int lane = threadIdx.x % 32;
  Row row{0, -1};
  if (piece.rows == 0) return row;
  const int32_t at = piece.begin + min(lane, piece.rows - 1);
  row.token = p.sources[at];
  int32_t place = -1;
#pragma unroll 1
  for (int32_t base = 0; base < p.local_experts; base += 32) {
    const int32_t expert = piece.rank * p.local_experts + base + lane;
    const bool here = base + lane < p.local_experts;
    const int32_t begin = here ? static_cast<int32_t>(p.recv_row[expert]) : INT32_MAX;
    const int32_t to = here ? static_cast<int32_t>(p.dispatch_row[expert]) : 0;
    int32_t last = 0;  // expert whose rows begin at `at` or before it
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, begin, last + step) <= at) last += step;
    }
    const int32_t its_begin = __shfl_sync(kAllLanes, begin, last);
    const int32_t its_place = __shfl_sync(kAllLanes, to, last);
    if (its_begin <= at) place = its_place + (at - its_begin);
    if (__all_sync(kAllLanes, its_begin > at)) break;
  }
  const BlockOffsets& o = p.view.offsets;
  const bool fits = (int64_t{place} + 1) * p.row_bytes <= o.block_bytes - o.dispatch &&
                    (place / kProducerTileM + 1) * int64_t{sizeof(uint32_t)} <= o.slot_half_bytes;
  if (lane < piece.rows && fits) row.place = place;
  return row;
}

// One addition for each slot that the piece has rows in, behind its last store.
__device__ __forceinline__ void signal(const DispatchParams& p, int32_t rank, int32_t place,
                                       uint64_t epoch) {
  const int32_t slot = place < 0 ? -1 : place / kProducerTileM;
  const uint32_t same = __match_any_sync(kAllLanes, slot);
  random_delay(p.view);
  __syncwarp();  // lanes that do not add have stored, too
  if (slot < 0 || __ffs(same) - 1 != static_cast<int>(threadIdx.x % 32)) return;
  add_slot_rows(slot_rows_of(p.view, rank, epoch) + slot, __popc(same));
}

}  // namespace tilemoe::dispatch
