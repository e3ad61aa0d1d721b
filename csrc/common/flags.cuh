// Every flag, counter and arrival word that kernels share through global memory, and the only file
// with their PTX. Beside each: who writes, who reads, scope, and what orders the data it announces.
//
// Words must be read with these functions only: data behind a flag is read with plain ld.global
// after the acquire, never with ld.global.nc (no `const __restrict__`, no __ldg), because the
// non-coherent path may return lines fetched before the flag was seen.
#pragma once

#include <cstdint>

// The checks plant one fault at a time (tests/gpu/Makefile, FAULT=), each in one place; a build of
// the package never defines this.
#ifndef TILEMOE_FAULT
#define TILEMOE_FAULT 0
#endif

namespace tilemoe {

enum class Fault : int {
  none = 0,
  // Of the operator.
  store_read_wait = 1,  // flags are raised once shared memory is free, not once rows are written
  no_release = 2,       // no fence anywhere: before flags, arrivals, slots' rows, count rows
  no_acquire = 3,       // flags, arrivals and count rows are polled with relaxed loads
  no_wait = 4,          // a chunk is shipped without a look at its flags
  one_half = 5,         // C has one half
  // Of dispatch.
  no_row_release = 6,        // no fence before a slot's rows are counted
  no_row_acquire = 7,        // the loader polls a slot's rows with relaxed loads
  no_row_proxy_fence = 8,    // the loader has no fence between that and its TMA
  no_row_wait = 9,           // a band is loaded without a look at its slot's rows
  row_store_read_wait = 10,  // rows are counted once shared memory is free
  // Of the exchange: what stays in the half of an epoch.
  counters_not_zeroed = 11,  // claims, counts and band flags
  rows_not_zeroed = 12,      // slots' rows
  arrivals_not_zeroed = 13,
  // Of the exchange and scale.
  early_arrival = 14,       // scale takes a source's first arrival for its last
  no_arrival_release = 15,  // no fence before an arrival
  no_count_release = 16,    // no fence before a count row's ready word (and a record's epoch)
  no_count_wait = 17,       // count rows are taken as they are
};
constexpr Fault kFault = static_cast<Fault>(TILEMOE_FAULT);

// ---- Band flag: tiles of a band that are in global memory. Target: number of N tiles.
// Writer: lane 0 of the producer's store warp, once a tile, after its bulk stores.
// Reader: a lane of warp 0 of a consumer (or drain) CTA, which then hands the chunk over through an
//         mbarrier in shared memory (ship.cuh, full); thread 0 of the put consumer, which then
//         passes a CTA barrier.
// Scope:  gpu; both kernels run on the device that owns the band.
// Order:  bulk stores -> wait_bulk_stores (writes visible to the storing thread, async proxy and
//         generic proxy alike) -> fence.acq_rel.gpu -> red.relaxed. Reader: ld.acquire.gpu ->
//         mbarrier (arrive releases, wait acquires, in the CTA) or CTA barrier -> plain loads of
//         the others. A reader that issues bulk or TMA loads adds fence.proxy.async.

// Waits until the bulk stores of this thread are performed. Not `.read`: that form only says that
// shared memory may be written again, and a flag raised behind it overtakes the data.
__device__ __forceinline__ void wait_bulk_stores() {
  if constexpr (kFault == Fault::store_read_wait) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Waits until all but the newest `kNewest` bulk stores of this thread have read shared memory.
template <int kNewest>
__device__ __forceinline__ void wait_bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}

__device__ __forceinline__ void fence_gpu() {
  if constexpr (kFault != Fault::no_release) asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
__device__ __forceinline__ void fence_system() {
  if constexpr (kFault != Fault::no_release) asm volatile("fence.acq_rel.sys;" ::: "memory");
}

__device__ __forceinline__ void raise_band_flag(uint32_t* flag) {
  fence_gpu();
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}
// The same; returns the value from before.
__device__ __forceinline__ uint32_t raise_and_read_band_flag(uint32_t* flag) {
  uint32_t value;
  fence_gpu();
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t read_band_flag(const uint32_t* flag) {
  uint32_t value;
  if constexpr (kFault == Fault::no_acquire) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  }
  return value;
}

// ---- Claim counter: the next tile or chunk to hand out.
// Writer and reader: the claiming thread of each CTA. Scope: gpu. Order: none is needed; a claim
// only picks work, and what the work reads is ordered by the launch or by its own flags.
__device__ __forceinline__ uint32_t claim_next(uint32_t* counter) {
  uint32_t value;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(value)
               : "l"(counter)
               : "memory");
  return value;
}

// ---- Arrival word: rows that one source rank has put into this rank's receive buffer.
// Writer: one thread of a shipping CTA on the source rank, once, after a CTA barrier behind the
//         CTA's last store. Reader: one thread of the owner's scale kernel, then a CTA barrier.
// Scope:  sys; the word and the rows live in the owner's memory and are written over NVLink.
// Order:  the CTA's plain stores -> CTA barrier -> fence.acq_rel.sys (cumulative over the barrier)
//         -> red.relaxed.sys. Reader: ld.acquire.sys -> CTA barrier -> plain loads.
__device__ __forceinline__ void add_arrivals(uint64_t* word, uint64_t rows) {
  if constexpr (kFault != Fault::no_arrival_release) fence_system();
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(rows) : "memory");
}

