// Checks the whole operator with a payload that every rank can predict bit for bit: tagged by call,
// owner, expert and route, NaN everywhere else. Ranks are host threads over the GPUs there are.
// Exit code 0 means that all checks passed.
//   operator_check [SEED [PART [ITERATIONS]]]
//   PART: all (default) | stress | large | engine | records | splits | failures | small (for
//   compute-sanitizer) | serial (for CUDA_LAUNCH_BLOCKING=1 and CUDA_DEVICE_MAX_CONNECTIONS=1)
//   operator_check SEED faults [SECONDS]: ends with 1 if a fault shows (for builds with FAULT=)
//   operator_check SEED processes [CALLS [LIMIT_S]]: each rank a process, also two on one GPU
//   operator_check SEED 1440 [FRACTION [bf16|fp16 [RANKS [LIMIT_S]]]]: the check matrix, or a
//   random part of it; with RANKS each rank is a process, and they share the GPUs there are
// A rank that stands still is looked at before its deadline (operator_watch.cuh); with
// CUDA_MODULE_LOADING=LAZY or another CUDA_DEVICE_MAX_CONNECTIONS one can see which of them
// matters.
#include "hunt.cuh"
#include "operator_checked.cuh"
#include "operator_engine.cuh"
#include "operator_failures.cuh"
#include "operator_matrix.cuh"
#include "operator_process.cuh"
#include "operator_watch.cuh"

namespace {

using namespace harness;

// Changing routing, split and mover in every call, each rank its own; sleeps in half of the calls.
// True if every row and every record is right. `link`: this process has one rank.
template <class E>
bool stress(Shape shape, int iterations, uint64_t seed, const char* name, bool sleep = true,
            const Link* link = nullptr) {
  const int ranks_a_gpu = link != nullptr ? 1 : (shape.world + gpus() - 1) / gpus();
  // Where ranks of a process share a GPU, CTAs that wait must leave SMs to all their producers.
  if (ranks_a_gpu > 1) shape.max_scale_ctas = 4;
  Checked<E> checked(shape, link);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(shape.world);
  for (Rank& rank : group.ranks()) {
    rank.use();
    std::mt19937_64 random(seed * 131 + rank.rank);
    routings[rank.rank] = many_routings(shape, 24, random);
  }
  const int sms = group.ranks()[0].sms;
  const int most = ranks_a_gpu > 1 ? (sms - 20) / ranks_a_gpu : sms - 1;
  const int splits[] = {0, 1, 2, 3, 7, 8, 16, 64, 131};
  Meeting meeting(shape.world);
  std::atomic<int> bad_records = 0;
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
      if (ranks_a_gpu > 1) {
        *rank.at = "meet";
        meeting.wait();
      }
      if (i % 32 != 31 && i != iterations - 1) continue;
      checked.wait(rank);
      for (uint64_t epoch = i / 32 * 32 + 1; epoch <= rank.epoch; ++epoch) {
        CallRecord record;
        bad_records += !rank.record(epoch, &record) || record.iteration.epoch != int64_t(epoch);
      }
    }
  };
  {
    StallWatch watch(group);
    group.each(work);
  }
  const auto wrong = checked.wrong(name);
  free_routings(routings);
  if (link != nullptr) return wrong == 0 && bad_records == 0;
  report(wrong == 0 && bad_records == 0,
         std::string(name) + ": world " + std::to_string(shape.world) + " layout " +
             std::to_string(int(shape.layout)) + " bands_per_segment " +
             std::to_string(shape.bands_per_segment) + " n " + std::to_string(shape.n) + " k " +
             std::to_string(shape.k) + " tile_n " + std::to_string(shape.kind.tile_n) + ", " +
             std::to_string(iterations) + " calls, " + std::to_string(wrong) + " wrong, " +
             std::to_string(bad_records) + " records missing");
  return wrong == 0 && bad_records == 0;
}

