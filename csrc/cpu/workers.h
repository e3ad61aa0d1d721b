// Consumer threads that live as long as their rank: a job starts on the first n of them.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tilemoe::cpu {

class Workers {
 public:
  Workers() = default;
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() {
    // A forked child has this object but not its threads; even destroying the condition variables
    // would wait for them.
    if (getpid() != owner_) return;
    {
      std::lock_guard lock(state_->mutex);
      state_->stop = true;
    }
    state_->wake.notify_all();
    for (auto& thread : state_->threads) thread.join();
    delete state_;
  }

  // Runs job(0), ..., job(n - 1) on n threads; the job must not throw. join() before the next.
  // Throws std::system_error if a thread cannot be made; nothing runs then.
  void start(int n, std::function<void(int)> job) {
    grow(n);
    {
      std::lock_guard lock(state_->mutex);
      state_->job = std::move(job);
      state_->wanted = state_->running = n;
      ++state_->generation;
    }
    state_->wake.notify_all();
  }

  void join() {
    std::unique_lock lock(state_->mutex);
    state_->done.wait(lock, [&] { return state_->running == 0; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    std::function<void(int)> job;
    std::uint64_t generation = 0;
    int wanted = 0, running = 0;
    bool stop = false;
  };

  // Signals that others send belong to the application's threads; those that a thread causes itself
  // stay its own.
  class SignalsBlocked {
   public:
    SignalsBlocked() {
      sigset_t set;
      sigfillset(&set);
      for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&set, own);
      pthread_sigmask(SIG_SETMASK, &set, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

   private:
    sigset_t before_;
  };

  void grow(int n) {
    const SignalsBlocked blocked;  // threads inherit the mask
    auto& threads = state_->threads;
    while (static_cast<int>(threads.size()) < n) {
      const int index = static_cast<int>(threads.size());
      threads.emplace_back(loop, state_, index, state_->generation);
    }
  }

  static void loop(State* state, int index, std::uint64_t seen) {
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->wake.wait(lock, [&] { return state->stop || state->generation != seen; });
      if (state->stop) return;
      seen = state->generation;
      if (index >= state->wanted) continue;
      const auto job = state->job;
      lock.unlock();
      job(index);
      lock.lock();
      if (--state->running == 0) state->done.notify_one();
    }
  }

  const pid_t owner_ = getpid();
  State* const state_ = new State;
};

}  // namespace tilemoe::cpu
