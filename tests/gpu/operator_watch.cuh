// Says why a group of ranks in one process stands still, before the deadlines of its kernels pass.
#pragma once

#include <chrono>

#include "common/wait.cuh"
#include "operator_harness.cuh"

namespace harness {

// What a rank's memory says while its kernels wait. Page-locked.
struct Glimpse {
  uint64_t epoch;
  uint32_t tiles_claimed, tiles_flagged, chunks_claimed, chunks_shipped, chunks;
  uint64_t ready[2][kMaxWorld];  // count rows here, by half
  uint64_t arrived[kMaxWorld];
  uint32_t done;
};

static __global__ void look(RankView view, Glimpse* out) {
  const volatile State& state = state_of(view);
  const uint64_t epoch = state.epoch;
  Half& half = half_at(view, epoch);
  out->epoch = epoch;
  out->chunks = state.chunks;
  out->tiles_claimed = read_count(&half.tile_claim);
  out->tiles_flagged = read_count(&half.tiles_flagged);
  out->chunks_claimed = read_count(&half.chunk_claim);
  out->chunks_shipped = read_count(&half.chunks_shipped);
  for (int s = 0; s < view.world; ++s) {
    for (int i = 0; i < 2; ++i) {
      const int64_t row = int64_t{i} * view.world + s;
      out->ready[i][s] = read_system(reinterpret_cast<const uint64_t*>(
          view.blocks[view.rank] + view.offsets.counts + row * view.offsets.count_row_bytes));
    }
    out->arrived[s] = read_system(arrival_word(view, view.rank, epoch, s));
  }
  fence_system();
  *const_cast<volatile uint32_t*>(&out->done) = 1;
}

class StallWatch {
 public:
  explicit StallWatch(Group& group, double limit_s = 5.0) : group_(group), limit_s_(limit_s) {
    for (Rank& rank : group_.ranks()) {
      rank.use();
      Glimpse* glimpse;
      CHECK_CUDA(cudaHostAlloc(&glimpse, sizeof(Glimpse), cudaHostAllocPortable));
      *glimpse = {};
      glimpses_.push_back(glimpse);
      look<<<1, 1, 0, rank.probe>>>(rank.view, glimpse);  // loaded before anything waits
      CHECK_CUDA(cudaStreamSynchronize(rank.probe));
    }
    thread_ = std::thread([this] { run(); });
  }
  ~StallWatch() {
    stop_ = true;
    thread_.join();
    for (Glimpse* glimpse : glimpses_) cudaFreeHost(glimpse);
  }
  StallWatch(const StallWatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  static double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  long long progress() {
    long long sum = 0;
    for (Rank& rank : group_.ranks()) {
      sum = sum * 31 + *rank.calls * 7 + reinterpret_cast<long long>(rank.at->load());
    }
    return sum;
  }

  void run() {
    long long last = progress();
    Clock::time_point start = Clock::now();
    bool told = false;
    while (!stop_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (const long long now = progress(); now != last) {
        last = now;
        start = Clock::now();
        told = false;
      } else if (!told && since(start) > limit_s_) {
        told = true;
        tell();
      }
    }
  }

  // In the order of what cannot block: the host threads, then the driver, then the GPU.
  void tell() {
    const auto setting = [](const char* name) {
      const char* const value = std::getenv(name);
      return value == nullptr ? "(not set)" : value;
    };
    std::printf(
        "  STALL: no rank has gone on for %.0f s; CUDA_DEVICE_MAX_CONNECTIONS %s, "
        "CUDA_MODULE_LOADING %s, %zu streams in this process\n",
        limit_s_, setting("CUDA_DEVICE_MAX_CONNECTIONS"), setting("CUDA_MODULE_LOADING"),
        3 * group_.ranks().size());
    for (Rank& rank : group_.ranks()) {
      std::printf("    rank %d on GPU %d: host at '%s' of call %lld\n", rank.rank, rank.device,
                  rank.at->load(), rank.calls->load());
    }
    std::printf(
        "    asking the driver; if nothing follows, a launch holds its lock: a module is "
        "being loaded while a kernel waits\n");
    std::fflush(stdout);
    static const char* const names[kStages] = {"poison", "exchange", "fill", "combine", "check"};
    for (Rank& rank : group_.ranks()) {
      rank.use();
      std::printf("    rank %d on the GPU: ", rank.rank);
      for (int i = 0; i < kStages; ++i) {
        std::printf("%s %s, ", names[i],
                    cudaEventQuery(rank.stage[i]) == cudaSuccess ? "done" : "OPEN");
      }
      std::printf("main stream %s, side %s\n",
                  cudaStreamQuery(rank.main) == cudaSuccess ? "idle" : "busy",
                  cudaStreamQuery(rank.side) == cudaSuccess ? "idle" : "busy");
      std::fflush(stdout);
    }
    for (size_t i = 0; i < glimpses_.size(); ++i) {
      Rank& rank = group_.ranks()[i];
      rank.use();
      glimpses_[i]->done = 0;
      look<<<1, 1, 0, rank.probe>>>(rank.view, glimpses_[i]);
    }
    std::this_thread::sleep_for(std::chrono::seconds(2));
    for (size_t i = 0; i < glimpses_.size(); ++i) tell_glimpse(group_.ranks()[i], *glimpses_[i]);
    std::printf(
        "    A rank whose first OPEN stage has only done ones in front of it, while others' "
        "looks ran on its GPU, waits behind another stream in a hardware queue. Where no "
        "look ran, all SMs are held.\n");
    std::fflush(stdout);
  }

  void tell_glimpse(const Rank& rank, const Glimpse& glimpse) {
    if (*const_cast<const volatile uint32_t*>(&glimpse.done) == 0) {
      std::printf("    rank %d: a kernel of one thread on a stream of its own did not run\n",
                  rank.rank);
      return;
    }
    std::printf(
        "    rank %d: epoch %llu, tiles claimed %u flagged %u, chunks %u claimed %u shipped "
        "%u; count rows of",
        rank.rank, static_cast<unsigned long long>(glimpse.epoch), glimpse.tiles_claimed,
        glimpse.tiles_flagged, glimpse.chunks, glimpse.chunks_claimed, glimpse.chunks_shipped);
    for (int s = 0; s < rank.view.world; ++s) {
      std::printf(" %llu|%llu", static_cast<unsigned long long>(glimpse.ready[0][s]),
                  static_cast<unsigned long long>(glimpse.ready[1][s]));
    }
    std::printf("; rows arrived");
    for (int s = 0; s < rank.view.world; ++s) {
      std::printf(" %llu", static_cast<unsigned long long>(glimpse.arrived[s]));
    }
    std::printf("\n");
  }

  Group& group_;
  const double limit_s_;
  std::vector<Glimpse*> glimpses_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace harness
