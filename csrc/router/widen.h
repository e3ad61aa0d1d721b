// C ABI: tokens and gate weights in fp32, for DeepSpeed's own logits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan_abi.h"

namespace tilemoe::router {

// Loads the kernel of the current device; tilemoe_router_load does so.
cudaError_t load_widen();

}  // namespace tilemoe::router

namespace tilemoe {

// Elements of 16 bits; addresses are multiples of 16 bytes.
struct Widening {
  const void* source;
  float* wide;
  int64_t count;    // a multiple of 8; 0 = nothing
  int32_t is_half;  // 1: fp16; 0: bf16
};

}  // namespace tilemoe

extern "C" {

// Both in one launch, exact: as two calls of Tensor.float().
cudaError_t tilemoe_widen_launch(const tilemoe::Widening* first, const tilemoe::Widening* second,
                                 cudaStream_t stream);
}
