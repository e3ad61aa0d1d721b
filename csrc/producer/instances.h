// The compiled GEMMs: one source file each (gemm_*.cu), so that they build in parallel.
#pragma once

#include "producer.h"

namespace tilemoe::producer {

struct InstanceEntry {
  cudaError_t (*load)();
  cudaError_t (*launch)(const ProducerParams& params, int32_t grid, cudaStream_t stream);
};

extern const InstanceEntry kBf16N256;
extern const InstanceEntry kBf16N128;
extern const InstanceEntry kFp16N256;
extern const InstanceEntry kFp16N128;
extern const InstanceEntry kBf16Gated;
extern const InstanceEntry kFp16Gated;

}  // namespace tilemoe::producer
