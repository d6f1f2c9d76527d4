// One executor of one JavaScript environment: its backend, its threads, its arenas, and the way back to JavaScript.
#pragma once
#include <napi.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "backend.h"
#include "workers.h"

namespace kvtier {

class Instance : public std::enable_shared_from_this<Instance> {
 public:
  // Throws std::system_error where no thread can be had.
  static std::shared_ptr<Instance> Create(Napi::Env env);
  ~Instance();

  // Runs `work` on the step thread; `finish` turns its result into a value on JavaScript's thread. One at a time.
  Napi::Promise RunStep(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish);
  // Runs piece(i) for i in [0, pieces) over the copy threads of their direction: a request waits for an import, nobody for an
  // export.
  enum class Direction { kImport, kExport };
  Napi::Promise RunCopies(Napi::Env env, Direction direction, size_t pieces, std::function<void(size_t)> piece,
                          std::function<Napi::Value(Napi::Env)> finish);
  // Ends the threads after what is queued, frees everything. Idempotent, JavaScript's thread only.
  void Close();

  // The same arena, which a thread of exports unmaps, whoever lets go of it last: small pages take their time, and a turn of JavaScript's
  // has none. Where that thread's queue is full or has ended, who lets go of it does.
  std::shared_ptr<Arena> UnmappedAside(std::shared_ptr<Arena> arena);

  // Set once, by the job that opens it; with it come the copy threads.
  void SetBackend(std::unique_ptr<Backend> backend);

  std::unique_ptr<Backend> backend;
  std::map<int, std::shared_ptr<Arena>> arenas;
  int next_arena = 1;

 private:
  struct Job;
  explicit Instance(Napi::Env env);
  std::shared_ptr<Job> NewJob(Napi::Env env, std::function<Napi::Value(Napi::Env)> finish);
  void Complete(std::shared_ptr<Job> job);
  void Leave(Napi::Env env);
  // Of a job that nobody runs.
  void Discard(Napi::Env env, Job& job);

  napi_env env_;
  Napi::ThreadSafeFunction back_;
  int in_flight_ = 0;  // JavaScript's thread only; while it is 0 the process may end
  bool closed_ = false;
  Workers steps_{"kvtier-step", 1, 1};
  std::unique_ptr<Workers> imports_, exports_;
};

}  // namespace kvtier
