#include "instance.h"

#include <algorithm>

namespace kvtier {
namespace {

constexpr size_t kQueuedCopies = 8192;  // pieces of work, at most one per copy thread and call

void CloseAtExit(void* instance) { static_cast<Instance*>(instance)->Close(); }

}  // namespace

struct Instance::Job {
  Job(Napi::Env env, std::function<Napi::Value(Napi::Env)> finish)
      : deferred(Napi::Promise::Deferred::New(env)), finish(std::move(finish)) {}
  Napi::Promise::Deferred deferred;
  // Keeps the instance alive until JavaScript has its answer; let go on JavaScript's thread, where an instance must end.
  std::shared_ptr<Instance> keep;
  std::function<Napi::Value(Napi::Env)> finish;
  std::mutex failing;
  std::string error;
  std::function<void(size_t)> piece;
  size_t pieces = 0;
  std::atomic<size_t> next{0};
  std::atomic<size_t> runners{0};
};

std::shared_ptr<Instance> Instance::Create(Napi::Env env) { return std::shared_ptr<Instance>(new Instance(env)); }

Instance::Instance(Napi::Env env)
    : env_(env) {
  auto nothing = Napi::Function::New(env, [](const Napi::CallbackInfo&) {});
  back_ = Napi::ThreadSafeFunction::New(env, nothing, "kvtier executor", 0, 1);
  back_.Unref(env);
  napi_add_env_cleanup_hook(env, CloseAtExit, this);
}

Instance::~Instance() { Close(); }

void Instance::Close() {
  if (closed_) return;
  closed_ = true;
  napi_remove_env_cleanup_hook(env_, CloseAtExit, this);
  if (backend) backend->Closing();
  steps_.Stop();
  if (imports_) imports_->Stop();
  if (exports_) exports_->Stop();
  back_.Release();
  backend.reset();
  arenas.clear();
}

std::shared_ptr<Arena> Instance::UnmappedAside(std::shared_ptr<Arena> arena) {
  Arena* const mapped = arena.get();
  return {mapped, [this, arena = std::move(arena)](Arena*) mutable {
            std::vector<std::function<void()>> work;  // moved and not copied: no copy may be what lets go of it last
            work.emplace_back([last = std::move(arena)]() mutable { last.reset(); });
            exports_->Post(std::move(work));
          }};
}

void Instance::SetBackend(std::unique_ptr<Backend> made) {
  imports_ = std::make_unique<Workers>("kvtier-import", made->copy_threads(), kQueuedCopies);
  exports_ = std::make_unique<Workers>("kvtier-export", made->copy_threads(), kQueuedCopies, made->export_niceness());
  backend = std::move(made);
}

std::shared_ptr<Instance::Job> Instance::NewJob(Napi::Env env, std::function<Napi::Value(Napi::Env)> finish) {
  if (in_flight_++ == 0) back_.Ref(env);
  auto job = std::make_shared<Job>(env, std::move(finish));
  job->keep = shared_from_this();
  return job;
}

void Instance::Leave(Napi::Env env) {
  if (--in_flight_ == 0) back_.Unref(env);
}

void Instance::Discard(Napi::Env env, Job& job) {
  Leave(env);
  job.deferred.Resolve(env.Undefined());  // a promise that is never settled is never freed
}

// On a worker's thread.
void Instance::Complete(std::shared_ptr<Job> job) {
  back_.BlockingCall([job](Napi::Env env, Napi::Function) {
    if (static_cast<napi_env>(env) == nullptr) return;  // the environment is ending: nobody waits any more
    Napi::HandleScope scope(env);
    const auto self = std::move(job->keep);
    if (!self->closed_) self->Leave(env);
    if (!job->error.empty()) {
      job->deferred.Reject(Napi::Error::New(env, job->error).Value());
    } else {
      job->deferred.Resolve(job->finish(env));
    }
    // The thread that ran the job may still hold it. What these keep is let go of here, an arena among it: while its instance lives.
    job->finish = nullptr;
    job->piece = nullptr;
  });
}

Napi::Promise Instance::RunStep(Napi::Env env, std::function<void()> work,
                                std::function<Napi::Value(Napi::Env)> finish) {
  auto job = NewJob(env, std::move(finish));
  const bool posted = steps_.Post({[this, job, work = std::move(work)]() mutable {
    try {
      work();
    } catch (const std::exception& error) {
      job->error = error.what();
    }
    work = nullptr;  // it may hold the instance, whose end belongs on JavaScript's thread
    Complete(job);
  }});
  if (!posted) {
    Discard(env, *job);
    throw Napi::Error::New(env, "step: another step is running, or the executor is closed");
  }
  return job->deferred.Promise();
}

Napi::Promise Instance::RunCopies(Napi::Env env, Direction direction, size_t pieces,
                                  std::function<void(size_t)> piece, std::function<Napi::Value(Napi::Env)> finish) {
  auto job = NewJob(env, std::move(finish));
  job->piece = std::move(piece);
  job->pieces = pieces;
  Workers& threads = direction == Direction::kImport ? *imports_ : *exports_;
  const size_t runners = std::clamp<size_t>(pieces, 1, threads.threads());
  job->runners = runners;
  std::vector<std::function<void()>> work(runners, [this, job] {
    try {
      for (size_t i = job->next.fetch_add(1); i < job->pieces; i = job->next.fetch_add(1)) job->piece(i);
    } catch (const std::exception& error) {
      std::lock_guard lock(job->failing);
      job->error = error.what();
    }
    if (job->runners.fetch_sub(1) == 1) Complete(job);
  });
  if (!threads.Post(std::move(work))) {
    Discard(env, *job);
    throw Napi::Error::New(env, "BUSY: too many copies are waiting, or the executor is closed");
  }
  return job->deferred.Promise();
}

}  // namespace kvtier
