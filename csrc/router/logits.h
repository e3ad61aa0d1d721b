// C ABI: a gate's logits on tensor cores, for bf16 tokens and fp32 weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "split.h"

namespace tilemoe::router {

// Loads the kernels of the current device; tilemoe_router_load does so.
cudaError_t load_logits();

}  // namespace tilemoe::router

namespace tilemoe {

// All device memory, at multiples of 16 bytes. Shape letters: T tokens, H hidden, E experts.
struct LogitsParams {
  const void* tokens;    // [T, H] bf16
  const float* weights;  // [E, H]
  void* parts;           // [kLogitParts, E, H] bf16, written
  float* logits;         // [slices, T, kLogitParts, E], written: to be added (RouterParams)
  int32_t num_tokens;    // T, at least 1
  int32_t hidden;        // H, a multiple of 8
  int32_t experts;       // E
  int32_t slices;        // of H, of H / slices each, a multiple of 8
  int32_t sms;           // of the device
};

}  // namespace tilemoe

extern "C" {

cudaError_t tilemoe_logits_launch(const tilemoe::LogitsParams* params, cudaStream_t stream);
}
