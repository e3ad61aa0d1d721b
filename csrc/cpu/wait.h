// Waiting for a flag with a deadline. Waits yield and then sleep: ranks may share a core.
#pragma once

#include <sched.h>
#include <signal.h>
#include <time.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace tilemoe::cpu {

enum class ErrorKind { rank_failure, capacity, deadline, interrupted };

// What a call ends with when it cannot end well; the bindings turn it into a Python exception.
struct Error : std::runtime_error {
  Error(ErrorKind k, const std::string& message) : std::runtime_error(message), kind(k) {}
  ErrorKind kind;
};

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Sleeps a random time at the places where threads could meet; off unless a test sets max_us.
class RandomDelay {
 public:
  RandomDelay(std::int64_t max_us, std::uint64_t seed) : max_us_(max_us), state_(seed * 2 + 1) {}
  void operator()() {
    if (max_us_ == 0) return;
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    if (state_ % 4 != 0) return;  // mostly full speed: races need both
    std::this_thread::sleep_for(std::chrono::microseconds((state_ >> 8) % (max_us_ + 1)));
  }

 private:
  std::int64_t max_us_;
  std::uint64_t state_;
};

// Backs off: a few polls at once, then the core is given away, then short sleeps.
class Backoff {
 public:
  void pause() {
    ++polls_;
    if (polls_ < 16) return;
    if (polls_ < 128) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(polls_ < 1024 ? 20 : 200));
    }
  }
  std::int64_t polls() const { return polls_; }

 private:
  std::int64_t polls_ = 0;
};

// False for a process that is gone, and for one that is dead but not yet reaped by its parent.
inline bool process_alive(std::int64_t pid) {
  if (pid <= 0) return true;  // not watched
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return true;
  const auto name_end = line.rfind(')');  // the name may hold anything
  return name_end == std::string::npos || line.compare(name_end, 3, ") Z") != 0;
}

}  // namespace tilemoe::cpu
