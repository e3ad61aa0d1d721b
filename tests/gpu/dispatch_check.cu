// Checks dispatch inside GEMM 1 with a payload that every rank can predict bit for bit: tagged by
// call, owner and token, NaN everywhere else. Each call has its own routing; each rank its own
// number of sending CTAs, grid and sleeps. Ranks are host threads over the GPUs there are. Exit
// code 0 means that all checks passed.
//   dispatch_check [SEED [PART [ITERATIONS]]]
//   PART: all (default) | stress | large | crowd (ranks share a GPU) | failures | small (for
//   compute-sanitizer)
//   dispatch_check SEED faults [SECONDS]: ends with 1 if a fault shows (for builds with FAULT=)
#include <chrono>

#include "dispatch_payload.cuh"
#include "hunt.cuh"

namespace {

using namespace front;
using harness::hunt;
using harness::kHuntTimeoutNs;

int failures = 0;

void report(bool passed, const std::string& text) {
  std::printf("%s: %s\n", text.c_str(), passed ? "ok" : "FAILED");
  std::fflush(stdout);
  failures += !passed;
}

__global__ void hog(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) __nanosleep(1000);
}

std::vector<Call> many_calls(Group& group, int count, std::mt19937_64& random) {
  const Shape& shape = group.shape();
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<Call> calls;
  for (int i = 0; i < count; ++i) {
    std::vector<double> shares(shape.experts(), 1.0);
    if (i % 4 == 1) shares[random() % shares.size()] = 3.0 * shape.experts();  // one hot expert
    if (i % 4 == 2) {                                                          // one hot rank
      const int hot = static_cast<int>(random() % shape.world);
      for (int e = 0; e < shape.local_experts; ++e) {
        shares[hot * shape.local_experts + e] = 4.0 * shape.world;
      }
    }
    if (i % 4 == 3) {
      for (double& share : shares) share = uniform(random) < 0.5 ? 1e-6 : uniform(random);
    }
    const double dropped = i % 5 == 0 ? 0.3 : 0.0;
    calls.push_back(group.make_call([&](int) {
      const int kind = static_cast<int>(random() % 8);  // no tokens, one, all, or some
      const int tokens = kind == 0   ? 0
                         : kind == 1 ? 1
                         : kind == 2 ? shape.max_tokens
                                     : 1 + static_cast<int>(random() % shape.max_tokens);
      return make_routing(shape, tokens, shares, dropped, random);
    }));
  }
  return calls;
}

std::string words(const Shape& s) {
  return "world " + std::to_string(s.world) + " layout " + std::to_string(int(s.layout)) +
         " tail " + std::to_string(s.local_tail_bands) + " n " + std::to_string(s.n) + " k " +
         std::to_string(s.k) + " tile_n " + std::to_string(s.kind.tile_n) +
         (s.kind.gated != 0 ? " gated" : "");
}

// Other routing, sending CTAs, grid and sleeps in every call, each rank its own.
template <class E>
void stress(const Shape& shape, int iterations, uint64_t seed, const std::string& name,
            bool sleep = true) {
  const auto begin = std::chrono::steady_clock::now();
  std::mt19937_64 random(seed);
  const int ranks_a_gpu = (shape.world + gpus() - 1) / gpus();
  Checked<E> checked(shape);
  Group& group = checked.group;
  std::vector<Call> calls = many_calls(group, 16, random);
  std::vector<int> turns(iterations);
  for (int& turn : turns) turn = static_cast<int>(random() % calls.size());
  const int senders[] = {0, 1, 4, 8, 131, 132, 200};
  // Where ranks share a GPU, no kernel may hold the SMs that its peers there need.
  const int most = ranks_a_gpu > 1 ? (group[0].sms - 16) / ranks_a_gpu : group[0].sms;
  const int column_step = std::max(1, static_cast<int>(int64_t{shape.n} * shape.k >> 14));
  Meeting meeting(shape.world);
  group.each([&](Rank& rank) {
    std::mt19937_64 own(seed * 97 + rank.rank);
    for (int i = 0; i < iterations; ++i) {
      How how{senders[own() % 7], most, column_step};
      const int pick = static_cast<int>(own() % 8);
      if (pick == 0) how.grid = 1;
      if (pick == 1) how.grid = 1 + static_cast<int>(own() % most);
      if (pick == 2) how.num_dispatch_ctas = how.grid;
      const uint32_t delay = sleep && own() % 2 == 0 ? 2000u << own() % 5 : 0u;
      Group::change_view(rank, [&](RankView& view) { view.random_delay_ns = delay; });
      checked.run(rank, calls[turns[i]], how);
      if (ranks_a_gpu > 1) meeting.wait();
      if (i % 32 == 31) CHECK_CUDA(cudaStreamSynchronize(rank.main));
    }
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  });
  const auto wrong = checked.wrong(name);
  for (Call& call : calls) group.free_call(call);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  char time[32];
  std::snprintf(time, sizeof(time), ", %.1f s", seconds);
  report(wrong == 0, name + ": " + words(shape) + ", " + std::to_string(iterations) + " calls, " +
                         std::to_string(wrong) + " wrong" + time);
}

