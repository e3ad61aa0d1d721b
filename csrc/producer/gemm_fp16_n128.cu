#include "instances.h"
#include "producer_kernel.cuh"

namespace tilemoe::producer {
// 6 stages of 32 KiB and a whole tile of store buffers.
const InstanceEntry kFp16N128 = make_entry<Traits<cutlass::half_t, 128, false, 6, 2>>();
}  // namespace tilemoe::producer
