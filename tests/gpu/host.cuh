// What the host side of every check and bench here needs: errors of CUDA end the program, the GPUs
// there are, and host threads that meet.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>

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

}  // namespace harness
