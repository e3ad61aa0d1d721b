// Shared by the benches of the operator: shapes, and a group whose ways to run GEMM 2 and the
// return of its rows are checked and timed: interleaved, fresh rows of A, all GPUs busy, slowest
// rank.
#pragma once

#include <chrono>
#include <cmath>

#include "bulk_mover.h"
#include "operator_payload.cuh"

namespace harness {

struct ShapeSpec {
  int m, n, k, local_experts, topk;  // m: mean rows a rank
};
inline const ShapeSpec kShapes[] = {
    {16384, 8192, 2048, 16, 2}, {32768, 8192, 2048, 16, 2}, {32768, 4096, 1536, 32, 8},
    {16384, 1024, 4096, 16, 2}, {16384, 512, 2048, 16, 2},  {16384, 8192, 2048, 4, 2},
    {16384, 8192, 2048, 8, 2},  {16384, 8192, 2048, 32, 2}, {16384, 8192, 2048, 64, 2}};
// Rows of the hottest rank over the mean. W ranks end at W: stress_skew of two is 1.9.
inline const std::pair<const char*, double> kRoutings[] = {
    {"balanced", 0.0}, {"moderate_skew", 1.6}, {"stress_skew", 2.6}, {"uniform", 1.0}};
inline double hot_of(int routing, int world) {
  return std::min(kRoutings[routing].second, 0.95 * world);
}

inline Shape shape_of(const ShapeSpec& spec, int world, int tile_n, int chunk, int tail) {
  Shape shape{world, spec.local_experts, spec.topk, spec.n, spec.k, spec.m / spec.topk};
  shape.kind.tile_n = tile_n;
  shape.local_tail_bands = tail;
  shape.chunk_bytes = chunk;
  shape.max_rows = static_cast<int64_t>(spec.m * (std::max(1.0, hot_of(2, world)) + 0.1));
  return shape;
}

static __global__ void spin(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) {
  }
}

static __global__ void fill_noise(__nv_bfloat16* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;  // of four uniforms: near enough to normal
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(mix(i * 4 + j, seed) >> 8) * 0x1p-24f;
    data[i] = __float2bfloat16_rn(scale * 1.732f * (sum - 2.0f));
  }
}

// Block: one token. errors[2 b] = ||out - ref||^2, errors[2 b + 1] = ||ref||^2 over some columns.
static __global__ void oracle_of_buffers(const __nv_bfloat16* y, const int32_t* ids,
                                         const int32_t* positions, const float* weights,
                                         const int64_t* dispatch_row, const __nv_bfloat16* const* a,
                                         const __nv_bfloat16* const* b, int topk, int n, int k,
                                         int local_experts, int token_step, int column_step,
                                         double* errors) {
  const int token = blockIdx.x * token_step;
  const int lane = threadIdx.x % 32;
  double wrong = 0.0, right = 0.0;
  for (int column = threadIdx.x / 32 * column_step; column < n;
       column += blockDim.x / 32 * column_step) {
    float sum = 0.0f;
    for (int j = 0; j < topk; ++j) {
      const int64_t route = int64_t{token} * topk + j;
      const int expert = ids[route];
      if (expert < 0) continue;
      const __nv_bfloat16* const row =
          a[expert / local_experts] + (dispatch_row[expert] + positions[route]) * k;
      const __nv_bfloat16* const w = b[expert] + int64_t{column} * k;
      float dot = 0.0f;
      for (int q = lane; q < k; q += 32) {
        dot = fmaf(__bfloat162float(row[q]), __bfloat162float(w[q]), dot);
      }
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      sum += weights[route] * dot;
    }
    const double difference = __bfloat162float(y[int64_t{token} * n + column]) - double{sum};
    wrong += difference * difference;
    right += double{sum} * sum;
  }
  if (lane == 0) {
    atomicAdd(&errors[2 * blockIdx.x], wrong);
    atomicAdd(&errors[2 * blockIdx.x + 1], right);
  }
}

