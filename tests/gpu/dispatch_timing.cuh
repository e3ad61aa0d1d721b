// Shared by the bench and the diagnosis of dispatch: shapes, and a group whose ways to run GEMM 1
// with and without dispatch are checked and timed: interleaved, all GPUs busy, slowest rank.
#pragma once

#include <cmath>

#include "common/wait.cuh"
#include "dispatch_harness.cuh"
#include "dispatch_probes.h"

namespace front {

struct ShapeSpec {
  int m, n, k, local_experts, topk, gated;  // m: mean rows a rank; n: output columns
};
inline const ShapeSpec kShapes[] = {{16384, 2048, 8192, 16, 2, 0},
                                    {16384, 2048, 8192, 16, 2, 1},
                                    {16384, 4096, 1024, 16, 2, 0},
                                    {16384, 2048, 512, 16, 2, 0},
                                    {32768, 1536, 4096, 32, 8, 0},
                                    {32768, 2048, 7168, 64, 8, 0},
                                    // Decoding: 1, 16 and 64 tokens a rank.
                                    {8, 1536, 4096, 32, 8, 0},
                                    {128, 1536, 4096, 32, 8, 0},
                                    {512, 1536, 4096, 32, 8, 0}};
inline const std::pair<const char*, double> kRoutings[] = {{"balanced", 1.0},
                                                           {"moderate_skew", 1.6}};

inline Shape shape_of(const ShapeSpec& spec, int world, int routing, int tail) {
  Shape shape{world, spec.local_experts, spec.topk, spec.n, spec.k, spec.m / spec.topk};
  shape.kind.gated = spec.gated;
  shape.activation = spec.gated != 0 ? Activation::silu : Activation::gelu;
  shape.local_tail_bands = tail;
  shape.max_rows =
      static_cast<int64_t>(spec.m * std::min<double>(world, 1.0 + routing) * 1.05) + kProducerTileM;
  return shape;
}

static __global__ void spin(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) {
  }
}

static __global__ void hold_sm(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) __nanosleep(500);
}

static __global__ void fill_noise(__nv_bfloat16* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;  // of four uniforms: near enough to normal
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(mix(i * 4 + j, seed) >> 8) * 0x1p-24f;
    data[i] = __float2bfloat16_rn(scale * 1.732f * (sum - 2.0f));
  }
}

// Block: some rows. Elements of the room that are not the owner's token, and of the output that are
// not `wanted`'s, where there is one.
static __global__ void compare(const uint16_t* rows, const uint16_t* d, const uint16_t* wanted,
                               const Origin* origins, int count, const uint16_t* const* x, int n,
                               int k, unsigned long long* differences) {
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Origin o = origins[i];
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
      if (rows[int64_t{o.row} * k + j] != x[o.owner][int64_t{o.token} * k + j]) {
        atomicAdd(&differences[0], 1ull);
      }
    }
    for (int j = threadIdx.x; wanted != nullptr && j < n; j += blockDim.x) {
      if (d[int64_t{o.row} * n + j] != wanted[int64_t{o.row} * n + j]) {
        atomicAdd(&differences[1], 1ull);
      }
    }
  }
}

