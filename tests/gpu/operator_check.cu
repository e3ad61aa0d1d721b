// Checks the whole operator with a payload that every rank can predict bit for bit: tagged by call,
// owner, expert and route, NaN everywhere else. Ranks are host threads over the GPUs there are.
// Exit code 0 means that all checks passed.
//   operator_check [SEED [PART [ITERATIONS]]]
//   PART: all (default) | stress | large | failures | small (for compute-sanitizer) | serial (for
//   CUDA_LAUNCH_BLOCKING=1 and CUDA_DEVICE_MAX_CONNECTIONS=1) | faults (for builds with FAULT=)
#include <cmath>

#include "common/wait.cuh"
#include "operator_harness.cuh"

namespace {

using namespace harness;

int failures = 0;

void report(bool passed, const std::string& text) {
  std::printf("%s: %s\n", text.c_str(), passed ? "ok" : "FAILED");
  std::fflush(stdout);
  failures += !passed;
}

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
      for (int e = 0; e < shape.local_experts; ++e) {
        fill_weights<<<512, 256>>>(static_cast<E*>(const_cast<void*>(rank.b[e])), shape.n, shape.k,
                                   r * shape.local_experts + e);
      }
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }
  ~Checked() {
    for (Verdict* verdict : verdicts) cudaFree(verdict);
  }

  void fill(Rank& rank) {
    const Shape& s = group.shape();
    fill_rows<<<dim3(s.local_experts * s.world, 64), 128, 0, rank.main>>>(
        reinterpret_cast<E*>(rank.a), s.k, s.world, s.local_experts, rank.rank,
        rank.exchange.counts, rank.exchange.plan.view.run_row,
        reinterpret_cast<const State*>(rank.state));
  }
  void check(Rank& rank, const Routing& routing, int token_step, int column_step) {
    const Shape& s = group.shape();
    verify<E><<<512, 256, 0, rank.main>>>(
        rank.y, routing.ids_d, routing.positions_d, routing.weights_d, routing.tokens, s.topk, s.n,
        s.k, rank.rank, token_step, column_step, reinterpret_cast<const State*>(rank.state),
        verdicts[rank.rank]);
  }
  void call(Rank& rank, const Routing& routing, Mover mover, int ctas, int token_step = 1,
            int column_step = 1) {
    group.poison(rank);
    group.launch_exchange(rank, routing);
    fill(rank);
    group.launch_combine(rank, routing, mover, ctas);
    check(rank, routing, token_step, column_step);
    CHECK_CUDA(cudaGetLastError());
  }
  // Elements that were wrong since the last look; says where.
  unsigned long long wrong(const std::string& name) {
    unsigned long long sum = 0;
    for (int r = 0; r < group.shape().world; ++r) {
      group[r].use();
      CHECK_CUDA(cudaDeviceSynchronize());
      Verdict v;
      CHECK_CUDA(cudaMemcpy(&v, verdicts[r], sizeof(v), cudaMemcpyDeviceToHost));
      CHECK_CUDA(cudaMemset(verdicts[r], 0, sizeof(v)));
      sum += v.wrong;
      if (v.wrong != 0) {
        std::printf("  %s: rank %d: %llu wrong, first in call %llu token %d column %d\n",
                    name.c_str(), r, v.wrong, v.first_epoch, v.first_token, v.first_column);
      }
      const ErrorRecord& e = *group[r].error;
      if (e.outcome != Outcome::ok) {
        std::printf(
            "  %s: rank %d: outcome %d wait %d of rank %d for %d band %lld seen %llu wanted "
            "%llu call %llu\n",
            name.c_str(), r, int(e.outcome), int(e.wait), e.rank, e.peer,
            static_cast<long long>(e.band), static_cast<unsigned long long>(e.seen),
            static_cast<unsigned long long>(e.wanted), static_cast<unsigned long long>(e.epoch));
        ++sum;
      }
    }
    return sum;
  }
};