struct Variant {
  std::string name;
  Mover mover;
  int ctas;
  bool split;      // events between the three kernels
  int pieces = 0;  // of the bulk copies that take the consumer's place; 0 = plain stores
  // In the place of tilemoe_combine_launch: what it is given and the number of the routing.
  std::function<void(Rank&, const CombineParams&, int fresh)> launch = nullptr;
};

inline double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * values.size()))];
}
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// Times of one variant, an entry a round; a rank's and, in `all`, the slowest rank's.
struct Times {
  std::vector<double> total, exchange, gemm, copy, scale, ready, end, arrival, backlog, drained;

  // Of the group: from the last rank's producer end to the last rank's last arrival.
  std::vector<double> exposed() const {
    std::vector<double> result;
    for (size_t i = 0; i < end.size(); ++i) result.push_back(std::max(0.0, arrival[i] - end[i]));
    return result;
  }
};

class Bench {
 public:
  static constexpr int kFresh = 8;  // routings that take turns

  // head_start_ns: of the host, in which it queues a call while the GPU spins.
  Bench(const Shape& shape, const ShapeSpec& spec, int routing, uint64_t seed,
        int64_t head_start_ns = 120'000)
      : group_(shape),
        shape_(shape),
        spec_(spec),
        routing_(routing),
        head_start_ns_(head_start_ns) {
    std::mt19937_64 random(seed);
    const double hot = hot_of(routing, shape.world);
    const std::vector<double> shares = hot > 0.0 ? skew(shape, 0, hot) : std::vector<double>{};
    for (int r = 0; r < shape.world; ++r) {
      Rank& rank = group_[r];
      rank.use();
      routings_.emplace_back();
      for (int i = 0; i < kFresh; ++i) {
        routings_[r].push_back(make_routing(shape, shape.max_tokens, shares, 0.0, random));
      }
      const int64_t elements = rank.bounds.rows * shape.k;
      uint16_t* source;
      CHECK_CUDA(cudaMalloc(&source, elements * 2));
      fill_noise<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(source), elements, 1.0f, 17 + r);
      for (int e = 0; e < shape.local_experts; ++e) {
        fill_noise<<<1024, 256>>>(static_cast<__nv_bfloat16*>(const_cast<void*>(rank.b[e])),
                                  int64_t{shape.n} * shape.k,
                                  1.0f / std::sqrt(static_cast<float>(shape.k)), 1000 + r * 97 + e);
      }
      CHECK_CUDA(cudaDeviceSynchronize());
      source_.push_back(source);
      uint16_t* y;
      CHECK_CUDA(cudaMalloc(&y, int64_t{shape.max_tokens} * shape.n * 2));
      wanted_.push_back(y);
      epochs_.emplace_back(kMostVariants);
      std::vector<cudaEvent_t> events(kMostVariants * kEvents);
      for (auto& event : events) CHECK_CUDA(cudaEventCreate(&event));
      events_.push_back(events);
    }
    for (int i = 0; i < kFresh; ++i) {
      std::vector<double> rows(shape.world);
      double sum = 0.0;
      for (int r = 0; r < shape.world; ++r) {
        for (int e = 0; e < shape.experts(); ++e) {
          rows[e / shape.local_experts] += routings_[r][i].counts[e];
          sum += routings_[r][i].counts[e];
        }
      }
      const double ratio = *std::max_element(rows.begin(), rows.end()) * shape.world / sum;
      if (std::abs(ratio - std::max(hot, 1.0)) > 0.03) {
        std::printf("routing %s has ratio %.3f\n", kRoutings[routing].first, ratio);
        std::exit(1);
      }
      hot_ratio_ = ratio;
    }
  }
  ~Bench() {
    for (int r = 0; r < shape_.world; ++r) {
      group_[r].use();
      cudaFree(source_[r]);
      cudaFree(wanted_[r]);
      for (auto event : events_[r]) cudaEventDestroy(event);
      for (Routing& x : routings_[r]) free_routing(x);
    }
  }