// Rows of 16 bytes to 20 KiB, with sizes that are no multiple of a warp's 512 bytes.
template <class E>
void all_rows(int world, int iterations, uint64_t seed, Dtype dtype) {
  int i = 0;
  for (int k : {8, 24, 72, 256, 512, 1000, 2048, 4096, 8192, 10240}) {
    // Long lists of small rows, which share pieces, and so few large ones that all CTAs send.
    const int tokens = k > 2000 ? 300 : k > 512 ? 700 : 2500;
    Shape shape{world, 3, 2, 40, k, tokens, {dtype, 128, 0}};
    shape.layout = i % 2 == 0 ? Layout::compact : Layout::aligned;
    shape.local_tail_bands = i % 4 - 1;
    if (i % 3 == 1) shape.kind.tile_n = 256;
    if (i % 3 == 2 && k <= 512) shape.kind = {dtype, 256, 1};
    stress<E>(shape, k > 2000 ? iterations / 4 : iterations, seed + i, "rows");
    ++i;
  }
}

// Large shapes with many tiles a CTA; a sample of the output's columns, all of the room.
template <class E>
void large(const Shape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  Checked<E> checked(shape);
  Group& group = checked.group;
  std::vector<Call> calls;
  for (int hot = 0; hot < 2; ++hot) {
    calls.push_back(group.make_call([&](int) {
      std::vector<double> shares(shape.experts(), 1.0);
      for (int e = 0; hot != 0 && e < shape.local_experts; ++e) shares[e] = 3.0;
      return make_routing(shape, shape.max_tokens, hot != 0 ? shares : std::vector<double>{}, 0.0,
                          random);
    }));
  }
  int count = 0;
  for (int senders : {0, 1, 4, 8, 16, 132}) {
    for (Call& call : calls) {
      group.each([&](Rank& rank) {
        checked.run(rank, call, {senders, rank.sms, 131});
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
      });
      ++count;
    }
  }
  const auto wrong = checked.wrong("large");
  for (Call& call : calls) group.free_call(call);
  report(wrong == 0, "large: " + words(shape) + ", " + std::to_string(count) + " calls, " +
                         std::to_string(wrong) + " wrong");
}