// hot: the ratio of the hottest rank's rows to the mean, at most W.
std::vector<double> skew(const Shape& shape, int hot_rank, double hot) {
  std::vector<double> shares(shape.experts());
  const double other = shape.world > 1 ? (shape.world - hot) / (shape.world - 1) : 1.0;
  for (int e = 0; e < shape.experts(); ++e) {
    shares[e] = e / shape.local_experts == hot_rank ? hot : std::max(other, 0.0);
  }
  return shares;
}

std::vector<Routing> many_routings(const Shape& shape, int count, std::mt19937_64& random) {
  std::vector<Routing> result;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < count; ++i) {
    const int tokens = i % 6 == 5 ? 0 : 1 + static_cast<int>(random() % shape.max_tokens);
    std::vector<double> shares;
    if (i % 4 == 1) shares = skew(shape, random() % shape.world, std::min(1.6, 0.99 * shape.world));
    if (i % 4 == 2) shares = skew(shape, random() % shape.world, std::min(2.6, 0.99 * shape.world));
    if (i % 4 == 3) {
      shares.resize(shape.experts());
      for (double& share : shares) share = uniform(random) < 0.4 ? 1e-3 : uniform(random);
    }
    const double dropped = i % 5 == 0 ? 0.3 : i % 17 == 7 ? 1.0 : 0.0;
    result.push_back(make_routing(shape, tokens, shares, dropped, random));
  }
  return result;
}

void free_routings(std::vector<std::vector<Routing>>& sets) {
  for (auto& set : sets) {
    for (Routing& r : set) {
      for (void* p : {static_cast<void*>(r.ids_d), static_cast<void*>(r.positions_d),
                      static_cast<void*>(r.counts_d), static_cast<void*>(r.weights_d)}) {
        cudaFree(p);
      }
    }
  }
}

int gpus() {
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  return devices;
}

// Changing routing, split and mover in every call, each rank its own; sleeps in half of the calls.
template <class E>
void stress(Shape shape, int iterations, uint64_t seed, const char* name, bool sleep = true) {
  std::mt19937_64 random(seed);
  const int ranks_a_gpu = (shape.world + gpus() - 1) / gpus();
  // Where ranks share a GPU, CTAs that wait must leave SMs to the producers of all of them.
  if (ranks_a_gpu > 1) shape.max_scale_ctas = 4;
  Checked<E> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings;
  for (int r = 0; r < shape.world; ++r) {
    group[r].use();
    routings.push_back(many_routings(shape, 24, random));
  }
  const int sms = group[0].sms;
  const int most = ranks_a_gpu > 1 ? (sms - 20) / ranks_a_gpu : sms - 1;
  const int splits[] = {0, 1, 2, 3, 7, 8, 16, 64, 131};
  Meeting meeting(shape.world);
  const auto work = [&](Rank& rank) {
    std::mt19937_64 own(seed * 97 + rank.rank);
    for (int i = 0; i < iterations; ++i) {
      const Routing& routing = routings[rank.rank][own() % routings[rank.rank].size()];
      const int ctas = std::min(splits[own() % 9], most);
      Mover mover = Mover::sm;
      if (own() % 8 == 0) mover = ctas > 0 && own() % 2 == 0 ? Mover::sequential : Mover::none;
      const uint32_t delay = sleep && own() % 2 == 0 ? 2000 << own() % 5 : 0;
      Group::change_view(rank, [&](RankView& view) { view.random_delay_ns = delay; });
      checked.call(rank, routing, mover, ctas);
      // Streams of a GPU share copy queues: where ranks share one, no rank may queue its next call
      // before all have queued this one.
      if (ranks_a_gpu > 1) meeting.wait();
      if (i % 32 == 31) CHECK_CUDA(cudaStreamSynchronize(rank.main));
    }
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  };
  group.each(work);
  const auto wrong = checked.wrong(name);
  free_routings(routings);
  const IterationStats& s = *group[0].stats;
  report(wrong == 0 && s.epoch == iterations,
         std::string(name) + ": world " + std::to_string(shape.world) + " layout " +
             std::to_string(int(shape.layout)) + " bands_per_segment " +
             std::to_string(shape.bands_per_segment) + " n " + std::to_string(shape.n) + " k " +
             std::to_string(shape.k) + " tile_n " + std::to_string(shape.kind.tile_n) + ", " +
             std::to_string(iterations) + " calls, " + std::to_string(wrong) + " wrong");
}

