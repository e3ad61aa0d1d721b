#include "instances.h"
#include "producer_kernel.cuh"

namespace tilemoe::producer {
// 128 gate and 128 up columns make 128 output columns: a whole tile of store buffers.
const InstanceEntry kBf16Gated = make_entry<Traits<cutlass::bfloat16_t, 256, true, 4, 2>>();
}  // namespace tilemoe::producer