  // Sequential against the fp32 oracle on a sample, every variant bit-equal to sequential.
  bool check(const std::vector<Variant>& variants) {
    run_checked({"sequential", Mover::sequential, 16, false});
    for (int r = 0; r < shape_.world; ++r) {
      group_[r].use();
      CHECK_CUDA(cudaMemcpy(wanted_[r], group_[r].y, int64_t{shape_.max_tokens} * shape_.n * 2,
                            cudaMemcpyDeviceToDevice));
    }
    max_rel_err_ = error();
    if (!(max_rel_err_ <= 8e-3)) {
      std::printf("sequential: error %.2e\n", max_rel_err_);
      return false;
    }
    for (const Variant& variant : variants) {
      run_checked(variant);
      for (int r = 0; r < shape_.world; ++r) {
        group_[r].use();
        Comparison* const count = upload(std::vector<Comparison>(1));
        compare<<<1024, 256>>>(group_[r].y, wanted_[r], int64_t{shape_.max_tokens} * shape_.n,
                               count);
        Comparison seen;
        CHECK_CUDA(cudaMemcpy(&seen, count, sizeof(seen), cudaMemcpyDeviceToHost));
        cudaFree(count);
        const unsigned long long different = seen.different;
        if (different == 0) continue;
        std::printf("%s: rank %d: %llu elements differ from sequential: not timed\n",
                    variant.name.c_str(), r, different);
        return false;
      }
    }
    return true;
  }

  // All variants once a round, in a random order that all ranks share.
  std::vector<Times> time(const std::vector<Variant>& variants, int rounds) {
    const int count = static_cast<int>(variants.size());
    std::vector<std::vector<Times>> times(shape_.world, std::vector<Times>(count));
    Meeting meeting(shape_.world);
    group_.each([&](Rank& rank) {
      const auto call = [&](int i, int number) { enqueue(rank, variants[i], number % kFresh, i); };
      in_random_order(meeting, count, rounds, call, [&](int round) {
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        ++rounds_ended_;
        for (int i = 0; round >= 0 && i < count; ++i) {
          collect(rank, variants[i], i, times[rank.rank][i]);
        }
      });
    });
    std::vector<Times> slowest = times[0];
    for (int r = 1; r < shape_.world; ++r) {
      for (int i = 0; i < count; ++i) {
        const auto merge = [&](std::vector<double> Times::* field, const auto& pick) {
          std::vector<double>& mine = slowest[i].*field;
          for (size_t j = 0; j < mine.size(); ++j) {
            mine[j] = pick(mine[j], (times[r][i].*field)[j]);
          }
        };
        const auto larger = [](double x, double y) { return std::max(x, y); };
        for (auto field :
             {&Times::total, &Times::exchange, &Times::gemm, &Times::copy, &Times::ready,
              &Times::end, &Times::arrival, &Times::backlog, &Times::drained}) {
          merge(field, larger);
        }
        // The others' scale waits for the slowest rank's rows: the smallest is the sum alone.
        merge(&Times::scale, [](double x, double y) { return std::min(x, y); });
      }
    }
    return slowest;
  }

  double max_rel_err() const { return max_rel_err_; }
  // Of rank 0's plan, in routing 0.
  PlanSizes sizes() { return plan_sizes(group_[0].exchange.plan.params, counts(0).data()); }
  // Of the rank that sends most, in routing 0.
  int64_t most_remote_bytes() const {
    int64_t most = 0;
    for (int r = 0; r < shape_.world; ++r) {
      int64_t rows = 0;
      for (int source = 0; source < shape_.world; ++source) {
        for (int e = 0; source != r && e < shape_.local_experts; ++e) {
          rows += routings_[source][0].counts[r * shape_.local_experts + e];
        }
      }
      most = std::max(most, rows * shape_.row_bytes());
    }
    return most;
  }
  double hot_ratio() const { return hot_ratio_; }
  Group& group() { return group_; }
  // C of routing `fresh`.
  std::vector<int32_t> counts(int fresh) const {
    std::vector<int32_t> counts;
    for (const std::vector<Routing>& of_rank : routings_) {
      const std::vector<int32_t>& own = of_rank[fresh].counts;
      counts.insert(counts.end(), own.begin(), own.end());
    }
    return counts;
  }
  // Grows as long as ranks go on: for whoever watches.
  int64_t rounds_ended() const { return rounds_ended_; }

