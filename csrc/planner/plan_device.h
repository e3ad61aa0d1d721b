// What the device planner is given: the same plan as planner.h, made by one CTA (plan_device.cuh)
// from counts in device memory, so that no host waits for counts.
#pragma once

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

// All pointers are device memory. `view.sizes` is not used: the planner has the sizes. Where a
// capacity does not suffice, bands, segments, chunks and front_bands end with it. The other arrays
// are whole all the same: a rank whose plan does not fit still dispatches by them.
struct PlanKernelParams {
  PlanParams params;
  PlanCapacity capacity;
  PlanView view;
  int32_t* counts;       // C [W, W * E_local], none negative; the count exchange writes it
  int32_t* front_bands;  // [bands] GEMM 1's own order of the bands, by their index; or null
};

}  // namespace tilemoe
