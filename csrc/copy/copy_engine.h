// The copy-engine mover: a stream for each peer waits for bands in the GPU's front end, copies rows
// to their owner, and writes its arrival word there. No SM takes part. C has to come to the host.
//
// Why no wait of a stream stays for ever. Nothing on a device ends such a wait but its word, and
// the word is a band's counter, which reaches its target as soon as GEMM 2 has made the band. So:
// - copies are queued only after the host has seen that the exchange of this very call ended well,
//   and that the plan on the device has as many bands and segments as the host's own;
// - and only behind the launch of that GEMM 2, in the same function. It waits for nothing and makes
//   every tile, whatever has failed; GEMM 1 in front of it waits for nothing without a deadline,
//   and makes its tiles behind one that has passed.
// So each wait ends when the GEMMs do, also in a group that has failed: its rows go out all the
// same, as those of the consumer kernel do, and nobody believes them. A call whose copies cannot be
// queued is an error of the launch, by which the host fails the group; the waits that it has queued
// end like the others.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/control.h"
#include "../consumer/consumer.h"
#include "../planner/plan_device.h"
#include "copy_plan.h"

namespace tilemoe {

// A rank's streams to its peers, and what a call has brought to the host. One call at a time.
struct CopyEngine;

// Waits until C of the call that was fetched is here, and plans its copies. An exchange that ended
// badly, on whatever rank, leaves none.
cudaError_t plan_engine_copies(CopyEngine& engine, int64_t row_bytes);

// Queues them; behind the launch of the producer that raises ship.n_tiles flags a band. `behind`:
// null, as the host has waited for the exchange already; checks only: an event in front of them.
cudaError_t queue_engine_copies(CopyEngine& engine, const ShipParams& ship, cudaEvent_t behind);

// What follows in `stream` is behind the copies that were queued last.
cudaError_t join_engine_copies(CopyEngine& engine, cudaStream_t stream);

// Checks only, where the host knows C in advance: as fetch and plan_engine_copies.
void set_engine_copies(CopyEngine& engine, CopyPlan plan, uint64_t epoch);

}  // namespace tilemoe

extern "C" {

// Streams, events and page-locked memory of a rank on the current device, once a heap. Waits for
// the device. max_counts: most numbers of C. most, least_bytes: copies a peer at most, and bytes of
// each at least where there is more than one.
cudaError_t tilemoe_copy_engine_make(const tilemoe::RankView* view, int32_t max_counts,
                                     int32_t most, int64_t least_bytes,
                                     tilemoe::CopyEngine** engine);

// Its copies have ended.
void tilemoe_copy_engine_free(tilemoe::CopyEngine* engine);

// Behind the exchange in `stream`, whose plan this is: C and State on their way to the host, beside
// what follows in `stream`. tilemoe_combine_launch of the same call waits for them.
cudaError_t tilemoe_copy_engine_fetch(tilemoe::CopyEngine* engine,
                                      const tilemoe::PlanKernelParams* plan, cudaStream_t stream);
}