// Also of a count row's ready word.
__device__ __forceinline__ uint64_t read_system(const uint64_t* word) {
  uint64_t value;
  if constexpr (kFault == Fault::no_acquire) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  } else {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  }
  return value;
}

// ---- Rows of a slot: rows that dispatch has brought into tile_m rows of a rank's layout.
// Writer: lanes of any warp of any rank's GEMM 1 that has copied rows there, once a piece.
// Reader: the loader of the owner's GEMM 1, one thread, before it loads a band that lies there.
// Scope:  sys, also for the owner's own rows: additions that a reader joins have one scope.
// Order:  the warp's plain stores, or lane 0's bulk stores -> wait_group (not `.read`) ->
//         __syncwarp -> fence.acq_rel.sys (cumulative) -> red.relaxed.sys, both by the first of
//         the lanes whose rows are in that slot. Reader: ld.acquire.sys -> fence.proxy.async ->
//         TMA, which reads in another proxy than the one that wrote.
__device__ __forceinline__ void add_slot_rows(uint32_t* word, uint32_t rows) {
  if constexpr (kFault != Fault::no_row_release) fence_system();
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(rows) : "memory");
}
__device__ __forceinline__ uint32_t read_slot_rows(const uint32_t* word) {
  uint32_t value;
  if constexpr (kFault == Fault::no_row_acquire) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  } else {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  }
  return value;
}
__device__ __forceinline__ void fence_async_proxy() {
  if constexpr (kFault != Fault::no_row_proxy_fence) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
}

// ---- Ready word of a count row: the 64-bit epoch, waited for by equality.
// Writer: one thread of the source rank's exchange, after a CTA barrier behind the row's stores.
// Reader: one thread of the block owner's exchange (read_system), then a CTA barrier.
// Scope:  sys. Order: the row's plain stores and the zeroing of this epoch's half -> CTA barrier ->
//         fence.acq_rel.sys -> st.relaxed.sys.
__device__ __forceinline__ void publish_ready(uint64_t* word, uint64_t epoch) {
  if constexpr (kFault != Fault::no_count_release) fence_system();
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(epoch) : "memory");
}

// ---- Failure words of a block: any rank claims and writes, the block's owner polls. Scope: sys.
// Order: record -> st.release.sys code. Reader: ld.acquire.sys code.
__device__ __forceinline__ bool claim_failure(uint32_t* word) {
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], 0, 1;"
               : "=r"(before)
               : "l"(word)
               : "memory");
  return before == 0;
}
__device__ __forceinline__ void raise_failure(uint32_t* code) {
  asm volatile("st.release.sys.global.u32 [%0], 1;" ::"l"(code) : "memory");
}
__device__ __forceinline__ bool read_failure(const uint32_t* code) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(code) : "memory");
  return value != 0;
}

// ---- Counts of an epoch, read by its own kernels. Scope: gpu. Order: none, they announce no data.
__device__ __forceinline__ void add_count(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void add_count(uint64_t* word, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint32_t add_and_read_count(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ uint32_t read_count(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// ---- Programmatic dependent launch: the next kernel's CTAs come while this one still runs.
// allow_dependents: by one thread a CTA, once no work of the kernel needs a further SM, and, from
// the count exchange on, behind await_prerequisites or in a kernel that is not launched early:
// scale looks at the call's state and plan in front of its own wait, and GEMM 2 at the plan, and
// both rely on it that the exchange has ended once the GEMM in front has come so far. The router's
// kernels allow before they wait: the exchange waits in all threads before it allows, so what comes
// behind it comes when they have all ended.
//
// await_prerequisites: by all threads of all CTAs, so that the end of a kernel is the end of all in
// front of it; returns when the kernel in front has ended and its writes are visible.
__device__ __forceinline__ void allow_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void await_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Time. Nanoseconds; one clock for all SMs of a device, ticks of about 1 us or finer.
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
}

// Latest of the times that the CTAs of a kernel record. Read after the kernel has ended.
__device__ __forceinline__ void record_latest(uint64_t* word, uint64_t time_ns) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(word), "l"(time_ns) : "memory");
}

// ---- Epoch of a call record, in page-locked host memory. Scope: sys.
// Writer: one thread, when the call's kernels have ended (record.cuh).
// Reader: the host, which reads the epoch before and after the record.
// Order:  0 -> fence.acq_rel.sys -> record (volatile stores) -> fence.acq_rel.sys -> epoch
//         (publish_ready). A host that has read a word of the new record finds 0 or the new epoch
//         behind it, never the old one, so a torn record does not pass.
__device__ __forceinline__ void take_back(uint64_t* word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], 0;" ::"l"(word) : "memory");
}

}  // namespace tilemoe