 private:
  static constexpr int kMostVariants = 64;
  static constexpr int kEvents = 5;  // before producer, consumer, scale; end; before the exchange

  void prepare(Rank& rank) {
    CHECK_CUDA(cudaMemcpyAsync(rank.a, source_[rank.rank],
                               std::min<int64_t>(rank.bounds.rows, used_rows()) * shape_.k * 2,
                               cudaMemcpyDeviceToDevice, rank.main));
  }
  // Rows that GEMM 1 would have written, with some room: of the hottest rank.
  int64_t used_rows() const {
    const double hot = std::max(1.0, hot_of(routing_, shape_.world));
    return static_cast<int64_t>(spec_.m * hot * 1.02) +
           int64_t{shape_.local_experts} * shape_.world * kProducerTileM;
  }

  void run_checked(const Variant& variant) {
    group_.each([&](Rank& rank) {
      const Routing& routing = routings_[rank.rank][0];
      CHECK_CUDA(cudaMemcpyAsync(rank.a, source_[rank.rank], rank.bounds.rows * shape_.k * 2,
                                 cudaMemcpyDeviceToDevice, rank.main));
      group_.poison_results(rank);
      group_.launch_exchange(rank, routing, variant.ctas);
      launch(rank, combine_params(rank, variant, 0), variant, 0, nullptr);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
      ++rounds_ended_;
    });
  }

  cudaError_t launch_consumer(const Variant& variant, const ShipParams& ship, cudaStream_t stream) {
    return variant.pieces > 0 ? bulk_consumer_launch(&ship, variant.ctas, variant.pieces, stream)
                              : tilemoe_consumer_launch(&ship, variant.ctas, stream);
  }
  CombineParams combine_params(Rank& rank, const Variant& variant, int fresh) {
    const Routing& routing = routings_[rank.rank][fresh];
    CombineParams p = group_.combine_params(rank, routing, variant.mover, variant.ctas);
    return p;
  }
  // events: [3], recorded in front of each kernel of a split variant; or null.
  void launch(Rank& rank, CombineParams p, const Variant& variant, int fresh, cudaEvent_t* events) {
    const auto record = [&](int i) {
      if (events != nullptr) CHECK_CUDA(cudaEventRecord(events[i], rank.main));
    };
    record(0);
    if (variant.split) {
      p.producer.drain = 0;
      CHECK_CUDA(tilemoe_producer_launch(&p.producer, p.kind, p.sms, rank.main));
      record(1);
      CHECK_CUDA(launch_consumer(variant, p.producer.ship, rank.main));
      record(2);
      CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    } else if (variant.launch != nullptr) {
      variant.launch(rank, p, fresh);
    } else if (variant.pieces > 0) {  // as tilemoe_combine_launch
      p.producer.drain = 1;
      CHECK_CUDA(cudaEventRecord(rank.begin, rank.main));
      CHECK_CUDA(cudaStreamWaitEvent(rank.side, rank.begin, 0));
      CHECK_CUDA(tilemoe_producer_launch(&p.producer, p.kind, p.sms - variant.ctas, rank.main));
      CHECK_CUDA(launch_consumer(variant, p.producer.ship, rank.side));
      CHECK_CUDA(cudaEventRecord(rank.end, rank.side));
      CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
      CHECK_CUDA(cudaStreamWaitEvent(rank.main, rank.end, 0));
    } else {
      CHECK_CUDA(tilemoe_combine_launch(&p, rank.main));
    }
  }

  void enqueue(Rank& rank, const Variant& variant, int fresh, int index) {
    const Routing& routing = routings_[rank.rank][fresh];
    cudaEvent_t* const event = &events_[rank.rank][kEvents * index];
    spin<<<1, 1, 0, rank.main>>>(head_start_ns_);  // the host is done before the ranks meet
    prepare(rank);
    if (variant.split) {  // behind one that nothing follows, so that the ranks are together
      group_.launch_exchange(rank, routing, variant.ctas);
      CHECK_CUDA(cudaEventRecord(event[4], rank.main));
    }
    group_.launch_exchange(rank, routing, variant.ctas);
    epochs_[rank.rank][index] = rank.epoch;
    launch(rank, combine_params(rank, variant, fresh), variant, fresh, event);
    CHECK_CUDA(cudaEventRecord(event[3], rank.main));
  }

