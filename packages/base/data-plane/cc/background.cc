// Queues, their threads, and the way back to JavaScript; see background.h.
#include "background.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "no_thread.h"

namespace kvtier {

struct WorkQueue::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool closing = false;
};

WorkQueue::WorkQueue(unsigned threads) : shared_(std::make_shared<Shared>()) {
  const auto serve = [shared = shared_] {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(shared->mutex);
        shared->changed.wait(lock, [&] { return shared->closing || !shared->queue.empty(); });
        if (shared->queue.empty()) return;
        work = std::move(shared->queue.front());
        shared->queue.pop_front();
      }
      work();
    }
  };
  for (unsigned i = 0; i < threads; ++i) {
    try {
      std::thread(serve).detach();
    } catch (const std::system_error&) {
      if (i == 0) throw;
      return;  // fewer do it, too, more slowly
    }
  }
}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
  }
  shared_->changed.notify_all();
}

void WorkQueue::Push(std::function<void()> work) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->queue.push_back(std::move(work));
  }
  shared_->changed.notify_one();
}

namespace {

// For what needs a processor and nothing else, of the process. Throws where no thread can be had, and tries again when it is asked again.
WorkQueue& Processors() {
  // Never destroyed: its threads may work until the process is gone.
  static auto* queue = new WorkQueue(std::clamp(std::thread::hardware_concurrency(), 2u, 8u));
  return *queue;
}

// One piece of work between its thread and its promise.
struct Task {
  Task(Napi::Env env, std::function<Napi::Value(Napi::Env)> whenDone) : deferred(env), finish(std::move(whenDone)) {}
  Napi::Promise::Deferred deferred;
  std::function<Napi::Value(Napi::Env)> finish;
  bool failed = false;
  std::string message;
  int number = 0;

  void Settle(Napi::Env env) {
    try {
      if (!failed) return deferred.Resolve(finish(env));
    } catch (const Napi::Error& error) {
      return deferred.Reject(error.Value());  // else whoever waits would wait for ever
    }
    const Napi::Error error = Napi::Error::New(env, message);
    if (number != 0) error.Value()["errno"] = Napi::Number::New(env, number);
    deferred.Reject(error.Value());
  }
};

// The way back into one environment. Tasks that its end overtakes are left alone: what they hold belongs to it.
class Returns : public std::enable_shared_from_this<Returns> {
 public:
  static std::shared_ptr<Returns> Of(Napi::Env env) {
    if (auto* known = env.GetInstanceData<std::shared_ptr<Returns>>()) return *known;
    auto* made = new std::shared_ptr<Returns>(new Returns(env));
    env.SetInstanceData(made);
    // Registered after the function's own hook, so it runs before it.
    napi_add_env_cleanup_hook(env, &Returns::Ended, made->get());
    return *made;
  }

  void Expect(Napi::Env env) {
    if (open_++ == 0) function_.Ref(env);
  }

  // From any thread.
  void Post(Task* task) {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    done_.push_back(task);
    if (done_.size() > 1) return;
    auto* self = new std::shared_ptr<Returns>(shared_from_this());
    const auto deliver = [](Napi::Env env, Napi::Function, std::shared_ptr<Returns>* owner) {
      const auto returns = *owner;
      delete owner;
      if (env != nullptr) returns->Deliver(env);
    };
    if (function_.NonBlockingCall(self, deliver) != napi_ok) delete self;
  }

 private:
  explicit Returns(Napi::Env env)
      : function_(Napi::ThreadSafeFunction::New(env, Napi::Function::New(env, [](const Napi::CallbackInfo&) {}),
                                                "kvtier background", 0, 1)) {
    function_.Unref(env);
  }

  static void Ended(void* self) {
    auto* returns = static_cast<Returns*>(self);
    const std::lock_guard lock(returns->mutex_);
    returns->ended_ = true;
  }

  void Deliver(Napi::Env env) {
    std::vector<Task*> done;
    {
      const std::lock_guard lock(mutex_);
      done.swap(done_);
    }
    open_ -= done.size();
    if (open_ == 0) function_.Unref(env);
    for (Task* task : done) {
      const Napi::HandleScope scope(env);
      task->Settle(env);
      delete task;
    }
  }

  Napi::ThreadSafeFunction function_;
  size_t open_ = 0;  // JavaScript thread only
  std::mutex mutex_;
  std::vector<Task*> done_;  // guarded by mutex_
  bool ended_ = false;       // guarded by mutex_
};

template <typename Start>
Napi::Promise Begin(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish,
                    const Start& start) {
  const auto returns = Returns::Of(env);
  auto* task = new Task(env, std::move(finish));
  const Napi::Promise promise = task->deferred.Promise();
  returns->Expect(env);
  auto run = [returns, task, work = std::move(work)]() mutable {
    try {
      work();
    } catch (const SystemFailure& failure) {
      task->failed = true;
      task->message = failure.what();
      task->number = failure.number;
    } catch (const std::exception& error) {
      task->failed = true;
      task->message = error.what();
    }
    // It may hold what JavaScript holds, whose end belongs on JavaScript's thread: the task holds that as well, until it is settled.
    work = nullptr;
    returns->Post(task);
  };
  try {
    start(std::move(run));  // not copied: a copy's `work` would outlive the task
  } catch (const std::exception& error) {
    task->failed = true;
    task->message = NoThread(error);
    returns->Post(task);
  }
  return promise;
}

}  // namespace

Napi::Promise RunOn(WorkQueue& where, Napi::Env env, std::function<void()> work,
                    std::function<Napi::Value(Napi::Env)> finish) {
  return Begin(env, std::move(work), std::move(finish), [&](auto run) { where.Push(std::move(run)); });
}

Napi::Promise RunOnProcessors(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish) {
  return Begin(env, std::move(work), std::move(finish), [](auto run) { Processors().Push(std::move(run)); });
}

Napi::Promise RunApart(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish) {
  return Begin(env, std::move(work), std::move(finish), [&](auto run) { std::thread(std::move(run)).detach(); });
}

}  // namespace kvtier
