// A warp's pieces by bulk copies through shared memory: global -> a slot -> the layout's room, one
// slot coming in while the other goes out. Only before a CTA's first tile, when the memory of the
// GEMM's operands is free for it: a warp has its own part of that and its own barriers.
//
// The memory is data only and the copy engine alone touches it, here and in the pipeline behind, so
// no access ever crosses from one proxy to the other. finish() returns when the engine has done
// with it, and a CTA barrier behind that hands it over.
#pragma once

#include "../common/barriers.cuh"
#include "pieces.cuh"

namespace tilemoe::dispatch {

constexpr int32_t kSlotBytes = 8 << 10;
constexpr int32_t kWarpBytes = 2 * kSlotBytes;

// Of a warp, in shared memory: the bytes of a slot are here.
struct SlotBarriers {
  uint64_t full[2];
};

// By one thread, before a fence and a CTA barrier.
__device__ __forceinline__ void init(SlotBarriers& barriers) {
  for (uint64_t& full : barriers.full) barrier_init(full, 1);
}

// x was written by kernels that ended before this one began.
__device__ __forceinline__ void load_row(uint32_t slot, const std::byte* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(slot),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_rows(std::byte* to, uint32_t slot, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(slot),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the newest `kNewest` groups of this thread are performed; see wait_bulk_stores.
template <int kNewest>
__device__ __forceinline__ void wait_stores() {
  if constexpr (kFault == Fault::row_store_read_wait) {
    wait_bulk_stores_read<kNewest>();
  } else {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
  }
}

// All lanes call everything. Lane 0 issues and awaits all stores, a group a part, where a part is
// what a slot holds: whole rows, or 8 KiB of a longer one.
//
// Who may be told, and when: a peer's loader reads a row once it has acquired the additions to its
// slot. wait_group says to lane 0 that the writes of its groups are performed and visible to it, in
// both proxies (completion implies the proxy fence); __syncwarp orders that before the other lanes;
// fence.acq_rel.sys, cumulative over both, before the red.relaxed.sys of the same lane. A piece is
// told of while parts of the next one are on their way, so that nothing stops for it.
class BulkCopy {
 public:
  __device__ BulkCopy(const DispatchParams& p, void* memory, SlotBarriers& barriers, uint64_t epoch)
      : p_(p), epoch_(epoch), memory_(shared_address(memory)), barriers_(barriers) {}

  // Returns when the last part is on its way in. It is stored behind the next load.
  __device__ void take(const Piece& piece, const Row& row) {
    const int lane = threadIdx.x % 32;
    const int32_t row_bytes = static_cast<int32_t>(p_.row_bytes);
    const int32_t most = max(1, kSlotBytes / row_bytes);  // rows of a part
    const std::byte* const from = static_cast<const std::byte*>(p_.x) + row.token * p_.row_bytes;
    std::byte* const room = p_.view.blocks[piece.rank] + p_.view.offsets.dispatch;
    const bool here = row.place >= 0;
    const int32_t before = __shfl_up_sync(kAllLanes, row.place, 1);
    const uint32_t valid = __ballot_sync(kAllLanes, here);
    const uint32_t behind =  // the row of the lane before
        __ballot_sync(kAllLanes, here && lane > 0 && before >= 0 && row.place == before + 1);
    int32_t first = 0, column = 0;
#pragma unroll 1
    while (first < piece.rows) {
      Part part;
      const int32_t rows = min(most, piece.rows - first);
      const uint32_t lanes = (kAllLanes >> (32 - rows)) << first;
      part.to = room + column;
      part.rank = piece.rank;
      part.place = row.place;
      part.first = first;
      part.bytes = min(row_bytes - column, kSlotBytes);
      part.valid = valid & lanes;
      part.joined = behind & lanes & ~(1u << first);
      if (lane == 0) wait_bulk_stores_read<0>();  // the slot's former part has left it
      __syncwarp();
      const uint32_t barrier = shared_address(&barriers_.full[loaded_ % 2]);
      if (lane == 0) expect_bytes(barrier, __popc(part.valid) * part.bytes);
      if ((part.valid >> lane & 1) != 0) {
        load_row(memory_ + loaded_ % 2 * kSlotBytes + (lane - first) * part.bytes, from + column,
                 part.bytes, barrier);
      }
      store_held();
      column += part.bytes;
      if (column == row_bytes) column = 0, first += rows;
      part.ends = first >= piece.rows;
      held_ = part;
      holds_ = true;
      ++loaded_;
    }
  }
  __device__ void settle(const Piece&, const Row&) {}

  // All that was taken is stored and told of.
  __device__ void finish() {
    store_held();
    holds_ = false;
    if (!owes_) return;
    if (threadIdx.x % 32 == 0) wait_stores<0>();
    tell();
  }

 private:
  struct Part {
    std::byte* to;  // these columns of row 0 of the layout
    int32_t rank;
    int32_t place;    // of the lane's row
    int32_t first;    // its lanes begin here
    int32_t bytes;    // of a row
    uint32_t valid;   // lanes with a row
    uint32_t joined;  // lanes whose row lies behind that of the lane before
    bool ends;        // its piece
  };

  // Part number loaded_ - 1.
  __device__ void store_held() {
    if (!holds_) return;
    const bool leader = threadIdx.x % 32 == 0;
    const uint32_t number = loaded_ - 1;
    const uint32_t slot = memory_ + number % 2 * kSlotBytes;
    if (leader) barrier_wait(barriers_.full[number % 2], number / 2 % 2);
    for (uint32_t left = held_.valid & ~held_.joined; left != 0; left &= left - 1) {
      const int head = __ffs(left) - 1;
      const int32_t rows = __ffs(~(held_.joined >> head >> 1));
      const int32_t place = __shfl_sync(kAllLanes, held_.place, head);
      if (leader) {
        store_rows(held_.to + place * p_.row_bytes, slot + (head - held_.first) * held_.bytes,
                   rows * held_.bytes);
      }
    }
    if (leader) commit_stores();
    if (owes_ && (++newer_ == 2 || held_.ends)) {
      if (leader && newer_ == 2) wait_stores<2>();
      if (leader && newer_ != 2) wait_stores<1>();
      tell();
    }
    if (!held_.ends) return;
    owes_ = true;
    owed_rank_ = held_.rank;
    owed_place_ = held_.place;
    newer_ = 0;
  }
  __device__ void tell() {
    signal(p_, owed_rank_, owed_place_, epoch_);
    owes_ = false;
  }

  const DispatchParams& p_;
  const uint64_t epoch_;
  const uint32_t memory_;
  SlotBarriers& barriers_;
  uint32_t loaded_ = 0;  // parts
  Part held_{};          // loaded and not yet stored, if holds_
  bool holds_ = false;
  bool owes_ = false;  // a piece is stored and not yet told of
  int32_t owed_rank_ = 0;
  int32_t owed_place_ = -1;
  int32_t newer_ = 0;  // parts stored behind it
};

}  // namespace tilemoe::dispatch
