// What the operator's check feeds and expects: rows and weights that any rank can predict.
#pragma once

#include "common/wait.cuh"
#include "numbers.cuh"
#include "operator_harness.cuh"

namespace harness {

// Small whole numbers, so that sums are exact in fp32 and a row of GEMM 2 is known bit for bit
// whatever the order of its sum.

// Of the row of `owner`'s route number `position` to `expert` in the call tagged `tag`: in [-8, 8).
__host__ __device__ inline float a_value(uint64_t tag, int owner, int expert, int position,
                                         int column) {
  const uint64_t row = ((tag * 131 + owner) * 4099 + expert) * 1000003 + position;
  return static_cast<float>(static_cast<int>(mix(row, column) % 16) - 8);
}
// Of the expert's weight [n, k]: in [-2, 2].
__host__ __device__ inline float b_value(int expert, int column, int k) {
  return static_cast<float>(static_cast<int>(mix(expert * 65537 + column, k) % 5) - 2);
}

// Block (run, some rows): what dispatch and GEMM 1 would have left. Tag 0 = the epoch.
template <class E>
__global__ void fill_rows(E* a, int k, int world, int local_experts, int rank,
                          const int32_t* counts, const int64_t* run_row, const State* state,
                          uint64_t tag) {
  if (state->bands == 0) return;
  if (tag == 0) tag = state->epoch;
  const int local = blockIdx.x / world, owner = blockIdx.x % world;
  const int expert = rank * local_experts + local;
  const int rows = counts[owner * world * local_experts + expert];
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
      a[(run_row[local * world + owner] + row) * k + j] =
          cast<E>(a_value(tag, owner, expert, row, j));
    }
  }
}

template <class E>
__global__ void fill_weights(E* b, int n, int k, int expert) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < int64_t{n} * k;
       i += int64_t{gridDim.x} * blockDim.x) {
    b[i] = cast<E>(b_value(expert, i / k, i % k));
  }
}

// Every token_step-th token, every column_step-th column.
template <class E>
__global__ void verify(const uint16_t* y, const int32_t* ids, const int32_t* positions,
                       const float* weights, int tokens, int topk, int n, int k, int rank,
                       int token_step, int column_step, const State* state, uint64_t tag,
                       Verdict* verdict) {
  if (tag == 0) tag = state->epoch;
  const int columns = (n + column_step - 1) / column_step;
  const int64_t items = int64_t{(tokens + token_step - 1) / token_step} * columns;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < items;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int token = static_cast<int>(i / columns) * token_step;
    const int column = static_cast<int>(i % columns) * column_step;
    float sum = 0.0f;
    for (int j = 0; j < topk; ++j) {
      const int64_t route = int64_t{token} * topk + j;
      const int expert = ids[route];
      if (expert < 0) continue;
      float dot = 0.0f;
      for (int q = 0; q < k; ++q) {
        dot += a_value(tag, rank, expert, positions[route], q) * b_value(expert, column, q);
      }
      const float row = static_cast<float>(cast<E>(dot));
      sum = __fadd_rn(sum, __fmul_rn(weights[route], row));
    }
    const E wanted = cast<E>(sum);
    if (y[int64_t{token} * n + column] == reinterpret_cast<const uint16_t&>(wanted)) continue;
    if (atomicAdd(&verdict->wrong, 1ull) == 0) {
      verdict->first_epoch = state->epoch;
      verdict->first_token = token;
      verdict->first_column = column;
    }
  }
}

// ---- The same for a rank, in its stream.

template <class E>
void fill_weights_of(Rank& rank, const Shape& s) {
  rank.use();
  for (int e = 0; e < s.local_experts; ++e) {
    fill_weights<<<512, 256>>>(static_cast<E*>(const_cast<void*>(rank.b[e])), s.n, s.k,
                               rank.rank * s.local_experts + e);
  }
  CHECK_CUDA(cudaDeviceSynchronize());
}
template <class E>
void fill_rows_of(Rank& rank, const Shape& s, uint64_t tag) {
  fill_rows<<<dim3(s.local_experts * s.world, 64), 128, 0, rank.main>>>(
      reinterpret_cast<E*>(rank.a), s.k, s.world, s.local_experts, rank.rank,
      rank.exchange.plan.counts, rank.exchange.plan.view.run_row,
      reinterpret_cast<const State*>(rank.state), tag);
}
template <class E>
void verify_y(Rank& rank, const Shape& s, const Routing& routing, int token_step, int column_step,
              uint64_t tag) {
  verify<E><<<512, 256, 0, rank.main>>>(
      rank.y, routing.ids_d, routing.positions_d, routing.weights_d, routing.tokens, s.topk, s.n,
      s.k, rank.rank, token_step, column_step, reinterpret_cast<const State*>(rank.state), tag,
      rank.verdict);
}

// Of one call's y against another's and against fp32.
struct Comparison {
  unsigned long long different;  // elements that are not bit-equal
  int worst_bits;                // largest ||y - ref|| / ||ref|| of a token, as a float's bits
};

__global__ void compare(const uint16_t* x, const uint16_t* y, int64_t count, Comparison* result) {
  unsigned long long different = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    different += x[i] != y[i];
  }
  if (different != 0) atomicAdd(&result->different, different);
}

// Block: every token_step-th token, every column_step-th column, from the tags alone: no buffer of
// the operator is read but y. A warp has a column at a time.
template <class E>
__global__ void oracle(const uint16_t* y, const int32_t* ids, const int32_t* positions,
                       const float* weights, int topk, int n, int k, int rank, int token_step,
                       int column_step, uint64_t tag, Comparison* result) {
  __shared__ float wrong, right;
  if (threadIdx.x == 0) wrong = right = 0.0f;
  __syncthreads();
  const int64_t token = int64_t{blockIdx.x} * token_step;
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32 * column_step; column < n;
       column += static_cast<int>(blockDim.x / 32) * column_step) {
    float sum = 0.0f;
    for (int j = 0; j < topk; ++j) {
      const int expert = ids[token * topk + j];
      if (expert < 0) continue;
      const int position = positions[token * topk + j];
      float dot = 0.0f;
      for (int q = lane; q < k; q += 32) {
        dot += a_value(tag, rank, expert, position, q) * b_value(expert, column, q);
      }
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      sum += weights[token * topk + j] * dot;
    }
    if (lane != 0) continue;
    const E seen = reinterpret_cast<const E*>(y)[token * n + column];
    const float difference = static_cast<float>(seen) - sum;
    atomicAdd(&wrong, difference * difference);
    atomicAdd(&right, sum * sum);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const float error = sqrtf(wrong / (right + 1e-30f));
  atomicMax(&result->worst_bits, __float_as_int(error < 1e30f ? error : 1e30f));  // NaN too
}

}  // namespace harness
