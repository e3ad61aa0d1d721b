// Tokens by the three bf16 parts of the gate's weights (split.h). Each product is exact in fp32.
// Tensor cores add them by truncation, whose error grows with the length of a sum: so sums of
// kTruncated products are added in fp32 registers, where they are rounded to nearest, by CUTLASS's
// main loop for FP8, which is made for that. What it is worth: docs/gpu-notes.md.
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "../common/launch.cuh"
#include "logits.h"

namespace tilemoe::router {
namespace {

using cute::Int;
using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

using Tile = cute::Shape<Int<128>, Int<96>, Int<64>>;  // 8192 tokens of 64 experts make one wave
using Cluster = cute::Shape<Int<1>, Int<1>, Int<1>>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
constexpr int kStages = 6;
constexpr uint32_t kTruncated = 128;
constexpr uint32_t kMmaDepth = 16;  // products of one wgmma to each sum

using Builder = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, 8, Element, ColumnMajor,
    8, float, Tile, Cluster, cutlass::gemm::collective::StageCount<kStages>, Schedule>;
using Plain = Builder::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Tile, Element,
    Plain::StrideA, Element, Plain::StrideB, Plain::TiledMma, Plain::GmemTiledCopyA,
    Plain::SmemLayoutAtomA, Plain::SmemCopyAtomA, Plain::TransformA, Plain::GmemTiledCopyB,
    Plain::SmemLayoutAtomB, Plain::SmemCopyAtomB, Plain::TransformB>;
// Straight from registers: rows of any number of experts, of which a TMA store cannot make all.
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 1, float,
    RowMajor, 1, cutlass::epilogue::NoSmemWarpSpecialized>::CollectiveOp;
using Kernel =
    cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;

bool valid(const LogitsParams* p) {
  return p != nullptr && p->tokens != nullptr && p->weights != nullptr && p->parts != nullptr &&
         p->logits != nullptr && p->num_tokens >= 1 && p->experts >= 1 && p->hidden >= 8 &&
         p->slices >= 1 && p->hidden % (8 * p->slices) == 0 && p->sms >= 1;
}

}  // namespace

cudaError_t load_logits() {
  const cudaError_t error = load_split();
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Kernel::SharedStorageSize);
}

}  // namespace tilemoe::router

cudaError_t tilemoe_logits_launch(const tilemoe::LogitsParams* p, cudaStream_t stream) {
  using namespace tilemoe::router;
  if (!valid(p)) return cudaErrorInvalidValue;
  const int64_t weights = int64_t{p->experts} * p->hidden;
  const cudaError_t error = launch_split(p->weights, p->parts, weights, stream);
  if (error != cudaSuccess) return error;

  const int32_t columns = kLogitParts * p->experts;
  const int32_t depth = p->hidden / p->slices;
  // Slices are CUTLASS's batch: they lie beside each other in H.
  Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {p->num_tokens, columns, depth, p->slices};
  arguments.mainloop.ptr_A = static_cast<const Element*>(p->tokens);
  arguments.mainloop.dA = {p->hidden, Int<1>{}, depth};
  arguments.mainloop.ptr_B = static_cast<const Element*>(p->parts);
  arguments.mainloop.dB = {p->hidden, Int<1>{}, depth};
  arguments.mainloop.mma_promotion_interval = kTruncated / kMmaDepth;
  arguments.epilogue.thread = {1.0f, 0.0f};
  arguments.epilogue.ptr_D = p->logits;
  arguments.epilogue.dD = {columns, Int<1>{}, int64_t{p->num_tokens} * columns};
  arguments.hw_info.sm_count = p->sms;
  if (!Kernel::can_implement(arguments)) return cudaErrorInvalidValue;
  const Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  return tilemoe::launch_grid(cutlass::device_kernel<Kernel>, Kernel::get_grid_shape(params),
                              Kernel::MaxThreadsPerBlock, Kernel::SharedStorageSize, stream, false,
                              params);
}
