// Baseline for the producer's bench: CUTLASS's own grouped GEMM (ptr-array, static group scheduler,
// cooperative, 128x256x64), with the plainest settings. bf16 in and out, fp32 accumulation.
#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>
#include <memory>
#include <vector>

namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;
using Problems = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
using Problem = Problems::UnderlyingProblemShape;

template <class T>
T* to_device(const std::vector<T>& values) {
  T* device = nullptr;
  if (cudaMalloc(&device, values.size() * sizeof(T)) != cudaSuccess) return nullptr;
  cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return device;
}

struct Baseline {
  virtual ~Baseline() = default;
  virtual int run(cudaStream_t stream) = 0;
};

template <class TileShape, class ClusterShape>
struct Grouped final : Baseline {
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor*, 8, Element, cutlass::layout::RowMajor*, 8,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor*, 8,
      Element, cutlass::layout::ColumnMajor*, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problems, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;

  Gemm gemm;

  Grouped(int experts, const int* rows, const int64_t* first_row, int n, int k, const void* a,
          const void* const* b, void* d) {
    std::vector<Problem> shapes;
    std::vector<const Element*> ptr_a, ptr_b;
    std::vector<Element*> ptr_d;
    std::vector<StrideA> stride_a;
    std::vector<StrideB> stride_b;
    std::vector<StrideD> stride_d;
    for (int e = 0; e < experts; ++e) {
      shapes.push_back(make_shape(rows[e], n, k));
      ptr_a.push_back(static_cast<const Element*>(a) + first_row[e] * k);
      ptr_b.push_back(static_cast<const Element*>(b[e]));
      ptr_d.push_back(static_cast<Element*>(d) + first_row[e] * n);
      stride_a.push_back(cutlass::make_cute_packed_stride(StrideA{}, {rows[e], k, 1}));
      stride_b.push_back(cutlass::make_cute_packed_stride(StrideB{}, {n, k, 1}));
      stride_d.push_back(cutlass::make_cute_packed_stride(StrideD{}, {rows[e], n, 1}));
    }
    cutlass::KernelHardwareInfo hw;
    cudaGetDevice(&hw.device_id);
    hw.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hw.device_id);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {experts, to_device(shapes), nullptr},
        {to_device(ptr_a), to_device(stride_a), to_device(ptr_b), to_device(stride_b)},
        {{}, nullptr, nullptr, to_device(ptr_d), to_device(stride_d)},
        hw};
    args.epilogue.thread.alpha = 1.0f;
    args.epilogue.thread.beta = 0.0f;
    void* workspace = nullptr;
    cudaMalloc(&workspace, Gemm::get_workspace_size(args) + 16);
    status = gemm.can_implement(args);
    if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, workspace);
  }

  int run(cudaStream_t stream) override {
    if (status != cutlass::Status::kSuccess) return static_cast<int>(status);
    return static_cast<int>(gemm.run(stream));
  }
  cutlass::Status status;
};

}  // namespace

extern "C" {

// Buffers live as long as the process: this is a bench. variant 0 = cluster 1, 1 = cluster 2x1.
void* cutlass_grouped_create(int variant, int experts, const int* rows, const int64_t* first_row,
                             int n, int k, const void* a, const void* const* b, void* d) {
  if (variant == 0) {
    return static_cast<Baseline*>(new Grouped<Shape<_128, _256, _64>, Shape<_1, _1, _1>>(
        experts, rows, first_row, n, k, a, b, d));
  }
  return static_cast<Baseline*>(new Grouped<Shape<_128, _256, _64>, Shape<_2, _1, _1>>(
      experts, rows, first_row, n, k, a, b, d));
}

int cutlass_grouped_run(void* baseline, cudaStream_t stream) {
  return static_cast<Baseline*>(baseline)->run(stream);
}
}
