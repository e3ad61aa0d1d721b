// Mover::copy_engine: exact payload with random routings, ranks with other movers in the same call,
// and calls that end badly, in which no stream may stay in its wait.
#pragma once

#include <chrono>

#include "operator_checked.cuh"
#include "operator_watch.cuh"

namespace harness {

// Each rank draws its mover; sleeps in half of the calls. One rank a GPU: copies of ranks that
// share one would wait in one another's queues.
inline void engine_calls(const Shape& shape, int iterations, uint64_t seed) {
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  group.make_engines(4, 1 << 10);  // small copies, so that there are several
  std::vector<std::vector<Routing>> routings(shape.world);
  for (Rank& rank : group.ranks()) {
    rank.use();
    std::mt19937_64 random(seed * 131 + rank.rank);
    routings[rank.rank] = many_routings(shape, 24, random);
  }
  std::atomic<int> bad_records = 0;
  {
    StallWatch watch(group);
    group.each([&](Rank& rank) {
      std::mt19937_64 own(seed * 97 + rank.rank);
      const std::vector<Routing>& all = routings[rank.rank];
      for (int i = 0; i < iterations; ++i) {
        const Mover movers[] = {Mover::sm, Mover::none, Mover::copy_engine};
        const Mover mover = movers[std::min<int>(own() % 6, 2)];
        const uint32_t delay = own() % 2 == 0 ? 2000 << own() % 5 : 0;
        Group::change_view(rank, [&](RankView& view) { view.random_delay_ns = delay; });
        checked.call(rank, all[own() % all.size()], mover, mover == Mover::sm ? 4 : 0);
        if (i % 32 != 31 && i != iterations - 1) continue;
        checked.wait(rank);
        for (uint64_t epoch = i / 32 * 32 + 1; epoch <= rank.epoch; ++epoch) {
          CallRecord record;
          bad_records += !rank.record(epoch, &record);
        }
      }
    });
  }
  const auto wrong = checked.wrong("engine");
  free_routings(routings);
  report(wrong == 0 && bad_records == 0,
         "engine: world " + std::to_string(shape.world) + " layout " +
             std::to_string(int(shape.layout)) + " bands_per_segment " +
             std::to_string(shape.bands_per_segment) + " n " + std::to_string(shape.n) + ", " +
             std::to_string(iterations) + " calls, " + std::to_string(wrong) + " wrong, " +
             std::to_string(bad_records) + " records missing");
}

// A peer that does not come at all, or has sent its counts and goes no further.
inline void engine_failures(uint64_t seed) {
  constexpr int64_t kTimeoutNs = 1'000'000'000;
  constexpr double kLimitS = 5.0;
  const Shape shape{2, 4, 2, 512, 128, 256};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  group.make_engines(4, 1 << 10);
  std::vector<std::vector<Routing>> routings(2);
  for (Rank& rank : group.ranks()) {
    rank.use();
    routings[rank.rank].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
  }
  for (Wait wait : {Wait::counts, Wait::arrivals}) {
    const std::string name = wait == Wait::counts ? "a peer's counts" : "a peer's rows";
    for (Rank& rank : group.ranks()) {
      Group::change_view(rank, [](RankView& view) { view.wait_timeout_ns = kTimeoutNs; });
      rank.exchange.group_timeout_ns = kTimeoutNs;
    }
    double seconds = 0.0;
    group.each([&](Rank& rank) {
      const Routing& routing = routings[rank.rank][0];
      const auto start = std::chrono::steady_clock::now();
      if (rank.rank == 0) {
        checked.call(rank, routing, Mover::copy_engine, 0);
        checked.wait(rank);
        CHECK_CUDA(cudaDeviceSynchronize());  // the peers' streams, too
        seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      } else if (wait == Wait::arrivals) {
        group.launch_exchange(rank, routing, 0);
        CHECK_CUDA(cudaStreamSynchronize(rank.main));
      }
    });
    const ErrorRecord& e = *group[0].error;
    const bool told = e.outcome == Outcome::deadline && e.wait == wait && e.peer == 1;
    report(told && seconds < kLimitS, "engine: waits in vain for " + name + ": " + text(e) + ", " +
                                          std::to_string(seconds) + " s");
    group.reset();
    for (Rank& rank : group.ranks()) {
      rank.use();
      CHECK_CUDA(cudaMemset(rank.verdict, 0, sizeof(Verdict)));  // y was NaN, as it should be
    }
    group.each([&](Rank& rank) {
      Group::change_view(rank, [](RankView& view) { view.wait_timeout_ns = 20 * kTimeoutNs; });
      rank.exchange.group_timeout_ns = 20 * kTimeoutNs;
      checked.call(rank, routings[rank.rank][0], Mover::copy_engine, 0);
      checked.wait(rank);
    });
    report(checked.wrong("engine") == 0, "engine: the next call, after " + name);
  }
  free_routings(routings);
}

inline void engine_cases(int iterations, uint64_t seed) {
  if (gpus() < 2) {
    std::printf("engine: skipped, it needs two GPUs\n");
    return;
  }
  const ProducerKind n128{Dtype::bfloat16, 128, 0}, n256{Dtype::bfloat16, 256, 0};
  for (Layout layout : {Layout::compact, Layout::aligned}) {
    for (int bands_per_segment : {1, 3}) {
      for (const ProducerKind& kind : {n128, n256}) {
        Shape shape{gpus(), 3, 2, 520, 72, 900, kind, layout, bands_per_segment};
        shape.local_tail_bands = bands_per_segment == 1 ? -1 : 1;
        engine_calls(shape, iterations, seed++);
      }
    }
  }
  engine_calls({gpus(), 8, 2, 128, 64, 2000, n128}, iterations, seed);  // one tile a band
  engine_failures(seed);
}

}  // namespace harness
