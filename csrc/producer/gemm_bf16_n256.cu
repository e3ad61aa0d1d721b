#include "instances.h"
#include "producer_kernel.cuh"

namespace tilemoe::producer {
// 4 stages of 48 KiB and half a tile of store buffers fill the shared memory.
const InstanceEntry kBf16N256 = make_entry<Traits<cutlass::bfloat16_t, 256, false, 4, 2>>();
}  // namespace tilemoe::producer
