// What the check of dispatch feeds and expects: tokens and weights that any rank can predict, NaN
// everywhere else, and a group whose calls are checked on the GPU.
#pragma once

#include "common/wait.cuh"
#include "dispatch_harness.cuh"

namespace front {

// Small whole numbers: sums are exact in fp32, so a row of the output is known bit for bit.
__device__ inline float x_value(uint64_t epoch, int owner, int token, int column) {
  const uint64_t row = (epoch * 131 + owner) * 1000003 + token;
  return static_cast<float>(static_cast<int>(mix(row, column) % 16) - 8);
}
__device__ inline float w_value(int matrix, int column, int k) {
  return static_cast<float>(static_cast<int>(mix(matrix * 65537 + column, k) % 5) - 2);
}

// Of the call whose exchange comes next.
template <class E>
static __global__ void fill_tokens(E* x, int tokens, int k, int rank, const State* state) {
  const uint64_t epoch = state->epoch + 1;
  const int64_t count = int64_t{tokens} * k;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = cast<E>(x_value(epoch, rank, static_cast<int>(i / k), static_cast<int>(i % k)));
  }
}

template <class E>
static __global__ void fill_weights(E* b, int n, int k, int matrix) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < int64_t{n} * k;
       i += int64_t{gridDim.x} * blockDim.x) {
    b[i] = cast<E>(w_value(matrix, static_cast<int>(i / k), static_cast<int>(i % k)));
  }
}

enum Part : int { kRoom = 0, kOutput = 1 };
struct Verdict {
  unsigned long long wrong[2];  // elements of the room and of the output
  unsigned long long first_epoch;
  Origin first;
  int first_column, first_part;
  float seen, wanted;
};

__device__ inline void blame(Verdict* verdict, Part part, uint64_t epoch, const Origin& origin,
                             int column, float seen, float wanted) {
  if (atomicAdd(&verdict->wrong[part], 1ull) != 0) return;
  verdict->first_epoch = epoch;
  verdict->first = origin;
  verdict->first_column = column;
  verdict->first_part = part;
  verdict->seen = seen;
  verdict->wanted = wanted;
}

// Block: some rows. Every element of the room, every column_step-th column of the output.
template <class E>
static __global__ void verify(const E* rows, const E* d, const Origin* origins, int count, int n,
                              int k, int local_experts, int rank, bool gated, int column_step,
                              const State* state, Verdict* verdict) {
  const uint64_t epoch = state->epoch;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Origin o = origins[i];
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
      const float seen = static_cast<float>(rows[int64_t{o.row} * k + j]);
      const float wanted = x_value(epoch, o.owner, o.token, j);
      if (!(seen == wanted)) blame(verdict, kRoom, epoch, o, j, seen, wanted);
    }
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j * column_step < n; j += warps) {
      const int column = j * column_step;
      float sums[2] = {0.0f, 0.0f};
      for (int q = lane; q < k; q += 32) {
        const float x = x_value(epoch, o.owner, o.token, q);
        const int matrix = o.expert - rank * local_experts;
        sums[0] += x * w_value(matrix, column, q);
        if (gated) sums[1] += x * w_value(matrix + local_experts, column, q);
      }
      for (int step = 16; step > 0; step /= 2) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], step);
        sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], step);
      }
      const float wanted =
          static_cast<float>(cast<E>(gated ? __fmul_rn(sums[0], sums[1]) : sums[0]));
      const float seen = static_cast<float>(d[int64_t{o.row} * n + column]);
      if (lane == 0 && !(seen == wanted)) blame(verdict, kOutput, epoch, o, column, seen, wanted);
    }
  }
}

struct How {
  int num_dispatch_ctas;
  int grid;
  int column_step = 1;
};

template <class E>
struct Checked {
  Group group;
  std::vector<Verdict*> verdicts;