  void collect(Rank& rank, const Variant& variant, int index, Times& times) {
    cudaEvent_t* const event = &events_[rank.rank][kEvents * index];
    const auto us = [&](int from, int to) {
      float ms = 0.0f;
      CHECK_CUDA(cudaEventElapsedTime(&ms, event[from], event[to]));
      return ms * 1e3;
    };
    times.total.push_back(us(0, 3));
    if (variant.split) {
      times.exchange.push_back(us(4, 0));
      times.gemm.push_back(us(0, 1));
      times.copy.push_back(us(1, 2));
      times.scale.push_back(us(2, 3));
    }
    CallRecord record{};
    if (!rank.record(epochs_[rank.rank][index], &record)) {
      std::printf("rank %d: call %llu has left no record\n", rank.rank,
                  static_cast<unsigned long long>(epochs_[rank.rank][index]));
      std::exit(1);
    }
    const IterationStats& s = record.iteration;
    times.ready.push_back(s.first_segment_ready * 1e-3);
    times.end.push_back(s.producer_end * 1e-3);
    times.arrival.push_back(s.last_arrival * 1e-3);
    times.backlog.push_back(s.backlog_at_producer_end);
    times.drained.push_back(s.chunks_drained);
    if (rank.error->outcome != Outcome::ok) {
      std::printf("rank %d failed: %s\n", rank.rank, text(*rank.error).c_str());
      std::exit(1);
    }
  }

  double error() {
    constexpr int kTokens = 64;
    double worst = 0.0;
    std::vector<const __nv_bfloat16*> a, b;
    for (int r = 0; r < shape_.world; ++r) {
      a.push_back(reinterpret_cast<const __nv_bfloat16*>(group_[r].a));
      for (const void* weights : group_[r].b) {
        b.push_back(static_cast<const __nv_bfloat16*>(weights));
      }
    }
    for (int r = 0; r < shape_.world; ++r) {
      Rank& rank = group_[r];
      rank.use();
      const auto** const a_d = upload(a);
      const auto** const b_d = upload(b);
      double* const errors = upload(std::vector<double>(2 * kTokens, 0.0));
      const Routing& routing = routings_[r][0];
      oracle_of_buffers<<<kTokens, 256>>>(
          reinterpret_cast<const __nv_bfloat16*>(rank.y), routing.ids_d, routing.positions_d,
          routing.weights_d, rank.exchange.plan.view.dispatch_row, a_d, b_d, shape_.topk, shape_.n,
          shape_.k, shape_.local_experts, shape_.max_tokens / kTokens, 29, errors);
      std::vector<double> sums(2 * kTokens);
      CHECK_CUDA(
          cudaMemcpy(sums.data(), errors, sums.size() * sizeof(double), cudaMemcpyDeviceToHost));
      for (int i = 0; i < kTokens; ++i) {
        const double relative = std::sqrt(sums[2 * i] / (sums[2 * i + 1] + 1e-30));
        if (!(relative <= worst)) worst = relative;
      }
      cudaFree(a_d), cudaFree(b_d), cudaFree(errors);
    }
    return worst;
  }

  Group group_;
  Shape shape_;
  ShapeSpec spec_;
  int routing_;
  const int64_t head_start_ns_;
  std::atomic<int64_t> rounds_ended_ = 0;
  std::vector<std::vector<Routing>> routings_;
  std::vector<uint16_t*> source_, wanted_;
  std::vector<std::vector<uint64_t>> epochs_;  // of the newest round, by variant
  std::vector<std::vector<cudaEvent_t>> events_;
  double max_rel_err_ = 0.0, hot_ratio_ = 0.0;
};

}  // namespace harness
