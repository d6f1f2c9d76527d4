#include "thread_pool.h"

#include <immintrin.h>
#include <pthread.h>

namespace kvtier {

// Spinning this long bridges the gaps between the loops of one layer; a futex wake costs more than that. About
// 15 µs; longer would take the core from others where cores are shared.
constexpr int kSpins = 300;

ThreadPool::ThreadPool(int threads) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { Work(thread); });
  } catch (...) {  // no further thread can be had; those that were made must end before they are forgotten
    Stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::Drain(int thread) {
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    call_(context_, task, thread);
  }
}

void ThreadPool::Run(int64_t tasks, Call call, const void* context) {
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  Drain(0);
  for (int spin = 0;; ++spin) {
    const int busy = busy_.load(std::memory_order_acquire);
    if (busy == 0) return;
    if (spin < kSpins) {
      _mm_pause();
    } else {
      busy_.wait(busy);
    }
  }
}

void ThreadPool::Work(int thread) {
  pthread_setname_np(pthread_self(), "kvtier-compute");
  uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; round_.load(std::memory_order_acquire) == seen && spin < kSpins; ++spin) _mm_pause();
    round_.wait(seen);
    if (stop_.load()) return;
    ++seen;  // Run waits for every worker, so no round is ever missed.
    Drain(thread);
    if (busy_.fetch_sub(1, std::memory_order_release) == 1) busy_.notify_one();
  }
}

}  // namespace kvtier
