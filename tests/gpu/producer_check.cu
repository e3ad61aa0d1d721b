// Checks the producer against a plain kernel: random data, NaN in pad rows and in the output,
// ragged and empty experts, sizes that fill no tile, every epilogue, several grids, and the same
// bits in every run. Exit code 0 means that all cases passed.
//   producer_check [SEED [CASES [FIRST]]]   cases 0 to 11 are small enough for compute-sanitizer
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "producer_harness.cuh"

namespace {

using namespace harness;

template <class E>
__device__ float value(E x) {
  return static_cast<float>(x);
}

// xorshift of the index: uniform in [-1, 1).
__device__ float noise(uint64_t index, uint64_t seed) {
  uint64_t x = (index + 1) * 0x9E3779B97F4A7C15ull ^ seed * 0xD1B54A32D192ED03ull;
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<float>(x >> 40) * (2.0f / 16777216.0f) - 1.0f;
}

template <class E>
__global__ void fill(E* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<E>(scale * noise(i, seed));
  }
}

template <class E>
__global__ void poison(E* data, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<E>(__int_as_float(0x7fc00000));
  }
}

__device__ float reference_activation(Activation activation, float x) {
  if (activation == Activation::gelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if (activation == Activation::silu) return x / (1.0f + expf(-x));
  if (activation == Activation::relu) return fmaxf(x, 0.0f);
  return x;
}

// errors[0] += ||out - ref||^2 and errors[1] += ||ref||^2 of each checked row; errors[2]: NaNs.
template <class E>
__global__ void compare(const E* a, const E* const* b, const E* const* bias, const E* d,
                        const int64_t* rows, const int32_t* experts_of_row, int64_t count, int n,
                        int k, int experts, bool gated, Activation activation, double* errors) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= n) return;
  for (int64_t i = blockIdx.y; i < count; i += gridDim.y) {
    const int64_t row = rows[i];
    const int e = experts_of_row[i];
    float sums[2] = {0.0f, 0.0f};
    for (int m = 0; m < (gated ? 2 : 1); ++m) {
      const E* const weights = b[e + m * experts] + int64_t{column} * k;
      for (int j = 0; j < k; ++j) {
        sums[m] = fmaf(value(a[row * k + j]), value(weights[j]), sums[m]);
      }
      if (bias != nullptr) sums[m] += value(bias[e + m * experts][column]);
    }
    float wanted = reference_activation(activation, sums[0]);
    if (gated) wanted *= sums[1];
    const float got = value(d[row * n + column]);
    if (!(got == got)) atomicAdd(&errors[3 * i + 2], 1.0);
    atomicAdd(&errors[3 * i], static_cast<double>(got - wanted) * (got - wanted));
    atomicAdd(&errors[3 * i + 1], static_cast<double>(wanted) * wanted);
  }
}

__global__ void count_differences(const uint16_t* x, const uint16_t* y, const int64_t* rows,
                                  int64_t count, int n, unsigned long long* differences) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
      if (x[rows[i] * n + c] != y[rows[i] * n + c]) atomicAdd(differences, 1ull);
    }
  }
}

struct Case {
  const char* name;
  ProducerKind kind;
  std::vector<int> rows;
  int n, k;
  bool bias;
  Activation activation;
  int row_step;  // every row_step-th row is compared
};

