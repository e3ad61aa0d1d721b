// A plan in host memory of its own, where nobody else gives it any.
#pragma once

#include <cstdint>
#include <vector>

#include "planner.h"

namespace tilemoe {

// The arrays are those of PlanView.
struct HostPlan {
  // Throws what plan_sizes and plan_fill throw. counts: C [W, E].
  HostPlan(const PlanParams& params, const int32_t* counts)
      : sizes(plan_sizes(params, counts)),
        expert_row(params.local_experts + 1),
        run_row(int64_t{params.world} * params.local_experts),
        bands(sizes.bands),
        segments(sizes.segments),
        chunks(sizes.chunks),
        arrival_target(params.world),
        dispatch_row(run_row.size()),
        recv_row(run_row.size() + 1) {
    PlanView view{};
    view.sizes = sizes;
    view.expert_row = expert_row.data();
    view.run_row = run_row.data();
    view.bands = bands.data();
    view.segments = segments.data();
    view.chunks = chunks.data();
    view.arrival_target = arrival_target.data();
    view.dispatch_row = dispatch_row.data();
    view.recv_row = recv_row.data();
    plan_fill(params, counts, &view);
  }

  PlanSizes sizes;
  std::vector<int64_t> expert_row, run_row;
  std::vector<Band> bands;
  std::vector<Segment> segments;
  std::vector<Chunk> chunks;
  std::vector<int64_t> arrival_target, dispatch_row, recv_row;
};

}  // namespace tilemoe
