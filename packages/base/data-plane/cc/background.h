// Work off the JavaScript thread, on threads of our own. libuv's few threads also resolve names and read files for whoever asks:
// one dead server or disk would stop what only needs a processor.
//
//     Run(env, where, work, finish) ──▶ queue of `where` ──▶ its thread: work() ──▶ JavaScript thread: finish(), promise settled
//
// Invariants: a promise settles once, on the thread of its own environment; the event loop lives as long as work is open;
// when an environment ends before its work does, nothing of it is called any more. No thread is ever joined: one that hangs
// in the kernel keeps nobody waiting.
#pragma once
#include <napi.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvtier {

// A failed system call; `number` becomes `errno` of the Error that JavaScript gets.
class SystemFailure : public std::runtime_error {
 public:
  SystemFailure(const std::string& text, int error) : std::runtime_error(text), number(error) {}
  const int number;
};

// A first-in-first-out queue with threads of its own. The threads end when nobody holds it and it is empty.
class WorkQueue {
 public:
  explicit WorkQueue(unsigned threads);
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;
  void Push(std::function<void()> work);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// Runs `work` on a thread of `where` and settles a promise with what `finish` makes of it. An exception of `work` rejects it.
Napi::Promise RunOn(WorkQueue& where, Napi::Env env, std::function<void()> work,
                    std::function<Napi::Value(Napi::Env)> finish);

// The same on threads of the process, for what needs a processor and nothing else (checksums, copies, codecs).
Napi::Promise RunOnProcessors(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish);

// The same on a thread that is made for it: for what waits for other threads.
Napi::Promise RunApart(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish);

}  // namespace kvtier
