// Checks dispatch inside GEMM 1 with a payload that every rank can predict bit for bit: tagged by
// call, owner and token, NaN everywhere else. Each call has its own routing; each rank its own
// number of sending CTAs, grid and sleeps. Ranks are host threads over the GPUs there are. Exit
// code 0 means that all checks passed.
//   dispatch_check [SEED [PART [ITERATIONS]]]
//   PART: all (default) | stress | large | crowd (ranks share a GPU) | failures | small (for
//   compute-sanitizer)
#include <chrono>

#include "common/wait.cuh"
#include "dispatch_harness.cuh"

namespace {

using namespace front;

int failures = 0;

void report(bool passed, const std::string& text) {
  std::printf("%s: %s\n", text.c_str(), passed ? "ok" : "FAILED");
  std::fflush(stdout);
  failures += !passed;
}

// Small whole numbers: sums are exact in fp32, so a row of the output is known bit for bit.
__device__ inline float x_value(uint64_t epoch, int owner, int token, int column) {
  const uint64_t row = (epoch * 131 + owner) * 1000003 + token;
  return static_cast<float>(static_cast<int>(mix(row, column) % 16) - 8);
}
__device__ inline float w_value(int matrix, int column, int k) {
  return static_cast<float>(static_cast<int>(mix(matrix * 65537 + column, k) % 5) - 2);
}
template <class E>
__device__ E cast(float value);
template <>
__device__ inline __nv_bfloat16 cast<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half cast<__half>(float value) {
  return __float2half_rn(value);
}

// Of the call whose exchange comes next.
template <class E>
__global__ void fill_tokens(E* x, int tokens, int k, int rank, const State* state) {
  const uint64_t epoch = state->epoch + 1;
  const int64_t count = int64_t{tokens} * k;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = cast<E>(x_value(epoch, rank, static_cast<int>(i / k), static_cast<int>(i % k)));
  }
}

template <class E>
__global__ void fill_weights(E* b, int n, int k, int matrix) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < int64_t{n} * k;
       i += int64_t{gridDim.x} * blockDim.x) {
    b[i] = cast<E>(w_value(matrix, static_cast<int>(i / k), static_cast<int>(i % k)));
  }
}

enum Fault : int { kRoom = 0, kOutput = 1 };
struct Verdict {
  unsigned long long wrong[2];  // elements of the room and of the output
  unsigned long long first_epoch;
  Origin first;
  int first_column, first_fault;
  float seen, wanted;
};

__device__ void blame(Verdict* verdict, Fault fault, uint64_t epoch, const Origin& origin,
                      int column, float seen, float wanted) {
  if (atomicAdd(&verdict->wrong[fault], 1ull) != 0) return;
  verdict->first_epoch = epoch;
  verdict->first = origin;
  verdict->first_column = column;
  verdict->first_fault = fault;
  verdict->seen = seen;
  verdict->wanted = wanted;
}

// Block: some rows. Every element of the room, every column_step-th column of the output.
template <class E>
__global__ void verify(const E* rows, const E* d, const Origin* origins, int count, int n, int k,
                       int local_experts, int rank, bool gated, int column_step, const State* state,
                       Verdict* verdict) {
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

__global__ void hog(long long ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < static_cast<uint64_t>(ns)) __nanosleep(1000);
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
            name.c_str(), r, v.wrong[0], v.wrong[1], v.first_fault == kRoom ? "room" : "output",
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
    const bool mine = state.rows == rows && state.remote_rows == remote && state.layer == 7 &&
                      state.tokens == calls[0].routings[r].tokens &&
                      state.exchange_start_ns <= state.exchange_end_ns &&
                      (rows == 0 || (half.front_start_ns >= state.exchange_start_ns &&
                                     half.front_end_ns > half.front_start_ns));
    std::printf(
        "  rank %d: exchange and plan %.1f us, GEMM 1 from %.1f to %.1f; rows %lld (wanted %lld) "
        "remote %lld (wanted %lld)\n",
        r, (state.exchange_end_ns - state.exchange_start_ns) * 1e-3,
        (half.front_start_ns - state.exchange_start_ns) * 1e-3,
        (half.front_end_ns - state.exchange_start_ns) * 1e-3, static_cast<long long>(state.rows),
        static_cast<long long>(rows), static_cast<long long>(state.remote_rows),
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
    }
    report(good, std::to_string(said) + " of 2 ranks say that their layer has changed");
  }
  good_call("behind a change of layers");
  group.free_call(call);
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
