// C ABI of the producer: grouped GEMM over the bands of a plan, tiles handed out dynamically, a
// flag per band. No torch here. See producer_kernel.cuh for how it works.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../consumer/consumer.h"
#include "../dispatch/dispatch.h"
#include "../plan_abi.h"

namespace tilemoe {

enum class Dtype : int32_t { bfloat16 = 0, float16 = 1 };

enum class Activation : int32_t { none = 0, gelu = 1, silu = 2, relu = 3 };  // gelu: the erf form

constexpr int kProducerTileM = 128;
constexpr int kProducerTileK = 64;
constexpr int kProducerStoreRows = 64;  // rows of one TMA store
constexpr int kProducerFewRows = 16;    // bands with no more load and store no more: decode

// A CUtensorMap: 64-byte aligned, as the hardware demands.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
static_assert(sizeof(TensorMap) == 128);

// Which compiled GEMM: element type, columns of accumulators a tile, gated or not. A gated tile
// multiplies tile_n / 2 gate and tile_n / 2 up columns and writes tile_n / 2 columns.
struct ProducerKind {
  Dtype dtype;
  int32_t tile_n;  // 256 or 128
  int32_t gated;   // 0 or 1
};

// D[row, :] = act(A[row, :] B[expert of row]^T + bias[expert]), fp32 accumulation, one cast.
// Gated: D = act(A gate^T + gate bias) * (A up^T + up bias).
// Output columns n and k are multiples of 8 elements (16 bytes); bases are 16-byte aligned.
struct ProducerParams {
  TensorMap a;         // [layout rows, k], box_rows kProducerTileM
  TensorMap a_few;     // the same, box_rows kProducerFewRows
  TensorMap d;         // [layout rows, n], box_rows kProducerStoreRows
  TensorMap d_few;     // the same, box_rows kProducerFewRows
  const TensorMap* b;  // device, [experts]: [n, k]; gated: [2 * experts], gate maps then up maps
  const void* const* bias;    // device, [experts] (gated [2 * experts]) of n elements; or null
  const Band* bands;          // device, in schedule order
  const int32_t* band_count;  // device, one word: the planner kernel may have written it
  // Counters, zero before the launch: of half 0 if epoch is not null (tilemoe_set_counters), and
  // then those of half `*epoch % 2` are used.
  const uint64_t* epoch;       // device, or null
  int64_t half_bytes;          // from half 0 to half 1
  uint32_t* tile_claim;        // device, one word
  uint32_t* band_flags;        // device, [bands]; null = raise no flag
  uint64_t* start_ns;          // device; time when tile 0 was begun; or null
  uint64_t* end_ns;            // device; time when the last tile was flagged; or null
  ShipParams ship;             // view.state null: no drain, no counts for IterationStats
  DispatchParams dispatch;     // of GEMM 1; view.state null: none
  const int32_t* front_bands;  // device, [bands]: order of the bands; or null = as they are
  int32_t drain;               // 1: a CTA that finds no tile left ships chunks until none is left
  // 1: GEMM 2 right behind a GEMM 1 that dispatches. That has seen the plan before it lets this
  // kernel come, which so loads weights before GEMM 1 has ended.
  int32_t behind_front;
  int32_t experts;
  int32_t n;
  int32_t k;
  int32_t group_bands;  // tile_of_claim's group, >= 1; tilemoe_producer_group_bands
  Activation activation;
};

}  // namespace tilemoe

extern "C" {

// Map of a row-major [rows, cols] matrix for boxes of box_rows x 64 elements (128-byte swizzle).
cudaError_t tilemoe_make_tensor_map(tilemoe::TensorMap* map, const void* base, tilemoe::Dtype dtype,
                                    int64_t rows, int64_t cols, int32_t box_rows);

// Lets the producer use the counters of the state that params->ship.view names: GEMM 2's, with
// flags, times and counts, or (front = 1) GEMM 1's claim counter and times. Host arithmetic.
void tilemoe_set_counters(tilemoe::ProducerParams* params, int32_t front);

// Rows of the box that `kind` wants in the maps of B.
int32_t tilemoe_producer_b_box_rows(tilemoe::ProducerKind kind);

// The group that measured best: one wave of tiles, at most 8 bands.
int32_t tilemoe_producer_group_bands(tilemoe::ProducerKind kind, int32_t n, int32_t grid);

// Loads the kernels of the current device and raises their shared-memory limit: once, at start-up,
// because lazy loading inside a launch can wait for running kernels.
cudaError_t tilemoe_producer_load();

// One CTA fills an SM: grid = SMs that the GEMM may use.
cudaError_t tilemoe_producer_launch(const tilemoe::ProducerParams* params,
                                    tilemoe::ProducerKind kind, int32_t grid, cudaStream_t stream);
}
