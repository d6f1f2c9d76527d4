// How the other bindings reach the arena behind a handle, and how they take numbers from JavaScript.
#pragma once
#include <napi.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "arena.h"

namespace kvtier {

// The arena of a handle; throws when it was closed. Whoever keeps the pointer keeps the mapping.
std::shared_ptr<Arena> ArenaOf(const Napi::Value& value);

// A JavaScript number as an offset or a count: whole, not negative, exact. Throws RangeError naming `what`.
inline uint64_t WholeOf(Napi::Env env, double value, const char* what) {
  if (!(value >= 0 && value <= 9007199254740991.0) || std::floor(value) != value) {
    throw Napi::RangeError::New(env, std::string(what) + " is not a whole number");
  }
  return static_cast<uint64_t>(value);
}

// Runs `work` on a thread of libuv's pool and settles a promise with what `finish` makes of it on the JavaScript thread.
// An exception of `work` rejects it.
class Background : public Napi::AsyncWorker {
 public:
  static Napi::Promise Run(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish) {
    auto* worker = new Background(env, std::move(work), std::move(finish));
    const Napi::Promise promise = worker->deferred_.Promise();
    worker->Queue();
    return promise;
  }

 private:
  Background(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish)
      : AsyncWorker(env), deferred_(env), work_(std::move(work)), finish_(std::move(finish)) {}
  void Execute() override { work_(); }
  void OnOK() override { deferred_.Resolve(finish_(Env())); }
  void OnError(const Napi::Error& error) override { deferred_.Reject(error.Value()); }

  Napi::Promise::Deferred deferred_;
  std::function<void()> work_;
  std::function<Napi::Value(Napi::Env)> finish_;
};

}  // namespace kvtier
