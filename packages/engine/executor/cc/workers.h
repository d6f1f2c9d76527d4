// Threads that run jobs first come, first served, apart from JavaScript's thread and from the compute pool.
#pragma once
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtier {

class Workers {
 public:
  // At most `capacity` jobs wait; a job must not throw. `name`: of the threads, as top shows them; 15 letters. `niceness`: 0 to 19,
  // how far these threads stand back where processors are wanted by others.
  Workers(const char* name, int threads, size_t capacity, int niceness = 0) : capacity_(capacity) {
    try {
      for (int i = 0; i < threads; ++i) {
        threads_.emplace_back([this, name, niceness] {
          pthread_setname_np(pthread_self(), name);
          if (niceness > 0) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), niceness);  // Linux: of this thread alone
          Work();
        });
      }
    } catch (...) {  // no further thread can be had; those that were made must end before they are forgotten
      Stop();
      throw;
    }
  }
  ~Workers() { Stop(); }

  size_t threads() const { return threads_.size(); }

  // All of `jobs` or none; false when the queue is too full or stopping.
  bool Post(std::vector<std::function<void()>> jobs) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_ || queue_.size() + jobs.size() > capacity_) return false;
      for (auto& job : jobs) queue_.push_back(std::move(job));
    }
    ready_.notify_all();
    return true;
  }

  // Runs what is queued, then ends the threads. Idempotent.
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_all();
    for (auto& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  void Work() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      job();
    }
  }

  const size_t capacity_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvtier
