// Host planner: counts in, combine plan out. Bit-equal to ds_tilemoe/combine_plan.py, whose
// plan_check.py proves both. No torch, no CUDA; std::invalid_argument names what is wrong.
#pragma once

#include "../plan_abi.h"

namespace tilemoe {

// Sizes of the plan of params.rank. `counts`: C[source rank, expert], kept rows, row-major
// [W, W * E_local]. Throws on a bad parameter, a negative count, or a length beyond 32 bits.
// O(W * E + segments).
PlanSizes plan_sizes(const PlanParams& params, const int32_t* counts);

// Fills the arrays of `plan`. plan->sizes must be what plan_sizes gave for the same input, and the
// arrays as long as it says; it throws before it writes anything if the sizes differ.
// O(W * E + bands + segments + chunks).
void plan_fill(const PlanParams& params, const int32_t* counts, PlanView* plan);

// Upper bounds of each size for itself, over all counts with which all ranks together, this one
// included, send at most `max_rows_in` rows to this rank: for buffers made once. They hold for
// every rank, bands_per_segment and local_tail_bands.
PlanSizes plan_bounds(const PlanParams& params, int64_t max_rows_in);

}  // namespace tilemoe
