// What the host side of every check and bench here needs: errors of CUDA end the program, the GPUs
// there are, host threads that meet, variants in a random order, lists of numbers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#define CHECK_CUDA(call)                                                 \
  do {                                                                   \
    const cudaError_t check_error = (call);                              \
    if (check_error != cudaSuccess) {                                    \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(check_error));                     \
      std::exit(2);                                                      \
    }                                                                    \
  } while (0)

namespace harness {

inline int gpus() {
  int devices = 0;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  return devices;
}

// Host threads that meet.
class Meeting {
 public:
  explicit Meeting(int count) : count_(count) {}
  void wait() {
    std::unique_lock lock(mutex_);
    const int turn = turn_;
    if (++here_ == count_) {
      here_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  const int count_;
  int here_ = 0, turn_ = 0;
};

// What one rank's thread does to time `count` variants: all once a round, in an order that all
// ranks share, each begun together. call(variant, number of the round), end(round): behind each
// round, of which -2 and -1 warm up.
template <class Call, class End>
void in_random_order(Meeting& meeting, int count, int rounds, const Call& call, const End& end) {
  std::mt19937_64 same(4242);
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int round = -2; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), same);
    for (int variant : order) {
      meeting.wait();
      call(variant, round + 2);
    }
    end(round);
  }
}

// "1,2,3"
inline std::vector<int> list(const std::string& text) {
  std::vector<int> values;
  std::stringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) values.push_back(std::stoi(item));
  return values;
}

}  // namespace harness
