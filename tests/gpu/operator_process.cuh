// Ranks in processes of their own, their blocks mapped through cudaIpc: two on one GPU take turns.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <new>

#include "operator_harness.cuh"

namespace harness {

// Memory of parent and children.
struct Meeters {
  std::atomic<int> here = 0, turn = 0;
  cudaIpcMemHandle_t blocks[kMaxWorld];
};

// GPUs of this host, counted by a child: a process that has touched CUDA cannot fork ranks.
inline int count_gpus_apart() {
  const pid_t child = fork();
  if (child == 0) {
    int devices = 0;
    _exit(cudaGetDeviceCount(&devices) == cudaSuccess ? std::min(devices, 127) : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

class ProcessRank {
 public:
  ProcessRank(Meeters* meeters, int rank, int world, int devices, int limit_s)
      : meeters_(meeters),
        world_(world),
        limit_s_(limit_s),
        link{rank, devices, [this] { meet(); }, [this](std::byte* mine) { return exchange(mine); },
             [this] { leave(); }} {}
  ProcessRank(const ProcessRank&) = delete;

 private:
  Meeters* const meeters_;
  const int world_, limit_s_;
  std::vector<void*> mapped_;

 public:
  const Link link;

 private:
  void meet() {
    const int turn = meeters_->turn;
    if (++meeters_->here == world_) {
      meeters_->here = 0;
      ++meeters_->turn;
      return;
    }
    for (int64_t us = 0; meeters_->turn == turn; us += 200) {
      usleep(200);
      if (us > int64_t{limit_s_} * 1'000'000) {
        std::fprintf(stderr, "rank %d: the others do not come\n", link.rank);
        _exit(3);
      }
    }
  }
  std::vector<std::byte*> exchange(std::byte* mine) {
    CHECK_CUDA(cudaIpcGetMemHandle(&meeters_->blocks[link.rank], mine));
    meet();
    std::vector<std::byte*> blocks(world_, mine);
    for (int r = 0; r < world_; ++r) {
      if (r == link.rank) continue;
      void* mapped = nullptr;
      CHECK_CUDA(
          cudaIpcOpenMemHandle(&mapped, meeters_->blocks[r], cudaIpcMemLazyEnablePeerAccess));
      mapped_.push_back(mapped);
      blocks[r] = static_cast<std::byte*>(mapped);
    }
    meet();
    return blocks;
  }
  void leave() {
    meet();
    for (void* block : mapped_) CHECK_CUDA(cudaIpcCloseMemHandle(block));
    mapped_.clear();
    meet();  // and only then a rank may free its own
  }
};

// work(link) in `world` processes over the first `devices` GPUs; true if it is in all of them,
// within `limit_s` seconds. The processes end with this call. CUDA must be untouched here.
inline bool run_processes(int world, int devices, int limit_s,
                          const std::function<bool(const Link&)>& work) {
  void* const memory =
      mmap(nullptr, sizeof(Meeters), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return false;
  auto* const meeters = new (memory) Meeters;
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int r = 0; r < world; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      bool good = false;
      {
        ProcessRank rank(meeters, r, world, devices, limit_s);
        good = work(rank.link);
      }
      std::fflush(stdout);
      _exit(good ? 0 : 1);
    }
    if (child < 0) {
      std::perror("fork");
      std::exit(2);
    }
    children.push_back(child);
  }
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline = Clock::now() + std::chrono::seconds(limit_s);
  bool good = true;
  for (int left = world; left > 0;) {
    usleep(10'000);
    const bool late = Clock::now() > deadline;
    for (int r = 0; r < world; ++r) {
      if (children[r] <= 0) continue;
      if (late) kill(children[r], SIGKILL);
      int status = 0;
      const pid_t ended = waitpid(children[r], &status, late ? 0 : WNOHANG);
      if (ended == 0) continue;
      children[r] = 0;
      --left;
      if (ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
      std::printf("  rank %d: %s\n", r, late ? "killed, it did not end in time" : "failed");
      // The others have deadlines of their own, but need not be waited for long.
      if (good) deadline = std::min(deadline, Clock::now() + std::chrono::seconds(10));
      good = false;
    }
  }
  munmap(memory, sizeof(Meeters));
  return good;
}

}  // namespace harness