// Block: one row; some columns. errors[2 b] = ||out - ref||^2, errors[2 b + 1] = ||ref||^2.
static __global__ void oracle(const __nv_bfloat16* rows, const __nv_bfloat16* d,
                              const Origin* origins, int row_step, const __nv_bfloat16* const* b,
                              int n, int k, int local_experts, bool gated, int column_step,
                              double* errors) {
  const Origin o = origins[int64_t{blockIdx.x} * row_step];
  const int lane = threadIdx.x % 32, local = o.expert % local_experts;
  double wrong = 0.0, right = 0.0;
  for (int column = threadIdx.x / 32 * column_step; column < n;
       column += blockDim.x / 32 * column_step) {
    float sums[2] = {0.0f, 0.0f};
    for (int m = 0; m < (gated ? 2 : 1); ++m) {
      const __nv_bfloat16* const w = b[local + m * local_experts] + int64_t{column} * k;
      for (int q = lane; q < k; q += 32) {
        sums[m] =
            fmaf(__bfloat162float(rows[int64_t{o.row} * k + q]), __bfloat162float(w[q]), sums[m]);
      }
      for (int step = 16; step > 0; step /= 2) {
        sums[m] += __shfl_xor_sync(0xffffffffu, sums[m], step);
      }
    }
    const float x = sums[0];
    const float wanted =
        gated ? x / (1.0f + expf(-x)) * sums[1] : 0.5f * x * (1.0f + erff(x * 0.70710678f));
    const double difference = __bfloat162float(d[int64_t{o.row} * n + column]) - double{wanted};
    wrong += difference * difference;
    right += double{wanted} * wanted;
  }
  if (lane == 0) {
    atomicAdd(&errors[2 * blockIdx.x], wrong);
    atomicAdd(&errors[2 * blockIdx.x + 1], right);
  }
}

// What is timed of GEMM 1's kernel with dispatch: both, or
enum class Way {
  both,
  dispatch,  // without tiles
  tiles,     // without dispatch: the rows are in place
  // The rows are in place and for the diagnosis' sake
  peers_only,  // own rows are not brought, peers' are
  no_wait,     // all are brought and no tile waits for one
  spinning,    // tiles, while so many CTAs of another kernel spin for `spin_us`
  timed,       // (not in place) both, and how long tiles wait
  watched      // (not in place) both on one SM less, and when the last row comes
};
struct Variant {
  Way way;
  int ctas;
  double spin_us = 0.0;

  bool rows_in_place() const {
    return way == Way::tiles || way == Way::peers_only || way == Way::no_wait ||
           way == Way::spinning;
  }
};

inline double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * values.size()))];
}
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// us of the slowest rank, an entry a round. The last three count from the exchange's end.
struct Times {
  std::vector<double> kernel, exchange, start, rows, end;

  template <class F>
  void each(F f) {
    for (auto* times : {&kernel, &exchange, &start, &rows, &end}) f(*times);
  }
};