// A rank that is owed nothing goes on at once and is a call ahead while its peer still reads the
// counts of this one.
void one_ahead(int calls, uint64_t seed) {
  Shape shape{2, 3, 2, 264, 72, 100, {Dtype::bfloat16, 128, 0}};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(2);
  group[0].use();
  routings[0].push_back(make_routing(shape, 0, {}, 0.0, random));
  group[1].use();
  routings[1].push_back(make_routing(shape, 64, {}, 1.1, random));
  group.each([&](Rank& rank) {
    Group::change_view(rank, [&](RankView& view) { view.wait_timeout_ns = 2'000'000'000; });
    rank.exchange.group_timeout_ns = 2'000'000'000;
    if (rank.rank == 1) rank.exchange.view.random_delay_ns = 900'000;
    for (int i = 0; i < calls; ++i) {
      group.launch_exchange(rank, routings[rank.rank][0]);
      group.launch_combine(rank, routings[rank.rank][0], Mover::sm, 2);
    }
    checked.check(rank, routings[rank.rank][0], 1, 1);
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  });
  report(checked.wrong("one ahead") == 0, "a rank one call ahead, " + std::to_string(calls));
  free_routings(routings);
}

// Every split on a large shape; a sample of tokens and columns.
template <class E>
void large(const Shape& shape, uint64_t seed, const char* name) {
  std::mt19937_64 random(seed);
  Checked<E> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(shape.world);
  for (int r = 0; r < shape.world; ++r) {
    group[r].use();
    routings[r].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
    for (double hot : {1.6, std::min(2.6, 0.99 * shape.world)}) {
      routings[r].push_back(
          make_routing(shape, shape.max_tokens, skew(shape, 0, hot), 0.0, random));
    }
  }
  const int splits[] = {0, 1, 2, 3, 7, 8, 16, 64, 131};
  group.each([&](Rank& rank) {
    for (const Routing& routing : routings[rank.rank]) {
      for (int ctas : splits) {
        checked.call(rank, routing, Mover::sm, ctas, 61, 37);
      }
      checked.call(rank, routing, Mover::sequential, 8, 61, 37);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    }
  });
  const auto wrong = checked.wrong(name);
  free_routings(routings);
  const IterationStats s = *group[0].stats;
  report(wrong == 0, std::string(name) + ": tokens " + std::to_string(shape.max_tokens) + " n " +
                         std::to_string(shape.n) + " k " + std::to_string(shape.k) + ", " +
                         std::to_string(3 * 10) + " calls, " + std::to_string(wrong) + " wrong");
}

__global__ void hog(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) __nanosleep(1000);
}

bool all_nan(const Rank& rank, const Shape& shape, int tokens) {
  std::vector<uint16_t> y(size_t(tokens) * shape.n);
  CHECK_CUDA(cudaMemcpy(y.data(), rank.y, y.size() * 2, cudaMemcpyDeviceToHost));
  return std::all_of(y.begin(), y.end(), [](uint16_t v) { return (v & 0x7fff) > 0x7f80; });
}

void hogs_and_graphs(uint64_t seed) {
  Shape shape{std::min(2, gpus()), 4, 2, 1024, 256, 1024};
  shape.chunk_bytes = 8 << 10;
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(shape.world);
  for (int r = 0; r < shape.world; ++r) {
    group[r].use();
    routings[r].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
    CHECK_CUDA(cudaFuncSetAttribute(hog, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  }
  for (int held : {8, 60, 120, 131}) {
    for (int ctas : {1, 8, 64, 131}) {
      group.each([&](Rank& rank) {
        cudaStream_t other;
        CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        hog<<<held, 32, 200 << 10, other>>>(3'000'000);
        checked.call(rank, routings[rank.rank][0], Mover::sm, ctas);
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        CHECK_CUDA(cudaStreamSynchronize(other));
        CHECK_CUDA(cudaStreamDestroy(other));
      });
    }
  }
  report(checked.wrong("hog") == 0, "another kernel on 8 to 131 SMs, splits 1 to 131");

  std::vector<cudaGraphExec_t> graphs(shape.world);
  const int replays = 200;
  group.each([&](Rank& rank) {
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(rank.main, cudaStreamCaptureModeThreadLocal));
    checked.call(rank, routings[rank.rank][0], Mover::sm, 8);
    CHECK_CUDA(cudaStreamEndCapture(rank.main, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&graphs[rank.rank], graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    for (int i = 0; i < replays; ++i) CHECK_CUDA(cudaGraphLaunch(graphs[rank.rank], rank.main));
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
    CHECK_CUDA(cudaGraphExecDestroy(graphs[rank.rank]));
  });
  report(checked.wrong("graph") == 0, std::to_string(replays) + " replays of a captured call");

  // What the stats say must add up.
  bool good = true;
  for (const auto& [mover, ctas] :
       {std::pair{Mover::none, 0}, {Mover::sm, 8}, {Mover::sequential, 8}}) {
    group.each([&, mover = mover, ctas = ctas](Rank& rank) {
      checked.call(rank, routings[rank.rank][0], mover, ctas);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
    for (int r = 0; r < shape.world; ++r) {
      const IterationStats& s = *group[r].stats;
      PlanSizes sizes;
      group[r].use();
      CHECK_CUDA(
          cudaMemcpy(&sizes, group[r].exchange.plan.sizes, sizeof(sizes), cudaMemcpyDeviceToHost));
      std::printf(
          "  mover %d rank %d: first ready %lld end %lld last put %lld last arrival %lld us; "
          "segments %lld chunks %d backlog %lld drained %lld spins %lld\n",
          int(mover), r, s.first_segment_ready / 1000ll, s.producer_end / 1000ll,
          s.last_put / 1000ll, s.last_arrival / 1000ll, static_cast<long long>(s.segments),
          sizes.chunks, static_cast<long long>(s.backlog_at_producer_end),
          static_cast<long long>(s.chunks_drained), static_cast<long long>(s.idle_spins));
      good = good && s.segments == sizes.segments && s.first_segment_ready > 0 &&
             s.first_segment_ready <= s.producer_end && s.last_put > s.first_segment_ready &&
             s.last_arrival >= s.producer_end && s.chunks_drained <= sizes.chunks &&
             (mover != Mover::none || s.chunks_drained == sizes.chunks) &&
             (mover != Mover::sequential ||
              (s.chunks_drained == 0 && s.backlog_at_producer_end == sizes.chunks));
    }
  }
  report((good || shape.world == 1) && checked.wrong("stats") == 0, "stats");
  free_routings(routings);
}

// What ends a call badly, and that the next call on a new heap is right. Needs two GPUs.
void failure_cases(uint64_t seed) {
  if (gpus() < 2) {
    std::printf("failure cases: skipped, they need two GPUs\n");
    return;
  }
  Shape shape{2, 4, 2, 512, 128, 256};
  shape.chunk_bytes = 8 << 10;
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(2);
  for (int r = 0; r < 2; ++r) {
    group[r].use();
    routings[r].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
  }
  const auto routing = [&](const Rank& rank) -> const Routing& { return routings[rank.rank][0]; };
  const auto timeouts = [&](int64_t ns) {
    for (int r = 0; r < 2; ++r) {
      Group::change_view(group[r], [&](RankView& view) { view.wait_timeout_ns = ns; });
      group[r].exchange.group_timeout_ns = ns;
    }
  };
  const auto good_call = [&](const std::string& after) {
    timeouts(20'000'000'000);
    group.each([&](Rank& rank) {
      checked.call(rank, routing(rank), Mover::sm, 4);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
    report(checked.wrong(after) == 0, "a call after " + after);
  };
  const auto expect = [&](const std::string& name, Outcome outcome, Wait wait, int rank, int peer) {
    bool good = true;
    for (int r = 0; r < 2; ++r) {
      group[r].use();
      CHECK_CUDA(cudaDeviceSynchronize());
      const ErrorRecord e = *group[r].error;
      const bool mine = e.outcome == outcome && e.wait == wait && (rank < 0 || e.rank == rank) &&
                        e.peer == peer && all_nan(group[r], shape, shape.max_tokens);
      if (!mine) {
        std::printf("  rank %d: outcome %d wait %d rank %d peer %d, nan %d\n", r, int(e.outcome),
                    int(e.wait), e.rank, e.peer, int(all_nan(group[r], shape, shape.max_tokens)));
      }
      good = good && mine;
      *group[r].error = {};
    }
    report(good, name);
    group[0].use();
  };
  const auto full_call = [&](Rank& rank) {
    group.launch_exchange(rank, routing(rank));
    checked.fill(rank);
    group.launch_combine(rank, routing(rank), Mover::sm, 4);
  };
  good_call("start");

  // The heap stays usable.
  group.each([&](Rank& rank) {
    rank.exchange.status = rank.rank == 1 ? 1 : 0;
    full_call(rank);
    rank.exchange.status = 0;
  });
  expect("a rank without routing", Outcome::rank_failure, Wait::none, -1, 1);
  good_call("a rank without routing");
  group.each([&](Rank& rank) {
    if (rank.rank == 1) rank.exchange.layer = 8;
    full_call(rank);
    rank.exchange.layer = 7;
  });
  expect("ranks in different layers", Outcome::layer_mismatch, Wait::none, -1, 1);
  group.each([&](Rank& rank) {
    ExchangeParams p = rank.exchange;
    p.own_counts = routing(rank).counts_d;
    p.tokens = rank.rank == 0 ? shape.max_tokens + 1 : 3;
    CHECK_CUDA(tilemoe_exchange_launch(&p, rank.main));
    group.launch_combine(rank, routing(rank), Mover::sm, 4);
  });
  expect("too many tokens", Outcome::capacity, Wait::none, -1, 0);
  good_call("too many tokens");

  // The heap is failed: a new one is made.
  const int64_t short_ns = 30'000'000;
  timeouts(short_ns);
  full_call(group[0]);
  CHECK_CUDA(cudaStreamSynchronize(group[0].main));
  group[1].use();
  full_call(group[1]);
  expect("a rank that does not come", Outcome::deadline, Wait::counts, 0, 1);
  group.each([&](Rank& rank) { full_call(rank); });
  expect("a call on a failed heap", Outcome::deadline, Wait::counts, 0, 1);
  group.reset();
  good_call("a rank that does not come");

  timeouts(short_ns);
  group.each([&](Rank& rank) {
    group.launch_exchange(rank, routing(rank));
    checked.fill(rank);
    if (rank.rank == 0) {  // no producer: its consumer waits in vain
      CHECK_CUDA(tilemoe_consumer_launch(&rank.combine.producer.ship, 3, rank.main));
      const CombineParams p = group.combine_params(rank, routing(rank), Mover::sm, 4);
      CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    } else {
      Group::change_view(rank, [&](RankView& view) { view.wait_timeout_ns = 100 * short_ns; });
      group.launch_combine(rank, routing(rank), Mover::sm, 4);
    }
  });
  expect("a band that does not come", Outcome::deadline, Wait::band, 0, 0);
  group.reset();
  good_call("a band that does not come");

  timeouts(short_ns);
  group.each([&](Rank& rank) {
    group.launch_exchange(rank, routing(rank));
    checked.fill(rank);
    if (rank.rank == 0) {
      group.launch_combine(rank, routing(rank), Mover::sm, 4);
    } else {  // sends nothing and waits longer than rank 0
      Group::change_view(rank, [&](RankView& view) { view.wait_timeout_ns = 100 * short_ns; });
      const CombineParams p = group.combine_params(rank, routing(rank), Mover::sm, 4);
      CHECK_CUDA(cudaMemsetAsync(rank.block + rank.view.offsets.arrivals, 0xff, 2 * 2 * kLineBytes,
                                 rank.main));
      CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    }
  });
  expect("rows that do not come", Outcome::deadline, Wait::arrivals, 0, 1);
  group.reset();
  good_call("rows that do not come");

  const int32_t chunks = group[0].exchange.plan.capacity.chunks;
  group[0].exchange.plan.capacity.chunks = 1;
  group.each([&](Rank& rank) { full_call(rank); });
  expect("a plan that does not fit", Outcome::plan_overflow, Wait::none, 0, 0);
  group[0].exchange.plan.capacity.chunks = chunks;
  group.reset();
  good_call("a plan that does not fit");
  free_routings(routings);
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not share a hardware queue: one would wait for another.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const std::string part = argc > 2 ? argv[2] : "all";
  const int iterations = argc > 3 ? std::atoi(argv[3]) : 200;
  std::printf("seed %llu, %d GPUs, part %s\n", static_cast<unsigned long long>(seed), gpus(),
              part.c_str());
  const ProducerKind n128{Dtype::bfloat16, 128, 0}, n128h{Dtype::float16, 128, 0};
  const ProducerKind n256{Dtype::bfloat16, 256, 0}, n256h{Dtype::float16, 256, 0};
  if (part == "small" || part == "serial") {
    for (int world : {1, 2}) {
      if (part == "serial" && world > gpus()) break;
      Shape shape{world, 3, 2, 264, 72, 40, n128};
      shape.chunk_bytes = 2 << 10;
      stress<__nv_bfloat16>(shape, iterations, seed + world, "small", part == "serial");
    }
  }
  if (part == "all" || part == "faults") {
    Shape shape{2, 8, 2, 1024, 512, 2000, n128};
    shape.chunk_bytes = 16 << 10;
    stress<__nv_bfloat16>(shape, iterations, seed + 50, "full speed", false);
    stress<__nv_bfloat16>(shape, iterations, seed + 51, "sleeping", true);
    if (gpus() >= 2) one_ahead(2 * iterations, seed);
    Shape thin{2, 8, 2, 128, 64, 2000, n128};  // one tile a band
    thin.chunk_bytes = 16 << 10;
    stress<__nv_bfloat16>(thin, iterations, seed + 53, "one tile a band", false);
  }
  if (part == "all" || part == "stress") {
    int i = 0;
    for (int world : {1, 2, 4, 5}) {
      for (Layout layout : {Layout::compact, Layout::aligned}) {
        for (int bands_per_segment : {1, 2, 3}) {
          Shape shape{world, 3, 2, 520, 72, 400, n128, layout, bands_per_segment};
          shape.local_tail_bands = i % 3 - 1;
          shape.chunk_bytes = 4 << 10;
          if (i % 4 == 3) {
            shape.kind = n256h;
            stress<__half>(shape, iterations, seed + i, "stress");
          } else {
            if (i % 4 == 1) shape.kind = n256;
            stress<__nv_bfloat16>(shape, iterations, seed + i, "stress");
          }
          ++i;
        }
      }
    }
    Shape narrow{2, 5, 3, 8, 16, 300, n128h};  // rows of 16 bytes
    narrow.chunk_bytes = 128;
    stress<__half>(narrow, iterations, seed + i, "narrow rows");
  }
  if ((part == "all" || part == "large") && gpus() >= 2) {
    for (Layout layout : {Layout::compact, Layout::aligned}) {
      for (int bands_per_segment : {1, 2}) {
        const auto shape = [&](int local_experts, int topk, int n, int k, int tokens,
                               ProducerKind kind) {
          return Shape{2, local_experts, topk, n, k, tokens, kind, layout, bands_per_segment};
        };
        large<__nv_bfloat16>(shape(16, 2, 8192, 2048, 4096, n256), seed, "large");
        large<__nv_bfloat16>(shape(16, 8, 4096, 1536, 1024, n256), seed, "large");
        large<__nv_bfloat16>(shape(16, 2, 1024, 4096, 4096, n128), seed, "large");
        large<__half>(shape(16, 2, 512, 2048, 4096, n128h), seed, "large");
      }
    }
  }
  if (part == "all" || part == "failures") {
    hogs_and_graphs(seed);
    failure_cases(seed);
  }
  std::printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
