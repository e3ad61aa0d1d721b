// C ABI of the count exchange and the plan behind it: one kernel, first of every call. A CTA beside
// it brings the record of the call before to the host.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/control.h"
#include "plan_device.h"

namespace tilemoe {

// Pointers are device memory. The exchange leaves C in plan.counts. If the call fails
// (State::outcome), C is taken as zero, so that no kernel behind finds work, and scale fills its
// output with NaN.
struct ExchangeParams {
  RankView view;
  PlanKernelParams plan;
  const int32_t* own_counts;   // this rank's row of C [E]; not read if status is not 0
  uint64_t layer;              // fingerprint; equal on all ranks
  int64_t tokens;              // of this rank
  int64_t max_tokens;          // that the heap was made for
  int64_t group_timeout_ns;    // for a peer that has not come yet: slow is not dead
  int32_t status;              // 0; else this rank has no routing and all ranks fail this call; 2:
                               // because its layer has changed (every rank may say so at once)
  int32_t consumer_ctas;       // for State, where wanted_ctas is null
  const int32_t* wanted_ctas;  // page-locked host word that takes its place, read in each call, so
                               // that the split of a captured graph can change; or null
  CallRecord* records;    // [kCallRecords], page-locked host memory as the device sees it, for the
                          // call before: see tilemoe_record_launch; or null
  int32_t behind_router;  // 1: right behind a router of ours, which began when the call before had
                          // ended: its record need not wait for the router
};

}  // namespace tilemoe

extern "C" {

// Bytes of a rank's symmetric block and where things lie in it, and bytes of its local state. Both
// are zeroed once, on all ranks, before the first call.
void tilemoe_block_offsets(const tilemoe::BlockShape* shape, tilemoe::BlockOffsets* offsets);
int64_t tilemoe_half_bytes(int32_t max_bands);
int64_t tilemoe_state_bytes(int32_t max_bands);

// Raises the shared-memory limit and loads the kernel: once, at start-up.
cudaError_t tilemoe_exchange_load();

cudaError_t tilemoe_exchange_launch(const tilemoe::ExchangeParams* params, cudaStream_t stream);

// What the last call leaves for the host, where the next one's exchange does not bring it: behind
// the end of the call, and beside no other.
cudaError_t tilemoe_record_launch(const tilemoe::RankView* view, tilemoe::CallRecord* records,
                                  cudaStream_t stream);

// The host has heard of the failure that it was last told, and the heap stays usable: calls behind
// this in the stream are in step with the peers'. No call of this rank may be queued: one that is
// fails the group instead (State::unheard).
cudaError_t tilemoe_say_heard(const tilemoe::RankView* view, cudaStream_t stream);
}
