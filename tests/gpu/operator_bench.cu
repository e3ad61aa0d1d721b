// Times the whole operator: overlapped at every split against the same kernels one after another,
// interleaved, all GPUs busy, slowest rank. What fails its check is not timed. One JSON line a
// variant is appended to `out`. One rank a GPU, as many as there are unless `ranks` says fewer.
//   operator_bench [ranks=N] [out=FILE] [commit=SHA] [driver=VERSION] [runs=100]
//                  [shapes=0,1,2,3,4] [routings=0,1,2] [layouts=0] [bands=1] [tiles=256,128]
//                  [chunk=65536] [tail=-1] [splits=1,2,4,...,24]
//   operator_bench movers [ranks=N] [runs=20] [shapes=0,3] [chunks=65536,131072]
//                  [splits=1,2,4,6,8,12,16]: plain stores against bulk copies (bulk_mover.cu)
#include <chrono>
#include <cmath>
#include <ctime>
#include <map>
#include <sstream>

#include "bulk_mover.h"
#include "operator_payload.cuh"

namespace {

using namespace harness;

struct Options {
  std::string out, commit = "unknown", driver = "unknown";
  int ranks = 0, runs = 100, chunk = 64 << 10, tail = -1;
  std::vector<int> shapes{0, 1, 2, 3, 4}, routings{0, 1, 2}, layouts{0}, bands{1}, tiles{256, 128},
      splits{1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24}, chunks{64 << 10, 128 << 10};
};

struct ShapeSpec {
  int m, n, k, local_experts, topk;  // m: mean rows a rank
};
const ShapeSpec kShapes[] = {
    {16384, 8192, 2048, 16, 2}, {32768, 8192, 2048, 16, 2}, {32768, 4096, 1536, 32, 8},
    {16384, 1024, 4096, 16, 2}, {16384, 512, 2048, 16, 2},  {16384, 8192, 2048, 4, 2},
    {16384, 8192, 2048, 8, 2},  {16384, 8192, 2048, 32, 2}, {16384, 8192, 2048, 64, 2}};
// Rows of the hottest rank over the mean. W ranks end at W: stress_skew of two is 1.9.
const std::pair<const char*, double> kRoutings[] = {
    {"balanced", 0.0}, {"moderate_skew", 1.6}, {"stress_skew", 2.6}, {"uniform", 1.0}};
double hot_of(int routing, int world) { return std::min(kRoutings[routing].second, 0.95 * world); }

__global__ void spin(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) {
  }
}

__global__ void fill_noise(__nv_bfloat16* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;  // of four uniforms: near enough to normal
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(mix(i * 4 + j, seed) >> 8) * 0x1p-24f;
    data[i] = __float2bfloat16_rn(scale * 1.732f * (sum - 2.0f));
  }
}

