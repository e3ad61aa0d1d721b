// Every flag, counter and arrival word that kernels share through global memory, and the only file
// with their PTX. Beside each: who writes, who reads, scope, and what orders the data it announces.
//
// Words must be read with these functions only: data behind a flag is read with plain ld.global
// after the acquire, never with ld.global.nc (no `const __restrict__`, no __ldg), because the
// non-coherent path may return lines fetched before the flag was seen.
#pragma once

#include <cstdint>

namespace tilemoe {

// ---- Band flag: tiles of a band that are in global memory. Target: number of N tiles.
// Writer: lane 0 of the producer's store warp, once a tile, after its bulk stores.
// Reader: one thread of a consumer (or drain) CTA, which then passes a CTA barrier.
// Scope:  gpu; both kernels run on the device that owns the band.
// Order:  bulk stores -> wait_bulk_stores (writes visible to the storing thread, async proxy and
//         generic proxy alike) -> fence.acq_rel.gpu -> red.relaxed. Reader: ld.acquire.gpu -> CTA
//         barrier -> plain loads. A reader that issues bulk or TMA loads adds fence.proxy.async.

// Waits until the bulk stores of this thread are performed. Not `.read`: that form only says that
// shared memory may be written again, and a flag raised behind it overtakes the data.
__device__ __forceinline__ void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Waits until all but the newest `kNewest` bulk stores of this thread have read shared memory.
template <int kNewest>
__device__ __forceinline__ void wait_bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}

__device__ __forceinline__ void raise_band_flag(uint32_t* flag) {
  asm volatile(
      "fence.acq_rel.gpu;\n\t"
      "red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(flag)
      : "memory");
}

__device__ __forceinline__ uint32_t read_band_flag(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
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
  asm volatile(
      "fence.acq_rel.sys;\n\t"
      "red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(word),
      "l"(rows)
      : "memory");
}

__device__ __forceinline__ uint64_t read_arrivals(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
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

}  // namespace tilemoe
