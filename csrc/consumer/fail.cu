#include "../common/launch.cuh"
#include "../common/wait.cuh"
#include "fail.h"

namespace tilemoe {
namespace {

__global__ void fail_kernel(const __grid_constant__ RankView view, ErrorRecord record) {
  const volatile State& state = state_of(view);  // the call's exchange may be running
  if (record.epoch == 0) record.epoch = state.epoch;
  fail_group(view, record);
}

}  // namespace
}  // namespace tilemoe

cudaError_t tilemoe_fail_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tilemoe::fail_kernel);
}

cudaError_t tilemoe_fail_group(const tilemoe::RankView* view, const tilemoe::ErrorRecord* record,
                               cudaStream_t stream) {
  if (view == nullptr || record == nullptr || record->outcome == tilemoe::Outcome::ok) {
    return cudaErrorInvalidValue;
  }
  return tilemoe::launch(tilemoe::fail_kernel, 1, 1, 0, stream, false, *view, *record);
}
