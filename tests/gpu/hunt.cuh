// The hunt for a planted fault: calls of a group until one has gone wrong or the time is over.
#pragma once

#include <atomic>
#include <chrono>

#include "host.cuh"

namespace harness {

constexpr int64_t kHuntTimeoutNs = 1'000'000'000;  // of waits: a fault may make one last for ever
constexpr int kHuntBatch = 32;                     // calls between two looks

// call(rank, i) queues call i of a rank whose process has all ranks of the group, one a GPU;
// wrong(rank) looks once the rank's stream is empty. All ranks stop behind the same call. Returns
// how many calls each has made.
template <class Group, class Call, class Wrong>
int hunt(Group& group, double seconds, const Call& call, const Wrong& wrong) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  Meeting meeting(group.shape().world);
  std::atomic<bool> found = false, over = false;
  std::atomic<int> calls = 0;
  group.each([&](auto& rank) {
    int i = 0;
    while (!over) {
      for (const int last = i + kHuntBatch; i < last; ++i) call(rank, i);
      CHECK_CUDA(cudaStreamSynchronize(rank.main));
      if (wrong(rank)) found = true;
      meeting.wait();
      if (rank.rank == 0) {
        over = found || Clock::now() > end;
        calls = i;
      }
      meeting.wait();
    }
  });
  return calls;
}

}  // namespace harness
