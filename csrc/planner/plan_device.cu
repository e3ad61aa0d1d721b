#include "plan_device.cuh"

namespace tilemoe::plan {
namespace {

constexpr size_t kSharedLimit = 232448;

__global__ void __launch_bounds__(kThreads, 1)
    plan_kernel(const __grid_constant__ PlanKernelParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int32_t counts = params.params.world * params.params.world * params.params.local_experts;
  for (int32_t i = threadIdx.x; i < counts; i += kThreads) shared.counts[i] = params.counts[i];
  __syncthreads();
  Planner(params, shared).make();
}

bool valid(const PlanParams& p) {
  return p.world >= 1 && p.rank >= 0 && p.rank < p.world && p.local_experts >= 1 &&
         p.local_experts <= kPlanMaxLocalExperts && p.tile_m >= 1 && p.bands_per_segment >= 1 &&
         p.local_tail_bands >= -1 && p.chunk_rows >= 1 &&
         (p.layout == Layout::compact || p.layout == Layout::aligned);
}

}  // namespace
}  // namespace tilemoe::plan

cudaError_t tilemoe_plan_load() {
  return cudaFuncSetAttribute(tilemoe::plan::plan_kernel,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              tilemoe::plan::kSharedLimit);
}

cudaError_t tilemoe_plan_launch(const tilemoe::PlanKernelParams* params, cudaStream_t stream) {
  using namespace tilemoe;
  if (params == nullptr || !plan::valid(params->params)) return cudaErrorInvalidValue;
  const size_t bytes = plan::shared_bytes(params->params);
  if (bytes > plan::kSharedLimit) return cudaErrorInvalidValue;
  plan::plan_kernel<<<1, plan::kThreads, bytes, stream>>>(*params);
  return cudaGetLastError();
}
