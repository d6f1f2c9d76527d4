// Tells other processes, by two words of memory that they map, that this one lives: a thread beats, whatever the event loop has to do,
// and says how long the loop's present turn has taken. On a busy machine a turn waits for a processor more than it computes, and whoever
// took that for a standstill would leave a node alone that works.
//
//     loop     ├── turn ──┤ waits ├──────── turn ───────── ...
//     told     0  0  0       0       0  50  100  150 ...        ms of its own: while it could run, those that it ran
//
// Invariant: nothing is written once the destructor has returned.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <thread>

#include "uv_loop.h"

namespace kvtier {

class Pulse {
 public:
  // At `place`, aligned to 4 bytes: beats (u32), ms of the present turn (u32). For the thread whose loop it is. It unmaps `page` at the end.
  // Throws std::system_error where no thread can be had; `page` stays mapped then.
  Pulse(struct uv_loop_s* loop, uint8_t* place, void* page, size_t pageBytes);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  void Run();
  // The loop's thread runs, or would if it had a processor.
  bool CanRun() const;
  // What it has run.
  double RanMs() const;

  struct uv_loop_s* const loop_;
  uint32_t* const place_;
  void* const page_;
  const size_t pageBytes_;
  clockid_t clock_ = CLOCK_MONOTONIC;  // of the loop's thread; without one, all time is its own
  int stat_ = -1;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace kvtier