// Each rank a process: two on one GPU, which take turns there, then as many as GPUs, then twice.
void processes(int calls, int limit_s, uint64_t seed) {
  const int devices = count_gpus_apart();
  std::printf("%d GPUs\n", devices);
  if (devices == 0) std::exit(2);
  const std::pair<int, int> groups[] = {{2, 1}, {devices, devices}, {2 * devices, devices}};
  for (const auto& [world, used] : groups) {
    if (world < 2) continue;
    for (bool sleep : {false, true}) {
      const bool good = run_processes(world, used, limit_s, [&, world = world](const Link& link) {
        Shape shape{world, 3, 2, 520, 72, 400, {Dtype::bfloat16, 128, 0}};
        shape.chunk_bytes = 4 << 10;
        return stress<__nv_bfloat16>(shape, calls, seed, "processes", sleep, &link);
      });
      report(good, "processes: " + std::to_string(world) + " on " + std::to_string(used) +
                       " GPUs, " + std::to_string(calls) + " calls" + (sleep ? ", sleeping" : ""));
    }
  }
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
      group.launch_exchange(rank, routings[rank.rank][0], 2);
      group.launch_combine(rank, routings[rank.rank][0], Mover::sm, 2);
    }
    checked.check(rank, routings[rank.rank][0], 1, 1);
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  });
  report(checked.wrong("one ahead") == 0, "a rank one call ahead, " + std::to_string(calls));
  free_routings(routings);
}

// Calls in which a fault is most likely to show: a call ahead of a slow peer, and tiles of which
// each is a band, so that rows are shipped the moment they are flagged, in small chunks. At full
// speed and, in a third of a rank's calls, with sleeps in every role. Returns at the first call
// that is wrong.
void find_faults(double seconds, uint64_t seed) {
  if (gpus() < 2) {
    std::fprintf(stderr, "faults: got %d GPU; wanted two or more, for rows of peers\n", gpus());
    std::exit(2);
  }
  one_ahead(100, seed);
  if (failures > 0) return;
  const int world = std::min(4, gpus());
  const ProducerKind n128{Dtype::bfloat16, 128, 0};
  const std::pair<const char*, Shape> cases[] = {
      {"a tile a band", {world, 8, 2, 128, 64, 2000, n128}},
      {"four tiles a band", {world, 8, 2, 512, 128, 1000, n128}}};
  const int splits[] = {0, 1, 2, 3, 7, 8, 16, 64, 131};
  for (const auto& item : cases) {
    const char* const name = item.first;
    Shape shape = item.second;
    shape.chunk_bytes = 8 << 10;
    Checked<__nv_bfloat16> checked(shape);
    Group& group = checked.group;
    std::vector<std::vector<Routing>> routings(world);
    std::vector<std::mt19937_64> own;
    for (Rank& rank : group.ranks()) {
      rank.use();
      std::mt19937_64 random(seed * 131 + rank.rank);
      routings[rank.rank] = many_routings(shape, 24, random);
      own.emplace_back(seed * 97 + rank.rank);
      Group::change_view(rank, [](RankView& view) { view.wait_timeout_ns = kHuntTimeoutNs; });
      rank.exchange.group_timeout_ns = kHuntTimeoutNs;
    }
    const int count = hunt(
        group, seconds / std::size(cases),
        [&](Rank& rank, int) {
          std::mt19937_64& draw = own[rank.rank];
          const std::vector<Routing>& all = routings[rank.rank];
          const int ctas = splits[draw() % 9];
          Mover mover = Mover::sm;
          if (draw() % 8 == 0) {
            mover = ctas > 0 && draw() % 2 == 0 ? Mover::sequential : Mover::none;
          }
          const uint32_t delay = draw() % 3 == 0 ? 2000u << draw() % 5 : 0u;
          Group::change_view(rank, [&](RankView& view) { view.random_delay_ns = delay; });
          // A column of each vector of 16 bytes that a consumer stores.
          checked.call(rank, all[draw() % all.size()], mover, ctas, 1, 8);
        },
        [&](Rank& rank) { return checked.suspects(rank); });
    const auto wrong = checked.wrong(name);
    free_routings(routings);
    report(wrong == 0, std::string("faults: ") + name + ", world " + std::to_string(world) + ", " +
                           std::to_string(count) + " calls, " + std::to_string(wrong) + " wrong");
    if (wrong != 0) return;
  }
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
    for (double hot : {1.6, std::min(2.6, 0.95 * shape.world)}) {
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
  report(wrong == 0, std::string(name) + ": tokens " + std::to_string(shape.max_tokens) + " n " +
                         std::to_string(shape.n) + " k " + std::to_string(shape.k) + ", " +
                         std::to_string(3 * 10) + " calls, " + std::to_string(wrong) + " wrong");
}

__global__ void hog(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) __nanosleep(1000);
}

