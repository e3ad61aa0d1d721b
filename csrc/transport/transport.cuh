// Device side of the transport: how a CTA sends to a rank whose memory is not mapped, or when the
// configuration forces this path. Mapped peers take plain stores, which are faster on NVLink.
//
// These functions are defined in another translation unit, so a kernel that calls them is compiled
// as relocatable device code: its .cu belongs into this folder (op_builder/cuda.py). A GEMM kernel
// may not call them: an external call makes ptxas serialise wgmma.
//
// One arrival word takes one path: a NIC's additions and this GPU's are not atomic to each other.
#pragma once

#include <cstdint>

namespace tilemoe::transport {

// Starts to copy `bytes` from local device memory to `rank`'s copy of symmetric `destination`.
// All threads of the CTA call it, with equal arguments; it begins and ends with a CTA barrier.
// `source` must stay as it is until quiet().
__device__ void put(void* destination, const void* source, int64_t bytes, int32_t rank);

// Waits until all puts that this CTA has started are performed where they went. One thread calls
// it, behind a CTA barrier. Unlike every other wait of a kernel for another rank it has no deadline
// (the library has no quiet with one): it ends when the puts do, and no failure word ends it.
__device__ void quiet();

// Adds to `rank`'s copy of the symmetric arrival word; the thread that called quiet() calls it, so
// that whoever sees the sum sees the puts. The reader: read_system in common/flags.cuh.
__device__ void add_arrivals(uint64_t* word, uint64_t rows, int32_t rank);

}  // namespace tilemoe::transport
