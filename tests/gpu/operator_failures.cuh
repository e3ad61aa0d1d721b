// Calls that end badly, and the call behind each.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>

#include "operator_checked.cuh"

namespace harness {

inline bool all_nan(const Rank& rank, const Shape& shape, int tokens) {
  std::vector<uint16_t> y(size_t(tokens) * shape.n);
  CHECK_CUDA(cudaMemcpy(y.data(), rank.y, y.size() * 2, cudaMemcpyDeviceToHost));
  return std::all_of(y.begin(), y.end(), [](uint16_t v) { return (v & 0x7fff) > 0x7f80; });
}

// What ends a call badly, and that the next call on a new heap is right. Needs two GPUs.
inline void failure_cases(uint64_t seed) {
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
  // `at_fault`: it knows by itself, and is told nothing.
  const auto expect = [&](const std::string& name, Outcome outcome, Wait wait, int rank, int peer,
                          int at_fault = -1) {
    bool good = true;
    for (int r = 0; r < 2; ++r) {
      group[r].use();
      CHECK_CUDA(cudaDeviceSynchronize());
      CHECK_CUDA(tilemoe_say_heard(&group[r].view, group[r].main));
      const ErrorRecord e = *group[r].error;
      const bool told =
          e.outcome == outcome && e.wait == wait && (rank < 0 || e.rank == rank) && e.peer == peer;
      const bool mine = (r == at_fault ? e.outcome == Outcome::ok : told) &&
                        all_nan(group[r], shape, shape.max_tokens);
      if (!mine) {
        std::printf("  rank %d: %s, nan %d\n", r, text(e).c_str(),
                    int(all_nan(group[r], shape, shape.max_tokens)));
      }
      good = good && mine;
      *group[r].error = {};
    }
    report(good, name);
    group[0].use();
  };
  const auto full_call = [&](Rank& rank) {
    group.launch_exchange(rank, routing(rank), 4);
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
  expect("a rank without routing", Outcome::rank_failure, Wait::none, -1, 1, 1);
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
  expect("too many tokens", Outcome::capacity, Wait::none, -1, 0, 0);
  good_call("too many tokens");

  // Rank 1 has no routing and does not come again. Rank 0 has queued two calls behind that one, and
  // its host hears nothing: its device ends them. Streams and graphs are made while nobody waits.
  Meeting meeting(2);
  for (bool replayed : {false, true}) {
    group.reset();
    double seconds[2];
    group.each([&](Rank& rank) {
      cudaGraphExec_t exec = nullptr;
      if (rank.rank == 0 && replayed) {
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamBeginCapture(rank.main, cudaStreamCaptureModeThreadLocal));
        full_call(rank);
        CHECK_CUDA(cudaStreamEndCapture(rank.main, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CHECK_CUDA(cudaGraphDestroy(graph));
      }
      meeting.wait();
      const auto began = std::chrono::steady_clock::now();
      rank.exchange.status = rank.rank;
      for (int i = 0; i < (rank.rank == 0 ? 3 : 1); ++i) {
        if (exec != nullptr) {
          CHECK_CUDA(cudaGraphLaunch(exec, rank.main));
        } else if (rank.rank == 0) {
          full_call(rank);
        } else {
          group.launch_exchange(rank, routing(rank), 4);
        }
      }
      rank.exchange.status = 0;
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      seconds[rank.rank] = took.count();
      meeting.wait();
      if (exec != nullptr) CHECK_CUDA(cudaGraphExecDestroy(exec));
    });
    bool good = seconds[0] < 5.0 && all_nan(group[0], shape, shape.max_tokens) &&
                group[0].error->outcome == Outcome::rank_failure && group[0].error->epoch == 1 &&
                group[1].error->outcome == Outcome::ok;
    for (int r = 0; r < 2; ++r) {
      group[r].use();
      Failure failure;
      CHECK_CUDA(cudaMemcpy(&failure, group[r].block, sizeof(failure), cudaMemcpyDeviceToHost));
      const ErrorRecord& e = failure.record;
      std::printf("  rank %d has: %s\n", r, text(e).c_str());
      good = good && failure.code != 0 && e.outcome == Outcome::out_of_step && e.rank == 0 &&
             e.peer == 1 && e.seen == 1 && e.epoch == 2;
    }
    report(good, std::string(replayed ? "replays" : "calls") + " queued behind one that failed, " +
                     std::to_string(seconds[0]) + " s of a timeout of 20");
    group.reset();
    good_call("those queued behind one that failed");
  }

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
    group.launch_exchange(rank, routing(rank), 4);
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
    group.launch_exchange(rank, routing(rank), 4);
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

  // Rank 1 ends the call from its host: nobody waits for the deadline.
  const auto start = std::chrono::steady_clock::now();
  group.each([&](Rank& rank) {
    group.launch_exchange(rank, routing(rank), 4);
    checked.fill(rank);
    if (rank.rank == 1) {
      CHECK_CUDA(cudaStreamSynchronize(rank.main));  // so rank 0 has its counts and goes on
      const ErrorRecord record{Outcome::host_failure, Wait::none, 1, 1, -1, 0, 0, 0};
      CHECK_CUDA(tilemoe_fail_group(&rank.view, &record, rank.probe));
      const CombineParams p = group.combine_params(rank, routing(rank), Mover::sm, 4);
      CHECK_CUDA(tilemoe_scale_launch(&p.scale, rank.main));
    } else {
      group.launch_combine(rank, routing(rank), Mover::sm, 4);
    }
  });
  expect("a host that fails between two launches", Outcome::host_failure, Wait::none, 1, 1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  report(took.count() < 5.0, "no wait for a deadline of 20 s: " + std::to_string(took.count()));
  group.reset();
  good_call("a host that fails between two launches");

  // As a rank whose GEMM 1 has waited in vain: it fails the group and goes on, with wrong rows.
  for (Mover mover : {Mover::sm, Mover::none, Mover::sequential}) {
    group.each([&](Rank& rank) {
      group.launch_exchange(rank, routing(rank), 4);
      checked.fill(rank);
      if (rank.rank == 1) {
        const ErrorRecord record{Outcome::deadline, Wait::dispatch, 1, 0, 3, 0, 128, 0};
        CHECK_CUDA(tilemoe_fail_group(&rank.view, &record, rank.main));
      }
      group.launch_combine(rank, routing(rank), mover, 4);
    });
    expect("rows made of what GEMM 1 did not get", Outcome::deadline, Wait::dispatch, 1, 0);
    group.reset();
  }
  good_call("rows made of what GEMM 1 did not get");

  const int32_t chunks = group[0].exchange.plan.capacity.chunks;
  group[0].exchange.plan.capacity.chunks = 1;
  group.each([&](Rank& rank) { full_call(rank); });
  expect("a plan that does not fit", Outcome::plan_overflow, Wait::none, 0, 0);
  group[0].exchange.plan.capacity.chunks = chunks;
  group.reset();
  good_call("a plan that does not fit");
  free_routings(routings);
}

// A launch that is refused behind the producer's: what runs beside it is joined all the same.
inline void refused_launch(uint64_t seed) {
  Shape shape{1, 4, 2, 512, 128, 256};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Rank& rank = checked.group[0];
  rank.use();
  std::vector<std::vector<Routing>> routings(1);
  routings[0].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
  checked.group.launch_exchange(rank, routings[0][0], 4);
  checked.fill(rank);
  std::atomic<bool> ended = false;
  const auto delay = [](void* word) {
    usleep(300'000);
    *static_cast<std::atomic<bool>*>(word) = true;
  };
  CHECK_CUDA(cudaLaunchHostFunc(rank.side, delay, &ended));  // in front of the consumer
  CombineParams p = checked.group.combine_params(rank, routings[0][0], Mover::sm, 4);
  p.scale.topk = 0;
  const cudaError_t error = tilemoe_combine_launch(&p, rank.main);
  CHECK_CUDA(cudaStreamSynchronize(rank.main));
  report(error == cudaErrorInvalidValue && ended, "a refused launch joins the consumer");
  CHECK_CUDA(cudaDeviceSynchronize());
  checked.group.reset();
  checked.call(rank, routings[0][0], Mover::sm, 4);
  report(checked.wrong("after a refused launch") == 0, "a call after a refused launch");
  free_routings(routings);
}

// A rank has claimed the failure word of a block and has died before it could raise it.
inline void half_raised_failure(uint64_t seed) {
  Shape shape{2, 4, 2, 512, 128, 256};
  std::mt19937_64 random(seed);
  Checked<__nv_bfloat16> checked(shape);
  Group& group = checked.group;
  Rank& rank = group[0];
  rank.use();
  std::vector<std::vector<Routing>> routings(2);
  routings[0].push_back(make_routing(shape, shape.max_tokens, {}, 0.0, random));
  CHECK_CUDA(cudaMemset(&reinterpret_cast<Failure*>(group[1].block)->claimed, 1, 1));
  Group::change_view(rank, [](RankView& view) { view.wait_timeout_ns = 30'000'000; });
  rank.exchange.group_timeout_ns = 30'000'000;
  group.launch_exchange(rank, routings[0][0], 4);  // alone
  CHECK_CUDA(cudaStreamSynchronize(rank.main));
  bool good = true;
  for (int r = 0; r < 2; ++r) {
    Failure failure;
    CHECK_CUDA(cudaMemcpy(&failure, group[r].block, sizeof(failure), cudaMemcpyDeviceToHost));
    const ErrorRecord& e = failure.record;
    good = good && failure.code == 1 && e.outcome == Outcome::deadline && e.wait == Wait::counts &&
           e.rank == 0 && e.peer == 1;
  }
  report(good, "a failure that a rank left half raised");
  free_routings(routings);
}

}  // namespace harness
