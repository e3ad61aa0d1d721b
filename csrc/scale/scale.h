// C ABI of the scale kernel: waits for the rows owed to this rank, then sums each token's k rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/control.h"
#include "../producer/producer.h"

namespace tilemoe {

// y[t, :] = sum over k ascending of weights[t, k] * row(t, k), in fp32 without fused multiply-add,
// one cast. row(t, k) lies `positions[t, k]` rows behind the first row of this rank's run of expert
// e = expert_ids[t, k]: in `rows` if e is local, else in the receive room. If the call has failed,
// all of y is NaN. Once a call. Pointers are device memory unless they say otherwise.
struct ScaleParams {
  RankView view;
  const int32_t* expert_ids;  // [T, K] global expert, -1 = dropped
  const int32_t* positions;   // [T, K] earlier routes of this rank to the same expert
  const float* weights;       // [T, K]
  const int64_t* run_row;     // of the plan
  const int64_t* arrival_target;
  const int64_t* recv_row;
  const void* rows;  // GEMM 2 output [layout rows, N]
  void* y;           // [T, N]
  int32_t tokens;    // T
  int32_t topk;      // K
  int32_t n;         // N, a multiple of 8
  int32_t local_experts;
  Dtype dtype;
  int32_t max_ctas;   // 0 = as many as fit; checks only: fewer, where ranks share a GPU
  int32_t uncounted;  // 1: this rank's rows go by copy engines, which count no chunks
};

}  // namespace tilemoe

extern "C" {

// Loads the kernels of the current device: once, at start-up.
cudaError_t tilemoe_scale_load();

// Its CTAs may come while the kernel in front of it in `stream` ends; they wait for its end.
cudaError_t tilemoe_scale_launch(const tilemoe::ScaleParams* params, cudaStream_t stream);
}