// A kernel on a side stream that holds SMs, in front of the call on one rank and behind its launch
// on another; and a captured call.
void hogs_and_graphs(uint64_t seed) {
  const int world = std::min(4, gpus());
  Shape shape{world, 4, 2, 264, 512, 1024, {Dtype::bfloat16, 128, 0}};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  std::vector<Call> calls = many_calls(group, 6, random);
  for (int r = 0; r < world; ++r) {
    group[r].use();
    CHECK_CUDA(cudaFuncSetAttribute(hog, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  }
  int turn = 0;
  for (int held : {1, 60, 124, 131}) {
    for (int senders : {0, 4, 8, 132}) {
      const Call& call = calls[turn++ % calls.size()];
      group.each([&](Rank& rank) {
        cudaStream_t other;
        CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        const auto hold = [&] { hog<<<held, 32, 200 << 10, other>>>(2'000'000); };
        if (rank.rank % 2 == 0) hold();
        checked.run(rank, call, {senders, rank.sms});
        if (rank.rank % 2 == 1) hold();
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
        CHECK_CUDA(cudaStreamSynchronize(other));
        CHECK_CUDA(cudaStreamDestroy(other));
      });
    }
  }
  report(checked.wrong("hog") == 0, "another kernel on 1 to 131 SMs, in both host orders");

  const int replays = 200;
  group.each([&](Rank& rank) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(rank.main, cudaStreamCaptureModeThreadLocal));
    checked.run(rank, calls[0], {4, rank.sms});
    CHECK_CUDA(cudaStreamEndCapture(rank.main, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    for (int i = 0; i < replays; ++i) CHECK_CUDA(cudaGraphLaunch(exec, rank.main));
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
    CHECK_CUDA(cudaGraphExecDestroy(exec));
  });
  report(checked.wrong("graph") == 0, std::to_string(replays) + " replays of a captured call");

  // What the call leaves for its record.
  bool good = true;
  group.each([&](Rank& rank) {
    if (rank.rank == 0) CHECK_CUDA(cudaDeviceSynchronize());
  });
  for (int r = 0; r < world; ++r) {
    Rank& rank = group[r];
    rank.use();
    State state;
    CHECK_CUDA(cudaMemcpy(&state, rank.state, sizeof(state), cudaMemcpyDeviceToHost));
    Half half;
    CHECK_CUDA(
        cudaMemcpy(&half, half_of(rank.view, state.epoch), sizeof(half), cudaMemcpyDeviceToHost));
    int64_t rows = 0, remote = 0;
    for (const Origin& origin : calls[0].rows[r]) ++rows, remote += origin.owner != r;
    const CallFacts& facts = half.facts;
    const bool mine = facts.rows == rows && facts.remote_rows == remote && facts.layer == 7 &&
                      facts.tokens == calls[0].routings[r].tokens &&
                      facts.exchange_start_ns <= facts.exchange_end_ns &&
                      (rows == 0 || (half.front_start_ns >= facts.exchange_start_ns &&
                                     half.front_end_ns > half.front_start_ns));
    std::printf(
        "  rank %d: exchange and plan %.1f us, GEMM 1 from %.1f to %.1f; rows %lld (wanted %lld) "
        "remote %lld (wanted %lld)\n",
        r, (facts.exchange_end_ns - facts.exchange_start_ns) * 1e-3,
        (half.front_start_ns - facts.exchange_start_ns) * 1e-3,
        (half.front_end_ns - facts.exchange_start_ns) * 1e-3, static_cast<long long>(facts.rows),
        static_cast<long long>(rows), static_cast<long long>(facts.remote_rows),
        static_cast<long long>(remote));
    good = good && mine;
  }
  report(good, "rows, tokens and times of the call");
  for (Call& call : calls) group.free_call(call);
}

// A rank that never launches its GEMM 1: the other's ends by its deadline and says what it waited
// for, and the next call on a new heap is right. Needs two GPUs.
void failure_cases(uint64_t seed) {
  if (gpus() < 2) {
    std::printf("failure cases: skipped, they need two GPUs\n");
    return;
  }
  Shape shape{2, 4, 2, 512, 128, 512, {Dtype::bfloat16, 256, 0}};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  Call call =
      group.make_call([&](int) { return make_routing(shape, shape.max_tokens, {}, 0.0, random); });
  const auto timeout = [&](int64_t ns) {
    for (int r = 0; r < 2; ++r) {
      Group::change_view(group[r], [&](RankView& view) { view.wait_timeout_ns = ns; });
    }
  };
  const auto good_call = [&](const std::string& when) {
    timeout(20'000'000'000);
    group.each([&](Rank& rank) {
      checked.run(rank, call, {8, rank.sms});
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
    report(checked.wrong(when) == 0, "a call " + when);
  };
  good_call("at the start");
  const int64_t short_ns = 50'000'000;
  timeout(short_ns);
  const auto begin = std::chrono::steady_clock::now();
  group.each([&](Rank& rank) {
    checked.prepare(rank, call.routings[rank.rank]);
    if (rank.rank == 0) group.launch_gemm(rank, call.routings[0], 8, rank.sms);
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  });
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  bool good = seconds < 5.0;
  for (int r = 0; r < 2; ++r) {
    const ErrorRecord e = group.failure(group[r]);
    good = good && e.outcome == Outcome::deadline && e.wait == Wait::dispatch && e.rank == 0 &&
           e.band >= 0 && e.seen < e.wanted && e.wanted <= kProducerTileM;
    std::printf("  rank %d has: outcome %d wait %d rank %d slot %lld seen %llu wanted %llu\n", r,
                int(e.outcome), int(e.wait), e.rank, static_cast<long long>(e.band),
                static_cast<unsigned long long>(e.seen), static_cast<unsigned long long>(e.wanted));
  }
  report(good, "a rank without GEMM 1, ended after " + std::to_string(seconds) + " s");
  group.each([&](Rank& rank) {  // on the failed heap: no hang
    checked.run(rank, call, {8, rank.sms});
    CHECK_CUDA(cudaStreamSynchronize(rank.main));
  });
  group.reset();
  for (int r = 0; r < 2; ++r) {
    group[r].use();
    CHECK_CUDA(cudaMemset(checked.verdicts[r], 0, sizeof(Verdict)));
  }
  good_call("behind a failed one, on a new heap");

  // Status 2 of both ranks, and of one.
  for (int said : {2, 1}) {
    group.each([&](Rank& rank) {
      rank.exchange.status = rank.rank >= 2 - said ? 2 : 0;
      checked.prepare(rank, call.routings[rank.rank]);
      rank.exchange.status = 0;
      group.launch_gemm(rank, call.routings[rank.rank], 8, rank.sms);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
    });
    good = true;
    for (int r = 0; r < 2; ++r) {
      const ErrorRecord e = *group[r].error;
      good = good && e.outcome == Outcome::rank_failure && e.peer == 2 - said &&
             e.seen == static_cast<uint64_t>(said) && e.wanted == 2;
      *group[r].error = {};
      group[r].use();
      CHECK_CUDA(tilemoe_say_heard(&group[r].exchange.view, group[r].main));
    }
    report(good, std::to_string(said) + " of 2 ranks say that their layer has changed");
  }
  good_call("behind a change of layers");
  group.free_call(call);
}

// Calls in which a fault is most likely to show: a tile waits for each slot while its rows come, in
// runs so short that most slots fill at once, and reads them the moment they are counted. At full
// speed and, in a third of a rank's calls, asleep in front of each claim and signal. Returns at the
// first call that is wrong.
void find_faults(double seconds, uint64_t seed) {
  if (gpus() < 2) {
    std::fprintf(stderr, "faults: got %d GPU; wanted two or more, for rows of peers\n", gpus());
    std::exit(2);
  }
  const int world = std::min(4, gpus());
  const ProducerKind n128{Dtype::bfloat16, 128, 0};
  const std::pair<const char*, Shape> cases[] = {
      {"a tile a band, a load a tile", {world, 8, 2, 128, 64, 2000, n128}},
      {"a tile a band, all of its loads at once", {world, 16, 2, 128, 256, 1000, n128}},
      {"runs of a row or two", {world, 64, 4, 128, 512, 100, n128}},
      {"eight tiles a band", {world, 8, 2, 1024, 256, 1000, n128}}};
  for (const auto& item : cases) {
    const char* const name = item.first;
    const Shape& shape = item.second;
    std::mt19937_64 random(seed);
    Checked<__nv_bfloat16> checked(shape);
    Group& group = checked.group;
    std::vector<Call> calls;
    for (int i = 0; i < 8; ++i) {  // every token, so that there is most to send; even and uneven
      std::vector<double> shares;
      for (int e = 0; i % 2 == 1 && e < shape.experts(); ++e) shares.push_back(1 + random() % 8);
      calls.push_back(group.make_call(
          [&](int) { return make_routing(shape, shape.max_tokens, shares, 0.0, random); }));
    }
    const int senders[] = {0, 4, 8, 132};
    std::vector<std::mt19937_64> own;
    for (int r = 0; r < world; ++r) {
      own.emplace_back(seed * 97 + r);
      Group::change_view(group[r], [](RankView& view) { view.wait_timeout_ns = kHuntTimeoutNs; });
      group[r].exchange.group_timeout_ns = kHuntTimeoutNs;
    }
    const int count = hunt(
        group, seconds / std::size(cases),
        [&](Rank& rank, int i) {
          std::mt19937_64& draw = own[rank.rank];
          const uint32_t delay = draw() % 3 == 0 ? 2000u << draw() % 5 : 0u;
          Group::change_view(rank, [&](RankView& view) { view.random_delay_ns = delay; });
          checked.run(rank, calls[i * 5 % calls.size()], {senders[draw() % 4], rank.sms, 16});
        },
        [&](Rank& rank) { return checked.suspects(rank); });
    const auto wrong = checked.wrong(name);
    for (Call& call : calls) group.free_call(call);
    report(wrong == 0, std::string("faults: ") + name + ": " + words(shape) + ", " +
                           std::to_string(count) + " calls, " + std::to_string(wrong) + " wrong");
    if (wrong != 0) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not share a hardware queue: one would wait for another.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // a kernel loaded late waits for those that run
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const std::string part = argc > 2 ? argv[2] : "all";
  const int iterations = argc > 3 ? std::atoi(argv[3]) : 400;
  std::printf("seed %llu, %d GPUs, part %s\n", static_cast<unsigned long long>(seed), gpus(),
              part.c_str());
  if (part == "faults") {
    find_faults(argc > 3 ? std::atof(argv[3]) : 5.0, seed);
    return failures == 0 ? 0 : 1;
  }
  const ProducerKind n128{Dtype::bfloat16, 128, 0}, n256{Dtype::bfloat16, 256, 0};
  const bool all = part == "all";
  std::vector<int> worlds{1};
  for (int world = 2; world <= gpus(); world *= 2) worlds.push_back(world);
  if (part == "small") {
    for (int world : worlds) {
      stress<__nv_bfloat16>({world, 3, 2, 40, 72, 40, n128}, iterations, seed + world, "small",
                            false);
    }
  }
  if (all || part == "stress") {
    for (int world : worlds) {
      Shape shape{world, 8, 2, 264, 512, 2000, n128};
      stress<__nv_bfloat16>(shape, 2 * iterations, seed + 50, "full speed", false);
      stress<__nv_bfloat16>(shape, iterations, seed + 51, "sleeping");
      Shape many{world, 64, 4, 40, 256, 300, n256};  // most runs are shorter than a slot
      stress<__nv_bfloat16>(many, iterations, seed + 52, "many experts");
      all_rows<__nv_bfloat16>(world, iterations / 2, seed + 100 * world, Dtype::bfloat16);
    }
    Shape shape{worlds.back(), 5, 3, 8, 16, 300, {Dtype::float16, 128, 0}};
    stress<__half>(shape, iterations, seed + 53, "fp16");
  }
  if (all || part == "large") {
    for (int world : worlds) {
      large<__nv_bfloat16>({world, 16, 2, 2048, 8192, 2048, n256}, seed);
      large<__nv_bfloat16>({world, 16, 2, 4096, 1024, 8192, n256}, seed + 1);
      Shape small_rows{world, 16, 2, 2048, 512, 8192, n256};
      small_rows.local_tail_bands = 16;
      large<__nv_bfloat16>(small_rows, seed + 2);
    }
  }
  if (part == "crowd") {  // more ranks than GPUs: several peers to rotate over
    for (int world : {3, 4, 5}) {
      if (world > 4 * gpus()) continue;
      stress<__nv_bfloat16>({world, 3, 2, 40, 512, 400, n128}, iterations, seed + world, "crowd",
                            false);
    }
  }
  if (all || part == "failures") {
    hogs_and_graphs(seed);
    failure_cases(seed);
  }
  std::printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
