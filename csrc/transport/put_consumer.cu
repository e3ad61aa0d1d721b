// The consumer for owners whose memory is not mapped, or when the configuration forces puts.
// Simpler than the mapped one (consumer/ship.cuh): the CTA claims a chunk, waits for its bands and
// puts it, one after another.
#include "../common/launch.cuh"
#include "../consumer/ship.cuh"
#include "transport.cuh"
#include "transport.h"

namespace tilemoe::transport {
namespace {

constexpr int kThreads = 512;
constexpr int kSharedBytes = 120 * 1024;  // more than half of an SM's: two CTAs never share one

// One thread. Without rows when no chunk is left or a wait has ended without its bands.
__device__ consumer::Place next_chunk(const ShipParams& p, Half& half, uint64_t epoch,
                                      uint64_t* polls) {
  const uint32_t claim = claim_next(&half.chunk_claim);
  if (claim >= static_cast<uint32_t>(state_of(p.view).chunks)) return {};
  const consumer::Place place = consumer::look_up(p, claim, false);
  return consumer::wait_bands(p, band_flags_of(half), place, epoch, polls) ? place
                                                                           : consumer::Place{};
}

__global__ void __launch_bounds__(kThreads, 1)
    put_consumer_kernel(const __grid_constant__ ShipParams p, const int32_t* pes, int32_t last) {
  __shared__ consumer::Place next;
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
      next = next_chunk(p, half, epoch, &polls);
      rows_to[next.owner] += next.rows;
    }
    __syncthreads();
    const consumer::Place chunk = next;
    if (chunk.rows == 0) break;
    // Thread 0 has acquired the flags; put() begins with a CTA barrier.
    put(chunk.work.to, chunk.work.from, chunk.rows * p.row_bytes, pes[chunk.owner]);
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
  if (params == nullptr || pes == nullptr || ctas < 0 || !valid(*params)) {
    return cudaErrorInvalidValue;
  }
  if (ctas == 0) return cudaSuccess;
  return launch(transport::put_consumer_kernel, ctas, transport::kThreads, transport::kSharedBytes,
                stream, false, *params, pes, last);
}
