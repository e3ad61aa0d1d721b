// Consumer threads that live as long as their rank: a job starts on the first n of them.
#pragma once

#include <pthread.h>
#include <signal.h>

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
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // Runs job(0), ..., job(n - 1) on n threads; the job must not throw. join() before the next.
  void start(int n, std::function<void(int)> job) {
    grow(n);
    {
      std::lock_guard lock(mutex_);
      job_ = std::move(job);
      wanted_ = running_ = n;
      ++generation_;
    }
    wake_.notify_all();
  }

  void join() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  void grow(int n) {
    // Signals belong to the application's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (static_cast<int>(threads_.size()) < n) {
      const int index = static_cast<int>(threads_.size());
      threads_.emplace_back([this, index, seen = generation_] { loop(index, seen); });
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void loop(int index, std::uint64_t seen) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      if (index >= wanted_) continue;
      const auto job = job_;
      lock.unlock();
      job(index);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  std::function<void(int)> job_;
  std::uint64_t generation_ = 0;
  int wanted_ = 0, running_ = 0;
  bool stop_ = false;
};

}  // namespace tilemoe::cpu
