// GEMM 1 with other ways to wait for rows than the product's: for measurements only.
#pragma once

#include <cstdint>

#include "producer/instances.h"

namespace front {

// How long loaders found rows missing, all CTAs of a device together.
struct RowWaits {
  static constexpr int kBuckets = 40;
  static constexpr int kBucketUs = 25;
  unsigned long long count;
  unsigned long long ns;
  unsigned long long longest_ns;
  unsigned long long by_time[kBuckets];  // ns, by when the wait began, since GEMM 1's start
};

enum class Probe {
  timed,   // waits and adds to RowWaits
  no_wait  // takes the rows as they are
};

// bf16, tile 256, not gated.
const tilemoe::producer::InstanceEntry& probe(Probe kind);

// Of the current device.
void reset_row_waits();
RowWaits read_row_waits();

// Counts the rank's own rows as here and leaves none of them to claim: before GEMM 1, behind the
// exchange, with the rows in place.
void put_own_rows(const tilemoe::DispatchParams& dispatch, cudaStream_t stream);

// Beside GEMM 1: the time when all rows of the rank's bands had come, or 0 after a second. It takes
// an SM.
void watch_rows(const tilemoe::ProducerParams& params, uint64_t* done_ns, cudaStream_t stream);

// Times of the call at hand, on the host once the stream has come here.
struct CallTimes {
  uint64_t exchange_end_ns;
  uint64_t start_ns;  // of GEMM 1: its first CTA
  uint64_t end_ns;    // its last tile
  uint64_t rows_ns;   // watch_rows, if it ran
};
void read_times(const tilemoe::ProducerParams& params, CallTimes* times, cudaStream_t stream);

}  // namespace front
