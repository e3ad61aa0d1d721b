// What a rank knows of failures in its group, and how it waits for others without missing one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "heap.h"
#include "wait.h"

namespace tilemoe::cpu {

std::string rank_name(int rank);

// Which of a rank's threads waits; only the calling one may run the application's signal handlers.
enum class Role { caller, consumer };

class Watch {
 public:
  // blocks: of all ranks. pids: of their processes, 0 = do not watch; may be empty. interrupted:
  // called about every 50 ms by waits of the calling thread; true ends the wait.
  Watch(const std::vector<Block>& blocks, int rank, const std::vector<std::int64_t>& pids,
        const std::function<bool()>& interrupted);

  // Marks the group failed in every block: peers stop waiting. This rank's first cause stays.
  void fail(const std::string& cause);
  // The earliest cause of failure that this rank can see, or "".
  std::string failure() const;
  // Throws Error if the group has failed.
  void check() const;
  // Waits until ready() and returns the number of polls; describe() says for what. Throws Error
  // when the group fails, `peer` ends or the timeout passes, which fail the group.
  template <class Ready, class Describe>
  std::int64_t wait(Ready ready, Describe describe, std::int64_t timeout_ns, int peer, Role role);

 private:
  const std::vector<Block>& blocks_;
  const int rank_;
  const std::vector<std::int64_t>& pids_;
  const std::function<bool()>& interrupted_;
  // This rank's own cause, also where the heap could not take it. Consumers fail as well, so the
  // text is behind a lock and the flag is what they look at.
  mutable std::mutex mutex_;
  std::string text_;
  std::atomic<bool> failed_here_ = false;
};

template <class Ready, class Describe>
std::int64_t Watch::wait(Ready ready, Describe describe, std::int64_t timeout_ns, int peer,
                         Role role) {
  constexpr std::int64_t kCheckNs = 50'000'000;
  Backoff backoff;
  std::int64_t started = 0, checked = 0;
  while (!ready()) {
    backoff.pause();
    const std::int64_t now = now_ns();
    if (started == 0) started = checked = now;
    check();
    const auto give_up = [&](const std::string& why) {
      fail(rank_name(rank_) + " waited " + describe() + ": " + why);
      check();
    };
    if (now - started > timeout_ns) {
      give_up("deadline of " + std::to_string(timeout_ns / 1'000'000) + " ms passed");
    }
    if (now - checked > kCheckNs) {
      checked = now;
      const std::int64_t pid = pids_.empty() ? 0 : pids_[peer];
      if (!process_alive(pid)) {
        // It may have done its part and ended: what it wrote is still there.
        if (ready()) break;
        give_up(rank_name(peer) + " (process " + std::to_string(pid) + ") has ended");
      }
      if (role == Role::caller && interrupted_()) {
        fail(rank_name(rank_) + " was interrupted while it waited " + describe());
        throw Error(ErrorKind::interrupted, "interrupted");
      }
    }
  }
  return backoff.polls();
}

}  // namespace tilemoe::cpu
