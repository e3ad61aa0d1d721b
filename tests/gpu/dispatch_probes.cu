#include <cstdio>
#include <cstdlib>

#include "dispatch_probes.h"
#include "producer/producer_kernel.cuh"

namespace front {
namespace {

using namespace tilemoe;
using Usual = producer::Traits<cutlass::bfloat16_t, 256, false, 4, 2>;

__device__ RowWaits row_waits;

struct Timed : Usual {
  struct Rows {
    static __device__ void await(const RankView& view, const uint32_t* slot_rows, int32_t row,
                                 int32_t rows) {
      const uint32_t* const word = slot_rows + row / kProducerTileM;
      if (read_slot_rows(word) != static_cast<uint32_t>(rows)) {
        const uint64_t begin = now_ns();
        dispatch::await_rows(view, slot_rows, row, rows);
        const uint64_t waited = now_ns() - begin;
        const uint64_t start = half_at(view, state_of(view).epoch).front_start_ns;
        const uint64_t bucket = (begin - start) / (1000 * RowWaits::kBucketUs);
        atomicAdd(&row_waits.count, 1ull);
        atomicAdd(&row_waits.ns, waited);
        atomicMax(&row_waits.longest_ns, waited);
        atomicAdd(&row_waits.by_time[bucket < RowWaits::kBuckets ? bucket : RowWaits::kBuckets - 1],
                  waited);
      }
      fence_async_proxy();
    }
  };
};

struct NoWait : Usual {
  struct Rows {
    static __device__ void await(const RankView&, const uint32_t*, int32_t, int32_t) {}
  };
};

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "probe: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

__global__ void put_own(const __grid_constant__ DispatchParams p) {
  const uint64_t epoch = state_of(p.view).epoch;
  if (threadIdx.x == 0) half_at(p.view, epoch).gather_claim = 1u << 30;
  uint32_t* const slots = slot_rows_of(p.view, p.view.rank, epoch);
  for (int32_t local = threadIdx.x; local < p.local_experts; local += blockDim.x) {
    const int32_t expert = p.view.rank * p.local_experts + local;
    int64_t row = p.dispatch_row[expert];
    const int64_t end = row + p.recv_row[expert + 1] - p.recv_row[expert];
    while (row < end) {
      const int64_t slot = row / kProducerTileM;
      const int64_t to = min(end, (slot + 1) * kProducerTileM);
      add_slot_rows(slots + slot, static_cast<uint32_t>(to - row));
      row = to;
    }
  }
}

__global__ void watch(const __grid_constant__ ProducerParams p, uint64_t* done_ns) {
  const RankView& view = p.dispatch.view;
  const uint32_t* const slots = slot_rows_of(view, view.rank, state_of(view).epoch);
  const uint64_t start = now_ns();
  bool good = true;
  for (int32_t i = threadIdx.x; i < *p.band_count; i += blockDim.x) {
    const Band band = p.bands[i];
    const uint32_t* const word = slots + band.row / kProducerTileM;
    while (good && read_slot_rows(word) != static_cast<uint32_t>(band.rows)) {
      good = now_ns() - start < 1'000'000'000;
    }
  }
  good = __syncthreads_and(good);
  if (threadIdx.x == 0) *done_ns = good ? now_ns() : 0;
}

__global__ void read(const __grid_constant__ RankView view, CallTimes* times) {
  const Half& half = half_at(view, state_of(view).epoch);
  times->exchange_end_ns = half.facts.exchange_end_ns;
  times->start_ns = half.front_start_ns;
  times->end_ns = half.front_end_ns;
}

}  // namespace

const producer::InstanceEntry& probe(Probe kind) {
  static const producer::InstanceEntry timed = producer::make_entry<Timed>();
  static const producer::InstanceEntry no_wait = producer::make_entry<NoWait>();
  return kind == Probe::timed ? timed : no_wait;
}

void reset_row_waits() {
  const RowWaits zero{};
  check(cudaMemcpyToSymbol(row_waits, &zero, sizeof(zero)));
}
RowWaits read_row_waits() {
  RowWaits waits;
  check(cudaMemcpyFromSymbol(&waits, row_waits, sizeof(waits)));
  return waits;
}

void put_own_rows(const DispatchParams& dispatch, cudaStream_t stream) {
  put_own<<<1, 128, 0, stream>>>(dispatch);
  check(cudaGetLastError());
}
void watch_rows(const ProducerParams& params, uint64_t* done_ns, cudaStream_t stream) {
  watch<<<1, 128, 0, stream>>>(params, done_ns);
  check(cudaGetLastError());
}
void read_times(const ProducerParams& params, CallTimes* times, cudaStream_t stream) {
  read<<<1, 1, 0, stream>>>(params.dispatch.view, times);
  check(cudaGetLastError());
}

}  // namespace front