void hogs_and_graphs(uint64_t seed) {
  Shape shape{gpus(), 4, 2, 1024, 256, 1024};
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
  Meeting meeting(shape.world);  // streams and graphs are made and ended while no kernel waits
  for (int held : {8, 60, 120, 131}) {
    for (int ctas : {1, 8, 64, 131}) {
      group.each([&](Rank& rank) {
        cudaStream_t other;
        CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        meeting.wait();
        hog<<<held, 32, 200 << 10, other>>>(3'000'000);
        checked.call(rank, routings[rank.rank][0], Mover::sm, ctas);
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        CHECK_CUDA(cudaStreamSynchronize(other));
        meeting.wait();
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
    meeting.wait();
    for (int i = 0; i < replays; ++i) CHECK_CUDA(cudaGraphLaunch(graphs[rank.rank], rank.main));
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
    meeting.wait();
    CHECK_CUDA(cudaGraphExecDestroy(graphs[rank.rank]));
  });
  report(checked.wrong("graph") == 0, std::to_string(replays) + " replays of a captured call");

  free_routings(routings);
}

// What a record says must agree with the plan and with itself.
void records(uint64_t seed) {
  Shape shape{gpus(), 4, 2, 1024, 256, 1024};
  shape.chunk_bytes = 8 << 10;
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(shape.world);
  for (int r = 0; r < shape.world; ++r) {
    group[r].use();
    routings[r].push_back(make_routing(shape, shape.max_tokens - 100 * r, {}, 0.1, random));
  }
  bool good = true;
  const int calls = kCallRecords + 20;  // round the ring
  group.each([&](Rank& rank) {
    for (int i = 0; i < calls; ++i) {
      rank.exchange.behind_router = i % 2;  // what poisons began when the call before had ended
      checked.call(rank, routings[rank.rank][0], Mover::sm, 8);
    }
    rank.exchange.behind_router = 0;
    checked.wait(rank);
  });
  for (Rank& rank : group.ranks()) {
    CallRecord record;
    for (int epoch = calls - kCallRecords + 1; epoch <= calls; ++epoch) {
      const bool there = rank.record(epoch, &record);
      const LayerTimes& t = record.times;
      const bool right = record.iteration.epoch == epoch && record.layer == rank.exchange.layer &&
                         record.tokens == routings[rank.rank][0].tokens && record.rows > 0 &&
                         record.consumer_ctas == 8 && 0 < t.exchange_end &&
                         t.exchange_end <= t.down_start && t.down_start < t.down_end &&
                         t.down_end <= t.last_arrival && t.last_arrival <= t.scale_end;
      good = good && there && right;
    }
    good = good && !rank.record(calls - kCallRecords, &record);  // overwritten
  }
  report(good, "records: the newest " + std::to_string(kCallRecords) + " of " +
                   std::to_string(calls) + " calls are there");
  const std::pair<Mover, int> calls_of[] = {
      {Mover::none, 0}, {Mover::sm, 8}, {Mover::sequential, 8}};
  for (const auto& kind : calls_of) {
    const Mover mover = kind.first;
    const int ctas = kind.second;
    group.each([&](Rank& rank) {
      checked.call(rank, routings[rank.rank][0], mover, ctas);
      checked.wait(rank);
    });
    for (Rank& rank : group.ranks()) {
      std::vector<int32_t> counts;
      for (const auto& of_rank : routings) {
        counts.insert(counts.end(), of_rank[0].counts.begin(), of_rank[0].counts.end());
      }
      const PlanSizes sizes = plan_sizes(rank.exchange.plan.params, counts.data());
      CallRecord r{};
      const bool there = rank.record(rank.epoch, &r);
      const IterationStats& s = r.iteration;
      const LayerTimes& t = r.times;
      int64_t rows = 0, remote = 0;
      for (int source = 0; source < shape.world; ++source) {
        for (int e = 0; e < shape.local_experts; ++e) {
          const int64_t count = routings[source][0].counts[rank.rank * shape.local_experts + e];
          rows += count;
          if (source != rank.rank) remote += count;
        }
      }
      std::printf(
          "  mover %d rank %d: us: exchange end %lld, down %lld to %lld, last arrival %lld, scale "
          "end %lld; first ready %lld last put %lld; segments %lld chunks %d backlog %lld drained "
          "%lld spins %lld\n",
          int(mover), rank.rank, t.exchange_end / 1000ll, t.down_start / 1000ll,
          t.down_end / 1000ll, t.last_arrival / 1000ll, t.scale_end / 1000ll,
          s.first_segment_ready / 1000ll, s.last_put / 1000ll, static_cast<long long>(s.segments),
          sizes.chunks, static_cast<long long>(s.backlog_at_producer_end),
          static_cast<long long>(s.chunks_drained), static_cast<long long>(s.idle_spins));
      const auto want = [&](bool holds, const char* what) {
        if (!holds) std::printf("  mover %d rank %d: not so: %s\n", int(mover), rank.rank, what);
        good = good && holds;
      };
      want(there, "the record of the call is there");
      want(s.epoch == static_cast<int64_t>(rank.epoch), "iteration.epoch is the call's");
      want(r.layer == rank.exchange.layer, "layer is the exchange's");
      want(r.tokens == routings[rank.rank][0].tokens, "tokens are this rank's");
      want(r.rows == rows && rows == sizes.valid_rows, "rows are those of C");
      want(r.remote_rows == remote, "remote_rows are those of C");
      want(r.consumer_ctas == ctas, "consumer_ctas are those asked for");
      want(s.segments == sizes.segments, "segments are the plan's");
      want(t.router_start == 0 && t.front_start == 0 && t.front_end == 0,
           "times of kernels that did not run are 0");
      want(0 < t.exchange_end && t.exchange_end <= t.down_start && t.down_start < t.down_end &&
               t.down_end <= t.last_arrival && t.last_arrival <= t.scale_end,
           "exchange, GEMM 2, arrival and scale follow one another");
      want(s.producer_end == t.down_end - t.down_start &&
               s.last_arrival == t.last_arrival - t.down_start,
           "both clocks agree");
      want(s.chunks_drained <= sizes.chunks, "no more is drained than there is");
      if (sizes.segments == 0) continue;
      want(0 < s.first_segment_ready && s.first_segment_ready <= s.producer_end &&
               s.first_segment_ready < s.last_put,
           "the first segment is ready in time");
      if (mover == Mover::none) want(s.chunks_drained == sizes.chunks, "the drain ships all");
      if (mover == Mover::sequential) {
        want(s.chunks_drained == 0 && s.backlog_at_producer_end == sizes.chunks,
             "nothing is shipped beside the producer");
      }
    }
  }
  report(good && checked.wrong("records") == 0, "records");
  free_routings(routings);
}

// One captured call, replayed with another split each time (State::consumer_ctas).
void splits_of_a_graph(uint64_t seed) {
  Shape shape{gpus(), 4, 2, 1024, 256, 1024};
  shape.chunk_bytes = 8 << 10;
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<std::vector<Routing>> routings(shape.world);
  for (int r = 0; r < shape.world; ++r) {
    group[r].use();
    routings[r].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
  }
  constexpr int kMost = 24;
  const int splits[] = {0, 1, 2, 24, 3, 8, 0, 24, 23, 5, 12, 1};
  std::atomic<int> bad = 0;
  Meeting meeting(shape.world);                   // as above
  for (Mover mover : {Mover::sm, Mover::none}) {  // none: mover sm with a split of 0
    group.each([&](Rank& rank) {
      rank.exchange.wanted_ctas = rank.wanted_ctas;
      rank.combine.device_split = 1;
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      uint64_t epoch = rank.epoch;
      CHECK_CUDA(cudaStreamBeginCapture(rank.main, cudaStreamCaptureModeThreadLocal));
      checked.call(rank, routings[rank.rank][0], Mover::sm, kMost);
      CHECK_CUDA(cudaStreamEndCapture(rank.main, &graph));
      CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
      CHECK_CUDA(cudaGraphDestroy(graph));
      meeting.wait();
      std::mt19937_64 own(seed + rank.rank);
      for (int i = 0; i < 120; ++i) {
        const int ctas = mover == Mover::none ? 0 : splits[own() % 12];
        *const_cast<volatile int32_t*>(rank.wanted_ctas) = ctas;
        CHECK_CUDA(cudaGraphLaunch(exec, rank.main));
        checked.wait(rank);
        CallRecord record;
        const bool there = rank.record(++epoch, &record);
        if (!there || record.consumer_ctas != ctas ||
            (ctas == 0 && shape.world > 1 && record.iteration.chunks_drained == 0)) {
          std::printf("  rank %d replay %d: record %d split %d wanted %d drained %lld\n", rank.rank,
                      i, int(there), record.consumer_ctas, ctas,
                      static_cast<long long>(record.iteration.chunks_drained));
          ++bad;
        }
      }
      rank.epoch = epoch;
      meeting.wait();
      CHECK_CUDA(cudaGraphExecDestroy(exec));
      meeting.wait();
      // Without a graph, and without a wait between calls: the word of the call counts.
      rank.exchange.wanted_ctas = nullptr;
      for (int i = 0; i < 60; ++i) {
        const int ctas = mover == Mover::none ? 0 : splits[own() % 12];
        group.poison(rank);
        group.launch_exchange(rank, routings[rank.rank][0], ctas);
        checked.fill(rank);
        group.launch_combine(rank, routings[rank.rank][0], Mover::sm, kMost);
        checked.check(rank, routings[rank.rank][0], 1, 1);
      }
      checked.wait(rank);
      rank.combine.device_split = 0;
    });
    const std::string name = mover == Mover::sm ? "splits 0 to 24" : "a split of 0";
    report(checked.wrong(name) == 0 && bad == 0, "one captured call, replayed with " + name);
  }
  free_routings(routings);
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not share a hardware queue, and no kernel may be loaded
  // while one waits: either would make a rank wait for the one that waits for it.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const std::string part = argc > 2 ? argv[2] : "all";
  const int iterations = argc > 3 ? std::atoi(argv[3]) : 200;
  std::printf("seed %llu, part %s\n", static_cast<unsigned long long>(seed), part.c_str());
  if (part == "processes") {  // first: CUDA must be untouched
    processes(iterations, argc > 4 ? std::atoi(argv[4]) : 120, seed);
    std::printf("%d checks failed\n", failures);
    return failures == 0 ? 0 : 1;
  }
  if (part == "1440") {
    const double fraction = argc > 3 ? std::atof(argv[3]) : 1.0;
    const bool half = argc > 4 && std::string(argv[4]) == "fp16";
    const auto matrix = [&](int world, const Link* link) {
      return half ? check_matrix<__half>(world, seed, fraction, link)
                  : check_matrix<__nv_bfloat16>(world, seed, fraction, link);
    };
    if (argc <= 5) return matrix(gpus(), nullptr) ? 0 : 1;
    const int world = std::atoi(argv[5]), devices = count_gpus_apart();
    if (world < 1 || world > kMaxWorld || devices < 1) {
      std::fprintf(stderr, "1440: got %d ranks and %d GPUs; wanted 1 to %d ranks and a GPU\n",
                   world, devices, kMaxWorld);
      return 2;
    }
    std::printf("%d processes, %d GPUs\n", world, devices);
    return run_processes(world, devices, argc > 6 ? std::atoi(argv[6]) : 600,
                         [&](const Link& link) { return matrix(world, &link); })
               ? 0
               : 1;
  }
  std::printf("%d GPUs\n", gpus());
  if (part == "faults") {
    find_faults(argc > 3 ? std::atof(argv[3]) : 5.0, seed);
    return failures == 0 ? 0 : 1;
  }
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
  if (part == "all") {
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
    for (int world : {1, 2, 4, 5, 8}) {
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
          return Shape{gpus(), local_experts, topk, n, k, tokens, kind, layout, bands_per_segment};
        };
        large<__nv_bfloat16>(shape(16, 2, 8192, 2048, 4096, n256), seed, "large");
        large<__nv_bfloat16>(shape(16, 8, 4096, 1536, 1024, n256), seed, "large");
        large<__nv_bfloat16>(shape(16, 2, 1024, 4096, 4096, n128), seed, "large");
        large<__half>(shape(16, 2, 512, 2048, 4096, n128h), seed, "large");
      }
    }
  }
  if (part == "all" || part == "engine") engine_cases(iterations, seed);
  if (part == "all" || part == "records") records(seed);
  if (part == "all" || part == "splits") splits_of_a_graph(seed);
  if (part == "all" || part == "failures") {
    hogs_and_graphs(seed);
    refused_launch(seed);
    half_raised_failure(seed);
    failure_cases(seed);
  }
  std::printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
