// The tile protocol with threads as ranks, for ThreadSanitizer: many calls with changing routing,
// ranks without tokens and random delays; every value is predicted, every buffer poisoned.
//
//   protocol_stress ITERATIONS WORLD SEED DELAY_US DELAY_SEED TIMEOUT_MS
//
// Prints a hash of all outputs, which depends on SEED alone. Exit 1: a wrong value or an error.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../csrc/cpu/rank.h"
#include "../csrc/planner/planner.h"

using namespace tilemoe;
using namespace tilemoe::cpu;

namespace {

constexpr int kLocalExperts = 2, kMaxTokens = 24, kMaxTopk = 3;

// What every rank draws alike for one iteration.
struct Iteration {
  int topk, width, tile_m, tile_n, bands_per_segment, local_tail_bands, chunk_rows, group_bands;
  Layout layout;
  std::vector<int> tokens;                         // of each rank
  std::vector<std::vector<std::int32_t>> experts;  // of each rank, [tokens, topk]
};

Iteration draw(std::uint64_t seed, int iteration, int world) {
  std::mt19937_64 rng(seed * 1'000'003 + iteration);
  const auto below = [&](int n) { return static_cast<int>(rng() % n); };
  Iteration it;
  const int experts = world * kLocalExperts;
  it.topk = 1 + below(std::min(kMaxTopk, experts));
  it.width = 8 + 8 * below(4);
  it.tile_m = 1 << below(4);
  it.tile_n = 5 + below(12);
  it.bands_per_segment = 1 + below(3);
  it.local_tail_bands = below(4) - 1;
  it.chunk_rows = 1 + below(6);
  it.group_bands = 1 + below(4);
  it.layout = below(2) == 0 ? Layout::compact : Layout::aligned;
  const int hot = below(3) == 0 ? below(experts) : -1;  // a third of the calls is skewed
  for (int r = 0; r < world; ++r) {
    it.tokens.push_back(below(4) == 0 ? 0 : below(kMaxTokens + 1));
    std::vector<std::int32_t> ids;
    for (int t = 0; t < it.tokens[r]; ++t) {
      std::vector<std::int32_t> mine;
      for (int k = 0; k < it.topk; ++k) {
        std::int32_t e = hot >= 0 && k == 0 ? hot : below(experts);
        for (bool again = true; again;) {
          again = false;
          for (auto other : mine) {
            if (other == e) e = (e + 1) % experts, again = true;
          }
        }
        mine.push_back(e);
      }
      for (auto& e : mine) {
        if (below(8) == 0) e = -1;  // dropped
      }
      ids.insert(ids.end(), mine.begin(), mine.end());
    }
    it.experts.push_back(std::move(ids));
  }
  return it;
}

// Small whole numbers: sums are exact in fp32, so equality is bit for bit.
float payload(int iteration, int rank, int token, int column) {
  return static_cast<float>((iteration * 7 + rank * 131 + token * 17 + column) % 1021 - 510);
}
float weight_of(int token, int k) { return static_cast<float>(1 + (token + k) % 4); }

void naive_gemm(const GemmTile& tile) {
  const auto* a = reinterpret_cast<const float*>(tile.a);
  const auto* b = reinterpret_cast<const float*>(tile.b);
  const auto* bias = reinterpret_cast<const float*>(tile.bias);
  auto* c = reinterpret_cast<float*>(tile.c);
  for (int i = 0; i < tile.m; ++i) {
    for (int j = 0; j < tile.n; ++j) {
      // Expert weights are a scaled identity, so only one product of the row counts; the rest
      // would turn a NaN of a pad row into nothing else but NaN.
      float sum = bias == nullptr ? 0.0f : bias[j];
      for (int k = 0; k < tile.k; ++k) {
        if (b[j * tile.k + k] != 0.0f) sum += a[i * tile.k + k] * b[j * tile.k + k];
      }
      c[i * tile.ldc + j] = sum;
    }
  }
}

struct Result {
  std::uint64_t hash = 14695981039346656037u;
  bool ok = true;
};

void run_rank(int rank, int world, int iterations, std::uint64_t seed, RankConfig config,
              std::int64_t delay_us, std::uint64_t delay_seed, Result* result) {
  Rank self(std::move(config));
  self.random_delay_us = delay_us;
  self.random_delay_seed = delay_seed * 1009 + rank;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> hidden, out, y, x, gate;
  try {
    for (int i = 0; i < iterations; ++i) {
      const Iteration it = draw(seed, i, world);
      const int n = it.width, tokens = it.tokens[rank];
      const std::int64_t row_bytes = n * static_cast<std::int64_t>(sizeof(float));
      self.poison();  // nobody writes before it has this rank's next count row
      Layer layer{"stress",
                  static_cast<Word>(i + 1),
                  it.topk,
                  row_bytes,
                  row_bytes,
                  {world, rank, kLocalExperts, it.tile_m, it.layout, it.bands_per_segment,
                   it.local_tail_bands, it.chunk_rows}};
      self.begin(layer, it.experts[rank].data(), tokens, nullptr);
      x.resize(tokens * n);
      gate.resize(tokens * it.topk);
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < n; ++c) x[t * n + c] = payload(i, rank, t, c);
        for (int k = 0; k < it.topk; ++k) gate[t * it.topk + k] = weight_of(t, k);
      }
      self.dispatch(reinterpret_cast<const std::byte*>(x.data()));
      const std::int64_t rows = self.plan().sizes.rows;
      hidden.assign(rows * n, nan);
      out.assign(rows * n, nan);
      CombineArgs args;
      std::vector<std::vector<float>> weights, biases;
      for (int e = 0; e < kLocalExperts; ++e) {
        self.wait_expert(e);
        const std::int64_t first = self.plan().expert_row[e], last = self.plan().expert_row[e + 1];
        std::memcpy(hidden.data() + first * n,
                    reinterpret_cast<const float*>(self.dispatch_buffer()) + first * n,
                    (last - first) * row_bytes);
        const int global = rank * kLocalExperts + e;
        auto& w = weights.emplace_back(n * n, 0.0f);
        for (int c = 0; c < n; ++c) w[c * n + c] = static_cast<float>(global + 1);
        biases.emplace_back(n, static_cast<float>(global));
      }
      for (int e = 0; e < kLocalExperts; ++e) {
        args.weight.push_back(reinterpret_cast<const std::byte*>(weights[e].data()));
        args.bias.push_back(reinterpret_cast<const std::byte*>(biases[e].data()));
      }
      args.hidden = reinterpret_cast<const std::byte*>(hidden.data());
      args.out = reinterpret_cast<std::byte*>(out.data());
      args.dtype = DType::f32;
      args.n = args.k = n;
      args.tile_n = it.tile_n;
      args.group_bands = it.group_bands;
      args.num_consumers = 1 + (i + rank) % 3;
      args.mover = static_cast<Mover>((i / 3 + rank) % 3);
      args.gemm = naive_gemm;
      self.combine(args);
      y.assign(tokens * n, nan);
      self.scale(gate.data(), reinterpret_cast<std::byte*>(y.data()), DType::f32);
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < n; ++c) {
          float want = 0.0f;
          for (int k = 0; k < it.topk; ++k) {
            const int e = it.experts[rank][t * it.topk + k];
            if (e >= 0) want += weight_of(t, k) * (payload(i, rank, t, c) * (e + 1) + e);
          }
          const float got = y[t * n + c];
          result->hash = (result->hash ^ std::bit_cast<std::uint32_t>(got)) * 1099511628211u;
          if (got != want) {
            std::fprintf(stderr, "iteration %d rank %d token %d column %d: got %g, wanted %g\n", i,
                         rank, t, c, got, want);
            result->ok = false;
            self.fail("wrong value");
            return;
          }
        }
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    result->ok = false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr,
                 "usage: protocol_stress ITERATIONS WORLD SEED DELAY_US DELAY_SEED TIMEOUT_MS\n");
    return 2;
  }
  const int iterations = std::atoi(argv[1]), world = std::atoi(argv[2]);
  const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
  const std::int64_t delay_us = std::atoll(argv[4]);
  const std::uint64_t delay_seed = std::strtoull(argv[5], nullptr, 10);
  const std::int64_t timeout_ns = std::atoll(argv[6]) * 1'000'000;

  constexpr std::int64_t kMaxRowBytes = 32 * sizeof(float);
  const PlanParams params{world, 0, kLocalExperts, 8, Layout::aligned, 1, -1, 1};
  const std::int64_t rows_in = static_cast<std::int64_t>(world) * kMaxTokens * kLocalExperts;
  const std::int64_t rows = std::max<std::int64_t>(plan_bounds(params, rows_in).rows, 64);
  const HeapShape shape{world, world * kLocalExperts, rows * kMaxRowBytes,
                        kMaxTokens * kMaxTopk * kMaxRowBytes};
  const std::size_t bytes = heap_offsets(shape).block_bytes * world;
  std::unique_ptr<std::byte, decltype(&std::free)> region(
      static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free);
  std::fill_n(region.get(), bytes, std::byte{0});

  std::vector<Result> results(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    const RankConfig config{shape, r, region.get(), kMaxTokens, timeout_ns, timeout_ns, {}};
    threads.emplace_back(run_rank, r, world, iterations, seed, config, delay_us, delay_seed,
                         &results[r]);
  }
  for (auto& thread : threads) thread.join();
  std::uint64_t hash = 0;
  bool ok = true;
  for (const Result& result : results) hash = hash * 31 + result.hash, ok = ok && result.ok;
  std::printf("%d iterations, %d ranks, hash %016llx\n", iterations, world,
              static_cast<unsigned long long>(hash));
  return ok ? 0 : 1;
}
