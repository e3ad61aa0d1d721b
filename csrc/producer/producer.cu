// Host side of the producer: tensor maps, choice of instance, launch.
#include "../common/driver.h"
#include "instances.h"

namespace tilemoe::producer {
namespace {

const InstanceEntry* find(ProducerKind kind) {
  const bool bf16 = kind.dtype == Dtype::bfloat16;
  if (!bf16 && kind.dtype != Dtype::float16) return nullptr;
  if (kind.gated != 0) {
    return kind.tile_n == 256 ? (bf16 ? &kBf16Gated : &kFp16Gated) : nullptr;
  }
  if (kind.tile_n == 256) return bf16 ? &kBf16N256 : &kFp16N256;
  if (kind.tile_n == 128) return bf16 ? &kBf16N128 : &kFp16N128;
  return nullptr;
}

}  // namespace
}  // namespace tilemoe::producer

using tilemoe::Dtype;
using tilemoe::ProducerKind;
using tilemoe::ProducerParams;
using tilemoe::TensorMap;
namespace producer = tilemoe::producer;

cudaError_t tilemoe_make_tensor_map(TensorMap* map, const void* base, Dtype dtype, int64_t rows,
                                    int64_t cols, int32_t box_rows) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  static const auto encode =
      tilemoe::driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return cudaErrorNotSupported;
  // TMA coordinates are 32-bit and row pitches multiples of 16 bytes.
  if (map == nullptr || rows <= 0 || rows > INT32_MAX || cols <= 0 || cols % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(cols) * 2};
  const cuuint32_t box[2] = {tilemoe::kProducerTileK, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUtensorMapDataType type =
      dtype == Dtype::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(map), type, 2, const_cast<void*>(base), sizes,
             row_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

void tilemoe_set_counters(ProducerParams* params, int32_t front) {
  const tilemoe::RankView& view = params->ship.view;
  auto* const half = reinterpret_cast<tilemoe::Half*>(tilemoe::half_of(view, 0));
  auto* const state = reinterpret_cast<tilemoe::State*>(view.state);
  params->epoch = &state->epoch;
  params->half_bytes = view.half_bytes;
  params->band_count = &state->bands;
  params->tile_claim = front != 0 ? &half->front_claim : &half->tile_claim;
  params->band_flags = front != 0 ? nullptr : reinterpret_cast<uint32_t*>(half + 1);
  params->start_ns = front != 0 ? &half->front_start_ns : &half->start_ns;
  params->end_ns = front != 0 ? &half->front_end_ns : &half->end_ns;
}

int32_t tilemoe_producer_b_box_rows(ProducerKind kind) {
  return kind.gated != 0 ? kind.tile_n / 2 : kind.tile_n;
}

int32_t tilemoe_producer_group_bands(ProducerKind kind, int32_t n, int32_t grid) {
  const int32_t out_n = kind.gated != 0 ? kind.tile_n / 2 : kind.tile_n;
  const int32_t n_tiles = (n + out_n - 1) / out_n;
  const int32_t wave = (grid + n_tiles / 2) / n_tiles;
  // With many experts groups of 1 and of 33 bands or more lose much: docs/gpu-notes.md.
  return wave < 1 ? 1 : wave > 8 ? 8 : wave;
}

cudaError_t tilemoe_producer_load() {
  for (const auto* entry : {&producer::kBf16N256, &producer::kBf16N128, &producer::kBf16Gated,
                            &producer::kFp16N256, &producer::kFp16N128, &producer::kFp16Gated}) {
    const cudaError_t error = entry->load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t tilemoe_producer_launch(const ProducerParams* params, ProducerKind kind, int32_t grid,
                                    cudaStream_t stream) {
  const producer::InstanceEntry* const entry = producer::find(kind);
  if (entry == nullptr || params == nullptr || grid < 1 || params->experts < 1 ||
      params->group_bands < 1 || params->n < 8 || params->k < 8 || params->n % 8 != 0 ||
      params->k % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  const tilemoe::ShipParams& ship = params->ship;
  if (params->drain != 0 && (!tilemoe::valid(ship) || params->band_flags == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const tilemoe::DispatchParams& dispatch = params->dispatch;
  if (dispatch.view.state != nullptr &&
      (dispatch.view.world < 1 || dispatch.view.world > tilemoe::kMaxWorld ||
       dispatch.row_bytes <= 0 || dispatch.row_bytes % 16 != 0 ||
       dispatch.local_experts != params->experts || dispatch.num_dispatch_ctas < 0)) {
    return cudaErrorInvalidValue;
  }
  return entry->launch(*params, grid, stream);
}
