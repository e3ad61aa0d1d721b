// The consumer for owners whose memory is not mapped, or when the configuration forces puts.
// Simpler than the mapped one (consumer/ship.cuh): the CTA claims a chunk, waits for its bands and
// puts it, one after another.
#include "../consumer/ship.cuh"
#include "transport.cuh"
#include "transport.h"

namespace tilemoe::transport {
namespace {

constexpr int kThreads = 512;
constexpr int kSharedBytes = 120 * 1024;  // more than half of an SM's: two CTAs never share one

struct Put {
  const std::byte* from;
  std::byte* to;  // as if the owner were this rank
  int64_t bytes;  // -1: nothing is left
  int32_t owner;
};

// One thread. False when no chunk is left or a wait has ended without its bands.
__device__ bool next_chunk(const ShipParams& p, Half& half, uint64_t epoch, uint64_t* polls,
                           Put* put, int32_t* rows) {
  const uint32_t claim = claim_next(&half.chunk_claim);
  if (claim >= static_cast<uint32_t>(state_of(p.view).chunks)) return false;
  const consumer::Place place = consumer::look_up(p, claim);
  if (!consumer::wait_bands(p, band_flags_of(half), place, epoch, polls)) return false;
  std::byte* const to = reinterpret_cast<std::byte*>(place.work.to);
  *put = {reinterpret_cast<const std::byte*>(place.work.from),
          p.view.blocks[p.view.rank] + (to - p.view.blocks[place.owner]), place.rows * p.row_bytes,
          place.owner};
  *rows = place.rows;
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    put_consumer_kernel(const __grid_constant__ ShipParams p, const int32_t* pes, int32_t last) {
  __shared__ Put next;
  __shared__ uint32_t rows_to[kMaxWorld];
  if (last == 0 && consumer::not_in_split(p)) return;
  const RankView& view = p.view;
  const uint64_t epoch = state_of(view).epoch;
  Half& half = half_at(view, epoch);
  uint64_t polls = 0;
  uint32_t handed = 0;
  if (threadIdx.x < kMaxWorld) rows_to[threadIdx.x] = 0;
  if (threadIdx.x == 0) allow_dependents();
  while (true) {
    __syncthreads();  // all have read the chunk before, and rows_to is zero
    if (threadIdx.x == 0) {
      random_delay(view);
      Put put{nullptr, nullptr, -1, 0};
      int32_t rows = 0;
      if (next_chunk(p, half, epoch, &polls, &put, &rows)) rows_to[put.owner] += rows;
      next = put;
    }
    __syncthreads();
    const Put chunk = next;
    if (chunk.bytes < 0) break;
    // Thread 0 has acquired the flags; put() begins with a CTA barrier.
    put(chunk.to, chunk.from, chunk.bytes, pes[chunk.owner]);
    if (threadIdx.x == 0 && handed++ > 0) add_count(&half.chunks_shipped, 1);  // but for the last
  }
  if (threadIdx.x != 0) return;
  if (polls > 0) add_count(&half.idle_spins, polls);
  if (handed == 0) return;
  quiet();
  uint64_t* const word = arrival_word(view, view.rank, epoch, view.rank);
  for (int32_t owner = 0; owner < view.world; ++owner) {
    if (rows_to[owner] > 0) add_arrivals(word, rows_to[owner], pes[owner]);
  }
  record_latest(&half.last_put_ns, now_ns());
  if (last != 0) add_count(&half.chunks_drained, handed);
  fence_gpu();  // whoever sees that all chunks are shipped sees these, too
  add_count(&half.chunks_shipped, 1);
}

}  // namespace
}  // namespace tilemoe::transport

cudaError_t tilemoe_put_consumer_load() {
  return cudaFuncSetAttribute(tilemoe::transport::put_consumer_kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tilemoe::transport::kSharedBytes);
}

cudaError_t tilemoe_put_consumer_launch(const tilemoe::ShipParams* params, const int32_t* pes,
                                        int32_t ctas, int32_t last, cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || pes == nullptr || ctas < 0 || params->view.world < 1 ||
      params->view.world > kMaxWorld || params->row_bytes <= 0 || params->row_bytes % 16 != 0 ||
      params->n_tiles < 1) {
    return cudaErrorInvalidValue;
  }
  if (ctas == 0) return cudaSuccess;
  transport::put_consumer_kernel<<<ctas, transport::kThreads, transport::kSharedBytes, stream>>>(
      *params, pes, last);
  return cudaGetLastError();
}
