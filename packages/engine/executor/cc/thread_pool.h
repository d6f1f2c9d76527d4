// A pool that runs one parallel loop at a time; the caller's thread takes part. Tasks are handed out one by one from a
// counter, because cores are shared with other processes and equal shares would wait for the slower core.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvtier {

class ThreadPool {
 public:
  // `threads` counts the caller: 1 starts none.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(task, thread) for each task in [0, tasks), thread in [0, threads()); returns when all have ended.
  // fn must not throw. One caller at a time.
  template <class Fn>
  void For(int64_t tasks, const Fn& fn) {
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
      return;
    }
    Run(tasks, [](const void* context, int64_t task, int thread) { (*static_cast<const Fn*>(context))(task, thread); },
        &fn);
  }

 private:
  using Call = void (*)(const void* context, int64_t task, int thread);
  void Stop();
  void Run(int64_t tasks, Call call, const void* context);
  void Work(int thread);
  void Drain(int thread);

  std::vector<std::thread> workers_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint32_t> round_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kvtier
