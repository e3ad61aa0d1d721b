// C ABI of a rank whose host fails in the middle of a call: its peers end at once.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/control.h"

extern "C" {

// Loads the kernel of the current device: once, at start-up.
cudaError_t tilemoe_fail_load();

// Marks the group failed with `record` in the block of every rank that is mapped here: each wait of
// each rank ends, and scale fills its output with NaN and tells its host. The first cause of a
// block stays. record->epoch 0 becomes that of the call at hand. `stream` is to be one that nothing
// which waits is in front of: not the call's own.
cudaError_t tilemoe_fail_group(const tilemoe::RankView* view, const tilemoe::ErrorRecord* record,
                               cudaStream_t stream);
}