class Bench {
 public:
  Bench(const Shape& shape, int routing, uint64_t seed) : group_(shape), shape_(shape) {
    std::mt19937_64 random(seed);
    const double hot = kRoutings[routing].second;
    std::vector<double> shares;
    for (int e = 0; hot > 1.0 && e < shape.experts(); ++e) {
      shares.push_back(e < shape.local_experts ? hot : (shape.world - hot) / (shape.world - 1));
    }
    for (int i = 0; i < kFresh; ++i) {
      calls_.push_back(group_.make_call(
          [&](int) { return make_routing(shape, shape.max_tokens, shares, 0.0, random); }));
      size_t most = 0, sum = 0;
      for (const auto& rows : calls_.back().rows) {
        most = std::max(most, rows.size());
        sum += rows.size();
      }
      hot_ratio_ = static_cast<double>(most) * shape.world / sum;
    }
    std::vector<const uint16_t*> all;
    for (int r = 0; r < shape.world; ++r) {
      Rank& rank = group_[r];
      rank.use();
      uint16_t *x, *wanted;
      const int64_t elements = int64_t{shape.max_tokens} * shape.k;
      CHECK_CUDA(cudaMalloc(&x, elements * 2));
      CHECK_CUDA(cudaMalloc(&wanted, rank.bounds.rows * shape.n * 2));
      fill_noise<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(x), elements, 1.0f, 17 + r);
      for (int m = 0; m < shape.matrices(); ++m) {
        fill_noise<<<1024, 256>>>(
            static_cast<__nv_bfloat16*>(rank.b[m]), int64_t{shape.n} * shape.k,
            1.0f / std::sqrt(static_cast<float>(shape.k)), 1000 + r * 977 + m);
      }
      CHECK_CUDA(cudaMemset(rank.rows, 0, rank.bounds.rows * shape.k * 2));
      CHECK_CUDA(cudaDeviceSynchronize());
      source_.push_back(x);
      wanted_.push_back(wanted);
      all.push_back(rank.x);
      std::vector<cudaEvent_t> events(kMostVariants * kEvents);
      for (auto& event : events) CHECK_CUDA(cudaEventCreate(&event));
      events_.push_back(events);
      CallTimes* times;
      CHECK_CUDA(cudaHostAlloc(&times, kMostVariants * sizeof(CallTimes), cudaHostAllocPortable));
      call_times_.push_back(times);
      cudaStream_t side;
      CHECK_CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
      side_.push_back(side);
      CHECK_CUDA(
          cudaFuncSetAttribute(hold_sm, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeldBytes));
      CHECK_CUDA(probe(Probe::timed).load());
      CHECK_CUDA(probe(Probe::no_wait).load());
    }
    for (int r = 0; r < shape.world; ++r) {
      group_[r].use();
      x_of_ranks_.push_back(upload(all));
      b_.push_back(upload(group_[r].b));
    }
  }
  ~Bench() {
    for (int r = 0; r < shape_.world; ++r) {
      group_[r].use();
      cudaFree(source_[r]), cudaFree(wanted_[r]), cudaFree(x_of_ranks_[r]), cudaFree(b_[r]);
      for (auto event : events_[r]) cudaEventDestroy(event);
      cudaFreeHost(call_times_[r]);
      cudaStreamDestroy(side_[r]);
    }
    for (Call& call : calls_) group_.free_call(call);
  }

  // Tiles behind a dispatch against the fp32 oracle on a sample, and each variant that has both
  // bit-equal to that, with every row of the room its owner's token.
  bool check(const std::vector<Variant>& variants) {
    run_checked({Way::tiles, 8});
    for (int r = 0; r < shape_.world; ++r) {
      group_[r].use();
      CHECK_CUDA(cudaMemcpy(wanted_[r], group_[r].d, group_[r].bounds.rows * shape_.n * 2,
                            cudaMemcpyDeviceToDevice));
    }
    max_rel_err_ = error();
    bool good = max_rel_err_ <= 8e-3;
    if (!good) std::printf("GEMM alone: error %.2e\n", max_rel_err_);
    for (const Variant& variant : variants) {
      if (variant.way == Way::tiles || variant.way == Way::dispatch) continue;
      run_checked(variant);
      for (int r = 0; r < shape_.world; ++r) {
        Rank& rank = group_[r];
        rank.use();
        unsigned long long* const differences = upload(std::vector<unsigned long long>{0, 0});
        compare<<<1056, 256>>>(rank.rows, rank.d, wanted_[r], calls_[0].rows_d[r],
                               static_cast<int>(calls_[0].rows[r].size()), x_of_ranks_[r], shape_.n,
                               shape_.k, differences);
        unsigned long long got[2];
        CHECK_CUDA(cudaMemcpy(got, differences, sizeof(got), cudaMemcpyDeviceToHost));
        cudaFree(differences);
        if (got[0] + got[1] == 0) continue;
        std::printf(
            "way %d, %d CTAs: rank %d: %llu elements of the room and %llu of the output differ\n",
            static_cast<int>(variant.way), variant.ctas, r, got[0], got[1]);
        good = false;
      }
    }
    return good;
  }

  // All variants once a round, in a random order that all ranks share.
  std::vector<Times> time(const std::vector<Variant>& variants, int rounds) {
    const int count = static_cast<int>(variants.size());
    std::vector<std::vector<Times>> times(shape_.world, std::vector<Times>(count));
    Meeting meeting(shape_.world);
    group_.each([&](Rank& rank) {
      const auto call = [&](int i, int number) {
        enqueue(rank, variants[i], calls_[number % kFresh], i);
      };
      in_random_order(meeting, count, rounds, call, [&](int round) {
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        for (int i = 0; round >= 0 && i < count; ++i) collect(rank, i, times[rank.rank][i]);
      });
    });
    std::vector<Times> slowest = times[0];
    for (int i = 0; i < count; ++i) {
      for (int r = 1; r < shape_.world; ++r) {
        std::vector<const std::vector<double>*> others;
        times[r][i].each([&](std::vector<double>& other) { others.push_back(&other); });
        size_t which = 0;
        slowest[i].each([&](std::vector<double>& mine) {
          const std::vector<double>& other = *others[which++];
          for (size_t j = 0; j < mine.size(); ++j) mine[j] = std::max(mine[j], other[j]);
        });
      }
    }
    return slowest;
  }

  // Sums over the calls that a timed variant has made since the last look, of the slowest rank.
  RowWaits row_waits() {
    RowWaits worst{};
    for (int r = 0; r < shape_.world; ++r) {
      group_[r].use();
      const RowWaits waits = read_row_waits();
      reset_row_waits();
      if (waits.ns >= worst.ns) worst = waits;
    }
    return worst;
  }

  double max_rel_err() const { return max_rel_err_; }
  double hot_ratio() const { return hot_ratio_; }

 private:
  static constexpr int kFresh = 8;
  static constexpr int kMostVariants = 64;
  // In front of the exchange, the kernel, and the end; then of the side stream.
  static constexpr int kEvents = 5;
  static constexpr int kHeadStartNs = 10'000;
  static constexpr int kHeldBytes = 200 << 10;  // no tile beside it

  // What is timed comes behind an exchange that nothing of the user's is behind, so the ranks begin
  // together. Tokens are written anew; where rows are to be in place a dispatch in front puts them.
  void enqueue(Rank& rank, const Variant& variant, const Call& call, int index) {
    const Routing& routing = call.routings[rank.rank];
    cudaEvent_t* const event = &events_[rank.rank][kEvents * index];
    CallTimes* const times = &call_times_[rank.rank][index];
    cudaStream_t side = side_[rank.rank];
    const Way way = variant.way;
    *times = {};
    spin<<<1, 1, 0, rank.main>>>(100'000);  // the host is done before the ranks meet
    CHECK_CUDA(cudaMemcpyAsync(rank.x, source_[rank.rank],
                               int64_t{shape_.max_tokens} * shape_.k * 2, cudaMemcpyDeviceToDevice,
                               rank.main));
    group_.launch_exchange(rank, routing);
    if (variant.rows_in_place()) {
      group_.launch_gemm(rank, routing, 8, rank.sms, Group::kDispatch);
    }
    CHECK_CUDA(cudaEventRecord(event[0], rank.main));
    group_.launch_exchange(rank, routing);
    const int grid = way == Way::watched ? rank.sms - 1 : rank.sms;
    const bool no_rows = way == Way::tiles || way == Way::spinning;
    const ProducerParams p = group_.gemm_params(rank, routing, variant.ctas, grid,
                                                no_rows                ? Group::kTiles
                                                : way == Way::dispatch ? Group::kDispatch
                                                                       : Group::kBoth);
    if (way == Way::peers_only) put_own_rows(p.dispatch, rank.main);
    if (way == Way::watched || way == Way::spinning) {
      CHECK_CUDA(cudaEventRecord(event[3], rank.main));
      CHECK_CUDA(cudaStreamWaitEvent(side, event[3], 0));
    }
    if (way == Way::watched) watch_rows(p, &times->rows_ns, side);
    if (way == Way::spinning) {  // resident before the tiles
      hold_sm<<<variant.ctas, 32, kHeldBytes, side>>>(
          static_cast<long long>(variant.spin_us * 1e3) + kHeadStartNs);
      spin<<<1, 1, 0, rank.main>>>(kHeadStartNs);
    }
    CHECK_CUDA(cudaEventRecord(event[1], rank.main));
    if (way == Way::no_wait || way == Way::timed) {
      const Probe kind = way == Way::timed ? Probe::timed : Probe::no_wait;
      CHECK_CUDA(probe(kind).launch(p, grid, rank.main));
    } else {
      CHECK_CUDA(tilemoe_producer_launch(&p, shape_.kind, grid, rank.main));
    }
    CHECK_CUDA(cudaEventRecord(event[2], rank.main));
    if (way == Way::watched || way == Way::spinning) {
      CHECK_CUDA(cudaEventRecord(event[4], side));
      CHECK_CUDA(cudaStreamWaitEvent(rank.main, event[4], 0));
    }
    read_times(rank.gemm, times, rank.main);
  }

  void collect(Rank& rank, int index, Times& times) {
    cudaEvent_t* const event = &events_[rank.rank][kEvents * index];
    const auto us = [&](int from, int to) {
      float ms = 0.0f;
      CHECK_CUDA(cudaEventElapsedTime(&ms, event[from], event[to]));
      return ms * 1e3;
    };
    const CallTimes& seen = call_times_[rank.rank][index];
    const auto since = [&](uint64_t ns) {
      return ns == 0 ? 0.0 : static_cast<double>(ns - seen.exchange_end_ns) * 1e-3;
    };
    times.exchange.push_back(us(0, 1));
    times.kernel.push_back(us(1, 2));
    times.start.push_back(since(seen.start_ns));
    times.rows.push_back(since(seen.rows_ns));
    times.end.push_back(since(seen.end_ns));
    if (rank.error->outcome != Outcome::ok) {
      std::printf("rank %d failed: outcome %d\n", rank.rank, int(rank.error->outcome));
      std::exit(1);
    }
  }

  void run_checked(const Variant& variant) {
    group_.each([&](Rank& rank) {
      if (!variant.rows_in_place()) group_.poison(rank);
      enqueue(rank, variant, calls_[0], 0);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
    for (int r = 0; r < shape_.world; ++r) {
      const ErrorRecord e = group_.failure(group_[r]);
      if (e.outcome == Outcome::ok) continue;
      std::printf("rank %d failed: outcome %d wait %d of rank %d slot %lld seen %llu wanted %llu\n",
                  r, int(e.outcome), int(e.wait), e.rank, static_cast<long long>(e.band),
                  static_cast<unsigned long long>(e.seen),
                  static_cast<unsigned long long>(e.wanted));
      std::exit(1);
    }
  }

  double error() {
    constexpr int kRows = 64;
    double worst = 0.0;
    for (int r = 0; r < shape_.world; ++r) {
      Rank& rank = group_[r];
      rank.use();
      double* const errors = upload(std::vector<double>(2 * kRows, 0.0));
      oracle<<<kRows, 256>>>(reinterpret_cast<const __nv_bfloat16*>(rank.rows),
                             reinterpret_cast<const __nv_bfloat16*>(rank.d), calls_[0].rows_d[r],
                             static_cast<int>(calls_[0].rows[r].size()) / kRows,
                             reinterpret_cast<const __nv_bfloat16* const*>(b_[r]), shape_.n,
                             shape_.k, shape_.local_experts, shape_.kind.gated != 0, 29, errors);
      std::vector<double> sums(2 * kRows);
      CHECK_CUDA(
          cudaMemcpy(sums.data(), errors, sums.size() * sizeof(double), cudaMemcpyDeviceToHost));
      for (int i = 0; i < kRows; ++i) {
        const double relative = std::sqrt(sums[2 * i] / (sums[2 * i + 1] + 1e-30));
        if (!(relative <= worst)) worst = relative;
      }
      cudaFree(errors);
    }
    return worst;
  }

  Group group_;
  Shape shape_;
  std::vector<Call> calls_;
  std::vector<uint16_t*> source_, wanted_;
  std::vector<const uint16_t**> x_of_ranks_;
  std::vector<void**> b_;
  std::vector<std::vector<cudaEvent_t>> events_;
  std::vector<CallTimes*> call_times_;  // page-locked, an entry a variant
  std::vector<cudaStream_t> side_;
  double max_rel_err_ = 0.0, hot_ratio_ = 0.0;
};

}  // namespace front