  explicit Checked(const Shape& shape) : group(shape) {
    for (int r = 0; r < shape.world; ++r) {
      Rank& rank = group[r];
      rank.use();
      Verdict* verdict;
      CHECK_CUDA(cudaMalloc(&verdict, sizeof(Verdict)));
      CHECK_CUDA(cudaMemset(verdict, 0, sizeof(Verdict)));
      verdicts.push_back(verdict);
      for (int m = 0; m < shape.matrices(); ++m) {
        fill_weights<<<512, 256>>>(static_cast<E*>(rank.b[m]), shape.n, shape.k, m);
      }
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }
  ~Checked() {
    for (Verdict* verdict : verdicts) cudaFree(verdict);
  }

  void prepare(Rank& rank, const Routing& routing) {
    group.poison(rank);
    fill_tokens<<<256, 256, 0, rank.main>>>(reinterpret_cast<E*>(rank.x), routing.tokens,
                                            group.shape().k, rank.rank,
                                            reinterpret_cast<const State*>(rank.state));
    group.launch_exchange(rank, routing);
  }
  void check(Rank& rank, const Call& call, int column_step) {
    const Shape& s = group.shape();
    const int count = static_cast<int>(call.rows[rank.rank].size());
    if (count > 0) {
      verify<<<std::min(count, 264), 256, 0, rank.main>>>(
          reinterpret_cast<const E*>(rank.rows), reinterpret_cast<const E*>(rank.d),
          call.rows_d[rank.rank], count, s.n, s.k, s.local_experts, rank.rank, s.kind.gated != 0,
          column_step, reinterpret_cast<const State*>(rank.state), verdicts[rank.rank]);
    }
    CHECK_CUDA(cudaGetLastError());
  }
  void run(Rank& rank, const Call& call, const How& how) {
    const Routing& routing = call.routings[rank.rank];
    prepare(rank, routing);
    group.launch_gemm(rank, routing, how.num_dispatch_ctas, how.grid);
    check(rank, call, how.column_step);
  }
  // Whether a call has gone wrong since the last look, as far as this rank knows.
  bool suspects(Rank& rank) {
    const bool failed = group.failure(rank).outcome != Outcome::ok;
    Verdict v;
    CHECK_CUDA(cudaMemcpy(&v, verdicts[rank.rank], sizeof(v), cudaMemcpyDeviceToHost));
    return failed || v.wrong[kRoom] + v.wrong[kOutput] != 0;
  }
  // What was wrong since the last look; says where.
  unsigned long long wrong(const std::string& name) {
    unsigned long long sum = 0;
    for (int r = 0; r < group.shape().world; ++r) {
      group[r].use();
      CHECK_CUDA(cudaDeviceSynchronize());
      Verdict v;
      CHECK_CUDA(cudaMemcpy(&v, verdicts[r], sizeof(v), cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemset(verdicts[r], 0, sizeof(v)));
      sum += v.wrong[0] + v.wrong[1];
      if (v.wrong[0] + v.wrong[1] != 0) {
        std::printf(
            "  %s: rank %d: %llu of the room and %llu of the output wrong, first (%s) in call %llu "
            "row %d of owner %d token %d expert %d column %d: %g, wanted %g\n",
            name.c_str(), r, v.wrong[0], v.wrong[1], v.first_part == kRoom ? "room" : "output",
            v.first_epoch, v.first.row, v.first.owner, v.first.token, v.first.expert,
            v.first_column, v.seen, v.wanted);
      }
      const ErrorRecord e = group.failure(group[r]);
      if (e.outcome != Outcome::ok) {
        std::printf(
            "  %s: rank %d: outcome %d wait %d of rank %d for %d slot %lld seen %llu wanted %llu "
            "call %llu\n",
            name.c_str(), r, int(e.outcome), int(e.wait), e.rank, e.peer,
            static_cast<long long>(e.band), static_cast<unsigned long long>(e.seen),
            static_cast<unsigned long long>(e.wanted), static_cast<unsigned long long>(e.epoch));
        ++sum;
      }
    }
    return sum;
  }
};

}  // namespace front