// Block: one token. errors[2 b] = ||out - ref||^2, errors[2 b + 1] = ||ref||^2 over some columns.
__global__ void oracle_of_buffers(const __nv_bfloat16* y, const int32_t* ids,
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
  bool recorded = true;
};

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * values.size()))];
}
double median(const std::vector<double>& values) { return quantile(values, 0.5); }

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
  Bench(const Shape& shape, const ShapeSpec& spec, int routing, const Options& options)
      : group_(shape), shape_(shape), spec_(spec), routing_(routing), options_(options) {
    std::mt19937_64 random(options.runs * 7919 + routing);
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
      std::mt19937_64 same(4242);
      std::vector<int> order(count);
      for (int i = 0; i < count; ++i) order[i] = i;
      for (int round = -2; round < rounds; ++round) {
        std::shuffle(order.begin(), order.end(), same);
        const Routing& routing = routings_[rank.rank][(round + 2) % kFresh];
        for (int i : order) {
          meeting.wait();
          enqueue(rank, variants[i], routing, i);
        }
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        if (round >= 0) {
          for (int i = 0; i < count; ++i) collect(rank, variants[i], i, times[rank.rank][i]);
        }
      }
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
  // Of rank 0's plan in the newest call.
  PlanSizes sizes() {
    PlanSizes sizes;
    group_[0].use();
    CHECK_CUDA(
        cudaMemcpy(&sizes, group_[0].exchange.plan.sizes, sizeof(sizes), cudaMemcpyDeviceToHost));
    return sizes;
  }
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

 private:
  static constexpr int kFresh = 8;
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
      launch(rank, group_.combine_params(rank, routing, variant.mover, variant.ctas), variant,
             nullptr);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
  }

  cudaError_t launch_consumer(const Variant& variant, const ShipParams& ship, cudaStream_t stream) {
    return variant.pieces > 0 ? bulk_consumer_launch(&ship, variant.ctas, variant.pieces, stream)
                              : tilemoe_consumer_launch(&ship, variant.ctas, stream);
  }
  // events: [3], recorded in front of each kernel of a split variant; or null.
  void launch(Rank& rank, CombineParams p, const Variant& variant, cudaEvent_t* events) {
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

  void enqueue(Rank& rank, const Variant& variant, const Routing& routing, int index) {
    cudaEvent_t* const event = &events_[rank.rank][kEvents * index];
    spin<<<1, 1, 0, rank.main>>>(120'000);  // the host is done before the ranks meet
    prepare(rank);
    if (variant.split) {  // behind one that nothing follows, so that the ranks are together
      group_.launch_exchange(rank, routing, variant.ctas);
      CHECK_CUDA(cudaEventRecord(event[4], rank.main));
    }
    group_.launch_exchange(rank, routing, variant.ctas);
    epochs_[rank.rank][index] = rank.epoch;
    CombineParams p = group_.combine_params(rank, routing, variant.mover, variant.ctas);
    if (!variant.recorded) p.scale.records = nullptr;
    launch(rank, p, variant, event);
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
    if (variant.recorded && !rank.record(epochs_[rank.rank][index], &record)) {
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
  const Options& options_;
  std::vector<std::vector<Routing>> routings_;
  std::vector<uint16_t*> source_, wanted_;
  std::vector<std::vector<uint64_t>> epochs_;  // of the newest round, by variant
  std::vector<std::vector<cudaEvent_t>> events_;
  double max_rel_err_ = 0.0, hot_ratio_ = 0.0;
};

std::string now_text() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

Shape shape_of(const Options& o, const ShapeSpec& spec, int tile_n, int chunk) {
  Shape shape{o.ranks, spec.local_experts, spec.topk, spec.n, spec.k, spec.m / spec.topk};
  shape.kind.tile_n = tile_n;
  shape.local_tail_bands = o.tail;
  shape.chunk_bytes = chunk;
  shape.max_rows = static_cast<int64_t>(spec.m * (std::max(1.0, hot_of(2, o.ranks)) + 0.1));
  return shape;
}

// Copy alone and beside the producer, by plain stores and by bulk copies.
void movers(const Options& o, const ShapeSpec& spec, int chunk) {
  const Shape shape = shape_of(o, spec, spec.n <= 512 ? 128 : 256, chunk);
  Bench b(shape, spec, 0, o);
  std::vector<Variant> variants;
  const int kinds[] = {0, 4, 6, 12};
  for (bool split : {true, false}) {
    for (int pieces : kinds) {
      for (int c : o.splits) {
        const Mover mover = split ? Mover::sequential : Mover::sm;
        variants.push_back(
            {pieces == 0 ? "plain" : "bulk x" + std::to_string(pieces), mover, c, split, pieces});
      }
    }
  }
  if (variants.size() > 64) {
    std::printf("movers: at most 8 splits\n");
    std::exit(2);
  }
  const double bytes = static_cast<double>(b.most_remote_bytes());
  std::printf(
      "--- movers: M %d N %d K %d, %d ranks, balanced, chunks of %d KiB, %.0f MB out of a "
      "rank\n",
      spec.m, spec.n, spec.k, o.ranks, chunk >> 10, bytes * 1e-6);
  if (!b.check(variants)) std::exit(1);
  const std::vector<Times> times = b.time(variants, o.runs);
  for (bool split : {true, false}) {
    std::printf(
        "%s\n%-10s",
        split ? "copy alone, GB/s out of a GPU (us)" : "operator with GEMM beside, us (p10-p90)",
        "CTAs");
    for (int c : o.splits) std::printf("%18d", c);
    for (size_t i = 0; i < variants.size(); ++i) {
      if (variants[i].split != split) continue;
      if (variants[i].ctas == o.splits[0]) std::printf("\n%-10s", variants[i].name.c_str());
      char cell[40];
      if (split) {
        const double us = median(times[i].copy);
        std::snprintf(cell, sizeof(cell), "%.0f (%.0f)", bytes / us * 1e-3, us);
      } else {
        std::snprintf(cell, sizeof(cell), "%.0f (%.0f-%.0f)", median(times[i].total),
                      quantile(times[i].total, 0.1), quantile(times[i].total, 0.9));
      }
      std::printf("%18s", cell);
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

int cases = 0, slower_cases = 0;  // than sequential, of all variants

void bench(const Options& o, const ShapeSpec& spec, int routing, Layout layout, int bands,
           int tile_n) {
  Shape shape = shape_of(o, spec, tile_n, o.chunk);
  shape.layout = layout;
  shape.bands_per_segment = bands;
  Bench b(shape, spec, routing, o);
  std::vector<Variant> alone;
  for (int c : {2, 4, 8, 10, 12, 16, 20, 24, 32, 48, 64, 132}) {
    alone.push_back({"split_c" + std::to_string(c), Mover::sequential, c, true});
  }
  std::vector<Variant> variants;
  for (int c : o.splits) variants.push_back({"sm", Mover::sm, c, false});
  variants.push_back({"none", Mover::none, 0, false});
  const size_t recorded = variants.size();  // what a record costs
  variants.push_back({"recorded", Mover::sm, 8, false});
  variants.push_back({"unrecorded", Mover::sm, 8, false, 0, false});
  std::printf(
      "--- M %d N %d K %d, %d experts, top-%d, %s, layout %d, bands_per_segment %d, tile_n "
      "%d, chunk %d, tail %d\n",
      spec.m, spec.n, spec.k, spec.local_experts, spec.topk, kRoutings[routing].first, int(layout),
      bands, tile_n, o.chunk, o.tail);
  if (!b.check(variants)) std::exit(1);
  const PlanSizes sizes = b.sizes();
  const auto padding = static_cast<long long>(sizes.rows - sizes.valid_rows);
  std::printf("rank 0: %lld rows and %lld of padding, %d bands, %d segments, %d chunks\n",
              static_cast<long long>(sizes.valid_rows), padding, sizes.bands, sizes.segments,
              sizes.chunks);

  const std::vector<Times> parts = b.time(alone, 12);
  size_t best = 0;
  std::printf("copy alone by CTAs:");
  for (size_t i = 0; i < alone.size(); ++i) {
    // Of equals the largest: the smallest that fills the link is at the edge.
    if (median(parts[i].copy) < 1.005 * median(parts[best].copy)) best = i;
    std::printf(" %d:%.1f", alone[i].ctas, median(parts[i].copy));
  }
  std::printf("\n");
  const int copy_ctas = alone[best].ctas;
  variants.push_back({"sequential", Mover::sequential, copy_ctas, false});
  variants.push_back({"split", Mover::sequential, copy_ctas, true});
  const std::vector<Times> times = b.time(variants, o.runs);
  const Times& sequential = times[times.size() - 2];
  const Times& split = times.back();
  const double gemm = median(split.gemm), copy = median(split.copy), scale = median(split.scale);
  const double bound = std::max(gemm, copy) + scale;
  const double exchange = median(split.exchange);
  // No copy can hide in front of the first segment.
  const double ceiling = std::min(1.0, (gemm - median(split.ready)) / copy);
  std::printf(
      "exchange %.1f gemm %.1f copy %.1f (c %d) scale %.1f bound %.1f sequential %.1f err %.1e\n",
      exchange, gemm, copy, copy_ctas, scale, bound, median(sequential.total), b.max_rel_err());
  std::FILE* const file = o.out.empty() ? nullptr : std::fopen(o.out.c_str(), "a");
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  size_t fastest = 0;  // of the first half of the runs
  double of_first_half = 0.0;
  for (size_t i = 0; i + 1 < times.size(); ++i) {
    if (i == recorded || i == recorded + 1) continue;
    const Variant& v = variants[i];
    const Times& t = times[i];
    std::vector<double> ratio;
    for (size_t j = 0; j < t.total.size(); ++j) ratio.push_back(t.total[j] / sequential.total[j]);
    const double total = median(t.total), exposed = median(t.exposed());
    const double overlap = 1.0 - exposed / copy;
    const double hidden = (gemm + copy - (total - scale)) / std::min(gemm, copy);
    const auto middle = t.total.begin() + t.total.size() / 2;
    const double first_half = median({t.total.begin(), middle});
    if (v.mover != Mover::sequential) {
      if (of_first_half == 0.0 || first_half < of_first_half) {
        fastest = i;
        of_first_half = first_half;
      }
      ++cases;
      if (median(ratio) > 1.03 && total - median(sequential.total) > 5.0) {
        ++slower_cases;
        std::printf("SLOWER THAN SEQUENTIAL: ");
      }
    }
    std::printf(
        "%-10s c %2d: %8.1f (%.1f-%.1f) of bound %.3f  of sequential %.3f (%.3f-%.3f)  "
        "exposed %.1f overlap %.3f hidden %.3f backlog %.0f drained %.0f\n",
        v.name.c_str(), v.ctas, total, quantile(t.total, 0.1), quantile(t.total, 0.9),
        total / bound, median(ratio), quantile(ratio, 0.1), quantile(ratio, 0.9), exposed, overlap,
        hidden, median(t.backlog), median(t.drained));
    if (file == nullptr) continue;
    std::fprintf(
        file,
        "{\"schema\": 1, \"bench\": \"operator\", \"time\": \"%s\", \"commit\": \"%s\", "
        "\"versions\": {\"cuda\": \"%d.%d\"}, \"gpu\": \"%s\", \"driver\": \"%s\", \"ranks\": %d, "
        "\"dtype\": \"bfloat16\", \"routing\": \"%s\", \"hot_ratio\": %.3f, \"seed\": %d, "
        "\"topk\": %d, \"gemm_m\": %d, \"gemm_n\": %d, \"gemm_k\": %d, \"local_experts\": %d, "
        "\"layout\": \"%s\", \"tile_n\": %d, \"chunk_bytes\": %d, \"local_tail_bands\": %d, "
        "\"bands_per_segment\": %d, \"mover\": \"%s\", \"num_consumer_ctas\": %d, \"runs\": %zu, "
        "\"padding_rows\": %lld, \"bands\": %d, ",
        now_text().c_str(), o.commit.c_str(), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
        properties.name, o.driver.c_str(), o.ranks, kRoutings[routing].first, b.hot_ratio(),
        o.runs * 7919 + routing, spec.topk, spec.m, spec.n, spec.k, spec.local_experts,
        layout == Layout::compact ? "compact" : "aligned", tile_n, o.chunk, o.tail, bands,
        v.name.c_str(), v.ctas, t.total.size(), padding, sizes.bands);
    std::fprintf(
        file,
        "\"exchange_us\": %.2f, \"gemm_alone_us\": %.2f, \"copy_alone_us\": %.2f, "
        "\"copy_alone_ctas\": %d, "
        "\"scale_us\": %.2f, \"sequential_us\": %.2f, \"sequential_p10_us\": %.2f, "
        "\"sequential_p90_us\": %.2f, \"overlapped_us\": %.2f, \"overlapped_p10_us\": %.2f, "
        "\"overlapped_p90_us\": %.2f, \"bound_us\": %.2f, \"of_bound\": %.4f, "
        "\"of_sequential\": %.4f, \"of_sequential_p10\": %.4f, \"of_sequential_p90\": %.4f, "
        "\"exposed_us\": %.2f, \"overlap_ratio\": %.4f, \"overlap_ceiling\": %.4f, "
        "\"hidden_share\": %.4f, "
        "\"backlog\": %.0f, \"chunks_drained\": %.0f, \"max_rel_err\": %.3e, "
        "\"bit_equal\": true}\n",
        exchange, gemm, copy, copy_ctas, scale, median(sequential.total),
        quantile(sequential.total, 0.1), quantile(sequential.total, 0.9), total,
        quantile(t.total, 0.1), quantile(t.total, 0.9), bound, total / bound, median(ratio),
        quantile(ratio, 0.1), quantile(ratio, 0.9), exposed, overlap, ceiling, hidden,
        median(t.backlog), median(t.drained), b.max_rel_err());
  }
  std::vector<double> cost;
  for (size_t j = 0; j < times[recorded].total.size(); ++j) {
    cost.push_back(times[recorded].total[j] - times[recorded + 1].total[j]);
  }
  std::printf("a record costs %.2f us (%.2f-%.2f)\n", median(cost), quantile(cost, 0.1),
              quantile(cost, 0.9));
  const std::vector<double>& all = times[fastest].total;
  const double best_us = median({all.begin() + all.size() / 2, all.end()});
  std::printf(
      "fastest of the first half of the runs: %s c %d; in the second half %.1f us, %.3f of "
      "the bound; overlap ratio's ceiling %.3f\n",
      variants[fastest].name.c_str(), variants[fastest].ctas, best_us, best_us / bound, ceiling);
  if (file != nullptr) std::fclose(file);
  std::fflush(stdout);
}

std::vector<int> list(const std::string& text) {
  std::vector<int> values;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) values.push_back(std::stoi(item));
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not share a hardware queue: one would wait for another.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  Options o;
  const bool compare_movers = argc > 1 && std::string(argv[1]) == "movers";
  if (compare_movers) {
    o.runs = 20;
    o.shapes = {0, 3};
    o.splits = {1, 2, 4, 6, 8, 12, 16};
  }
  for (int i = compare_movers ? 2 : 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t at = argument.find('=');
    const std::string key = argument.substr(0, at);
    const std::string value = at == std::string::npos ? "" : argument.substr(at + 1);
    std::map<std::string, std::vector<int>*> lists{
        {"shapes", &o.shapes}, {"routings", &o.routings}, {"layouts", &o.layouts},
        {"bands", &o.bands},   {"tiles", &o.tiles},       {"splits", &o.splits},
        {"chunks", &o.chunks}};
    if (lists.count(key) != 0) {
      *lists[key] = list(value);
    } else if (key == "out") {
      o.out = value;
    } else if (key == "commit") {
      o.commit = value;
    } else if (key == "driver") {
      o.driver = value;
    } else if (key == "ranks") {
      o.ranks = std::stoi(value);
    } else if (key == "runs") {
      o.runs = std::stoi(value);
    } else if (key == "chunk") {
      o.chunk = std::stoi(value);
    } else if (key == "tail") {
      o.tail = std::stoi(value);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argument.c_str());
      return 2;
    }
  }
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  if (o.ranks == 0) o.ranks = devices;
  if (o.ranks < 2 || o.ranks > devices) {
    std::fprintf(stderr, "ranks: got %d of %d GPUs; wanted 2 or more, one a GPU\n", o.ranks,
                 devices);
    return 2;
  }
  if (compare_movers) {
    for (int shape : o.shapes) {
      for (int chunk : o.chunks) movers(o, kShapes[shape], chunk);
    }
    return 0;
  }
  for (int shape : o.shapes) {
    for (int tile : o.tiles) {
      if (tile == 128 && kShapes[shape].n > 1024) continue;  // never the faster one there
      for (int routing : o.routings) {
        for (int layout : o.layouts) {
          for (int bands : o.bands) {
            bench(o, kShapes[shape], routing, static_cast<Layout>(layout), bands, tile);
          }
        }
      }
    }
  }
  std::printf("%d of %d cases slower than sequential\n", slower_cases, cases);
  return slower_cases == 0 ? 0 : 1;
}
