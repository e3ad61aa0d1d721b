// C ABI of the device planner: the same plan as planner.h, made by one CTA from counts in device
// memory, so that no host waits for counts.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan_abi.h"

namespace tilemoe {

constexpr int32_t kPlanMaxLocalExperts = 1024;

// Lengths of the arrays behind a PlanView; rows is what the GEMM's buffers hold.
struct PlanCapacity {
  int64_t rows;
  int32_t bands;
  int32_t segments;
  int32_t chunks;
};

// All pointers are device memory. `view.sizes` is ignored: sizes are made here, in `sizes`. If a
// capacity does not suffice, sizes holds what was needed, *overflow is 1 and no array is complete.
struct PlanKernelParams {
  PlanParams params;
  PlanCapacity capacity;
  PlanView view;
  PlanSizes* sizes;
  int32_t* overflow;
  const int32_t* counts;  // C [W, W * E_local], none negative
  int32_t* front_bands;   // [bands] GEMM 1's own order of the bands, by their index; or null
};

}  // namespace tilemoe

extern "C" {

// Raises the shared-memory limit and loads the kernel: once, at start-up.
cudaError_t tilemoe_plan_load();

// cudaErrorInvalidValue if a parameter is out of range or C does not fit into shared memory.
cudaError_t tilemoe_plan_launch(const tilemoe::PlanKernelParams* params, cudaStream_t stream);
}
