// A gate's fp32 weights for tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tilemoe::router {

constexpr int32_t kLogitParts = 3;  // bf16 numbers that hold the 24 bits of a float

// Loads the kernel of the current device.
cudaError_t load_split();

// parts: [3, count] bf16; the largest part first.
cudaError_t launch_split(const float* weights, void* parts, int64_t count, cudaStream_t stream);

}  // namespace tilemoe::router