template <class E>
bool run_case(const Case& c, uint64_t seed, int sms) {
  const int experts = static_cast<int>(c.rows.size());
  const bool gated = c.kind.gated != 0;
  const int matrices = gated ? 2 * experts : experts;
  const std::vector<int64_t> first = Problem::layout(c.rows);
  const int64_t layout_rows = first.back();
  E *a, *d, *again;
  CHECK_CUDA(cudaMalloc(&a, layout_rows * c.k * sizeof(E)));
  CHECK_CUDA(cudaMalloc(&d, layout_rows * c.n * sizeof(E)));
  CHECK_CUDA(cudaMalloc(&again, layout_rows * c.n * sizeof(E)));
  poison<<<512, 256>>>(a, layout_rows * c.k);  // pad rows stay NaN
  std::vector<int64_t> rows;
  std::vector<int64_t> checked;
  std::vector<int32_t> expert_of;
  for (int e = 0; e < experts; ++e) {
    if (c.rows[e] > 0) {
      fill<<<512, 256>>>(a + first[e] * c.k, int64_t{c.rows[e]} * c.k, 1.0f, seed + 100 + e);
    }
    for (int r = 0; r < c.rows[e]; ++r) {
      rows.push_back(first[e] + r);
      if (r % c.row_step == 0 || r == c.rows[e] - 1) {
        checked.push_back(first[e] + r);
        expert_of.push_back(e);
      }
    }
  }
  std::vector<const void*> b(matrices), bias(matrices);
  for (int i = 0; i < matrices; ++i) {
    E *weights, *offsets;
    CHECK_CUDA(cudaMalloc(&weights, int64_t{c.n} * c.k * sizeof(E)));
    CHECK_CUDA(cudaMalloc(&offsets, c.n * sizeof(E)));
    fill<<<512, 256>>>(weights, int64_t{c.n} * c.k, 2.0f / std::sqrt(c.k), seed + 1000 + i);
    fill<<<64, 256>>>(offsets, c.n, 1.0f, seed + 2000 + i);
    b[i] = weights;
    bias[i] = offsets;
  }
  const std::vector<int> grids{sms, sms - 1, sms - 20, 3, sms, sms, sms, sms};
  Problem problem(c.kind, c.rows, c.n, c.k, a, b.data(), c.bias ? bias.data() : nullptr, d,
                  c.activation, 4, static_cast<int>(grids.size()));
  Problem second(c.kind, c.rows, c.n, c.k, a, b.data(), c.bias ? bias.data() : nullptr, again,
                 c.activation, 1, static_cast<int>(grids.size()));

  int64_t* const rows_d = to_device(rows);
  int64_t* const checked_d = to_device(checked);
  int32_t* const expert_d = to_device(expert_of);
  const void** const b_d = to_device(b);
  const void** const bias_d = to_device(bias);
  const int64_t count = static_cast<int64_t>(checked.size());
  double* const errors_d = to_device(std::vector<double>(3 * count, 0.0));
  unsigned long long* const different_d = to_device(std::vector<unsigned long long>{0});

  poison<<<512, 256>>>(d, layout_rows * c.n);
  CHECK_CUDA(problem.run(0, true, grids[0], nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  compare<E><<<dim3((c.n + 127) / 128, 2048), 128>>>(
      a, reinterpret_cast<const E* const*>(b_d),
      c.bias ? reinterpret_cast<const E* const*>(bias_d) : nullptr, d, checked_d, expert_d, count,
      c.n, c.k, experts, gated, c.activation, errors_d);
  for (size_t g = 1; g < grids.size(); ++g) {
    poison<<<512, 256>>>(again, layout_rows * c.n);
    CHECK_CUDA(second.run(static_cast<int>(g), g % 2 == 0, grids[g], nullptr));
    count_differences<<<512, 128>>>(reinterpret_cast<uint16_t*>(d),
                                    reinterpret_cast<uint16_t*>(again), rows_d,
                                    static_cast<int64_t>(rows.size()), c.n, different_d);
  }
  CHECK_CUDA(cudaDeviceSynchronize());

  std::vector<double> errors(3 * count);
  CHECK_CUDA(
      cudaMemcpy(errors.data(), errors_d, errors.size() * sizeof(double), cudaMemcpyDeviceToHost));
  unsigned long long different = 0;
  CHECK_CUDA(cudaMemcpy(&different, different_d, sizeof(different), cudaMemcpyDeviceToHost));
  std::vector<uint32_t> words(problem.set_words);
  CHECK_CUDA(cudaMemcpy(words.data(), problem.counters, words.size() * sizeof(uint32_t),
                        cudaMemcpyDeviceToHost));
  uint64_t times[2];
  CHECK_CUDA(cudaMemcpy(times, problem.times, sizeof(times), cudaMemcpyDeviceToHost));

  double worst = 0.0, nans = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double relative = std::sqrt(errors[3 * i] / (errors[3 * i + 1] + 1e-30));
    if (!(relative <= worst)) worst = relative;
    nans += errors[3 * i + 2];
  }
  int wrong_flags = 0;
  for (size_t i = 1; i < words.size(); ++i) wrong_flags += words[i] != uint32_t(problem.n_tiles);
  const double limit = c.kind.dtype == Dtype::bfloat16 ? 4e-3 : 5e-4;
  const bool times_right = count == 0 || (times[0] > 0 && times[1] > times[0]);
  const bool passed =
      worst <= limit && nans == 0 && wrong_flags == 0 && different == 0 && times_right;
  std::printf(
      "%-34s rows %6zu checked %6ld n %5d k %5d: rel err %.2e nan %.0f flags wrong %d, "
      "bits different %llu, times %s: %s\n",
      c.name, rows.size(), static_cast<long>(count), c.n, c.k, worst, nans, wrong_flags, different,
      times_right ? "ok" : "WRONG", passed ? "ok" : "FAILED");
  for (int i = 0; i < matrices; ++i) {
    cudaFree(const_cast<void*>(b[i]));
    cudaFree(const_cast<void*>(bias[i]));
  }
  for (void* p :
       {static_cast<void*>(a), static_cast<void*>(d), static_cast<void*>(again),
        static_cast<void*>(rows_d), static_cast<void*>(checked_d), static_cast<void*>(expert_d),
        static_cast<void*>(errors_d), static_cast<void*>(different_d), static_cast<void*>(b_d),
        static_cast<void*>(bias_d)}) {
    cudaFree(p);
  }
  return passed;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  int device = 0, sms = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  CHECK_CUDA(tilemoe_producer_load());
  std::printf("seed %llu, %d SMs\n", static_cast<unsigned long long>(seed), sms);
  const Dtype bf16 = Dtype::bfloat16, fp16 = Dtype::float16;
  const std::vector<int> ragged{0, 1, 127, 128, 129, 0, 300, 640, 5};
  const std::vector<int> even16(16, 1024);
  const std::vector<Case> cases{
      {"bf16 n256 ragged", {bf16, 256, 0}, ragged, 1000, 328, false, Activation::none, 1},
      {"bf16 n256 bias gelu", {bf16, 256, 0}, ragged, 1000, 328, true, Activation::gelu, 1},
      {"bf16 n256 bias silu", {bf16, 256, 0}, ragged, 520, 72, true, Activation::silu, 1},
      {"bf16 n256 relu, k 8", {bf16, 256, 0}, ragged, 8, 8, false, Activation::relu, 1},
      {"bf16 n256 k 64", {bf16, 256, 0}, ragged, 256, 64, true, Activation::none, 1},
      {"bf16 n128 ragged", {bf16, 128, 0}, ragged, 1000, 328, false, Activation::none, 1},
      {"bf16 n128 bias gelu", {bf16, 128, 0}, ragged, 136, 1032, true, Activation::gelu, 1},
      {"fp16 n256 bias", {fp16, 256, 0}, ragged, 1000, 328, true, Activation::none, 1},
      {"fp16 n128 bias silu", {fp16, 128, 0}, ragged, 1000, 328, true, Activation::silu, 1},
      {"bf16 gated silu", {bf16, 256, 1}, ragged, 1000, 328, false, Activation::silu, 1},
      {"bf16 gated bias gelu", {bf16, 256, 1}, ragged, 136, 520, true, Activation::gelu, 1},
      {"fp16 gated bias silu", {fp16, 256, 1}, ragged, 264, 520, true, Activation::silu, 1},
      {"no rows", {bf16, 256, 0}, {0, 0, 3, 0}, 256, 256, false, Activation::none, 1},
      {"bf16 n256 large", {bf16, 256, 0}, even16, 8192, 2048, false, Activation::none, 31},
      {"bf16 n256 n 1024", {bf16, 256, 0}, even16, 1024, 4096, true, Activation::none, 13},
      {"bf16 n128 n 512", {bf16, 128, 0}, even16, 512, 2048, false, Activation::none, 13},
  };
  const size_t first = argc > 3 ? std::min(cases.size(), size_t(std::atoi(argv[3]))) : 0;
  const size_t left = cases.size() - first;
  const size_t count = argc > 2 ? std::min(left, size_t(std::atoi(argv[2]))) : left;
  int failed = 0;
  for (const Case& c : std::vector<Case>(cases.begin() + first, cases.begin() + first + count)) {
    const bool passed = c.kind.dtype == bf16 ? run_case<__nv_bfloat16>(c, seed, sms)
                                             : run_case<__half>(c, seed, sms);
    failed += !passed;
  }
  std::printf("%d of %zu cases failed\n", failed, count);
  return failed == 0 ? 0 : 1;
}
