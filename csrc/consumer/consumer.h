// C ABI of the consumer kernel: ships finished rows into their owners' receive rooms.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/control.h"
#include "../plan_abi.h"

namespace tilemoe {

// What the consumer and the producer's drain role ship. Pointers are device memory.
struct ShipParams {
  RankView view;
  const Segment* segments;
  const Chunk* chunks;
  const void* rows;   // GEMM 2 output [layout rows, row_bytes]
  int64_t row_bytes;  // a multiple of 16
  int32_t n_tiles;    // target of a band's flag
  // 1: of a consumer kernel's CTAs only the first State::consumer_ctas work, and a producer of the
  // whole grid leaves as many SMs to them, so that the split of a captured graph can change. Set by
  // tilemoe_combine_launch.
  int32_t device_split;
};

// What whoever ships relies on.
inline bool valid(const ShipParams& p) {
  return p.view.state != nullptr && p.view.world >= 1 && p.view.world <= kMaxWorld &&
         p.row_bytes > 0 && p.row_bytes % 16 == 0 && p.n_tiles >= 1;
}

}  // namespace tilemoe

extern "C" {

// Loads the kernel of the current device: once, at start-up.
cudaError_t tilemoe_consumer_load();

// One CTA fills more than half an SM: ctas = SMs that it takes. 0 launches nothing.
cudaError_t tilemoe_consumer_launch(const tilemoe::ShipParams* params, int32_t ctas,
                                    cudaStream_t stream);
}
