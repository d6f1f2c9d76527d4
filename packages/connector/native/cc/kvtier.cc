// The C ABI over the client: nothing is thrown across it.
#include "kvtier.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "client.h"

// These few words stay for ever: threads of an interpreter run on when its end has closed the client, and their calls are refused.
struct kvtier_client {
  explicit kvtier_client(const kvtier_options& options)
      : client_(new kvtier::Client(options), [this](kvtier::Client* unused) { Free(unused); }) {}
  // A call keeps what it uses.
  std::shared_ptr<kvtier::Client> Use() {
    const std::lock_guard lock(mutex_);
    if (client_ == nullptr) throw kvtier::Failure(KVTIER_CONFIG, "CONFIG: the client is closed");
    return client_;
  }
  // Null: it was closed before.
  std::shared_ptr<kvtier::Client> End() {
    const std::lock_guard lock(mutex_);
    return std::exchange(client_, nullptr);
  }
  // Whether all of it is freed by then.
  bool FreedBy(std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until, [this] { return end_ != Freeing::kPending; });
    return end_ == Freeing::kDone;
  }

 private:
  enum class Freeing { kPending, kDone, kLeft };
  // By whoever used it last, on a thread of its own: what a GPU has of it comes back when all that runs there has ended, which behind a
  // kernel that hangs is never. Where no thread can be had it is left.
  void Free(kvtier::Client* unused) {
    try {
      std::thread([this, unused] {
        pthread_setname_np(pthread_self(), "kvtier-free");
        delete unused;
        Tell(Freeing::kDone);
      }).detach();
    } catch (const std::exception&) {
      Tell(Freeing::kLeft);
    }
  }
  void Tell(Freeing end) {
    const std::lock_guard lock(mutex_);
    end_ = end;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Freeing end_ = Freeing::kPending;
  std::shared_ptr<kvtier::Client> client_;
};

namespace {

thread_local std::string last_error;

int32_t Fail(int32_t status, const char* what) {
  last_error = what;
  return status;
}

// What `call` returns, or the status of what it throws.
template <typename Call>
auto Guard(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const kvtier::Failure& failure) {
    return Fail(failure.status, failure.what());
  } catch (const std::exception& error) {
    return Fail(KVTIER_SETUP, (std::string("SETUP: ") + error.what()).c_str());
  }
}

}  // namespace

extern "C" {

uint32_t kvtier_abi(void) { return KVTIER_ABI; }
const char* kvtier_version(void) { return KVTIER_VERSION; }
const char* kvtier_last_error(void) { return last_error.c_str(); }
const char* kvtier_copy_code(void) { return kvtier::ChooseCopyCode().name; }

kvtier_client* kvtier_open(const kvtier_options* options) {
  kvtier_client* client = nullptr;
  Guard([&]() -> int32_t {
    client = new kvtier_client(*options);
    return 0;
  });
  return client;
}

int32_t kvtier_close(kvtier_client* client, int64_t wait_us) {
  const auto until = kvtier::After(wait_us);
  auto ended = client->End();
  if (ended == nullptr) return 1;
  if (!ended->Close(until)) {
    (void)new std::shared_ptr<kvtier::Client>(std::move(ended));  // its threads still use it
    return 0;
  }
  ended.reset();
  return client->FreedBy(until) ? 1 : 0;
}

int64_t kvtier_map(kvtier_client* client, const char* path, uint64_t bytes, uint64_t id, uint64_t lock_byte) {
  return Guard([&]() -> int64_t { return client->Use()->Map(path, bytes, id, lock_byte); });
}

int32_t kvtier_unmap(kvtier_client* client, int64_t arena) {
  return Guard([&]() -> int32_t { return client->Use()->Unmap(arena) ? 1 : 0; });
}

int64_t kvtier_layout(kvtier_client* client, const kvtier_part* parts, size_t count, uint64_t blocks) {
  return Guard([&]() -> int64_t { return client->Use()->AddLayout({parts, count}, blocks, -1); });
}

int64_t kvtier_device_layout(kvtier_client* client, int32_t device, const kvtier_part* parts, size_t count, uint64_t blocks) {
  return Guard([&]() -> int64_t {
    if (device < 0) throw kvtier::Failure(KVTIER_CONFIG, "CONFIG: no device " + std::to_string(device));
    return client->Use()->AddLayout({parts, count}, blocks, device);
  });
}

int64_t kvtier_mark(kvtier_client* client, int32_t device, void* stream) {
  return Guard([&]() -> int64_t { return client->Use()->AddMark(device, stream); });
}

int32_t kvtier_forget_mark(kvtier_client* client, int64_t mark) {
  return Guard([&]() -> int32_t {
    client->Use()->ForgetMark(mark);
    return 1;
  });
}

int32_t kvtier_pinning(kvtier_client* client, int64_t arena, int32_t device) {
  return Guard([&]() -> int32_t {
    std::string why;
    const int state = client->Use()->Pinning(arena, device, &why);
    if (state == 2) last_error = why;
    return state;
  });
}

int32_t kvtier_peek(kvtier_client* client, int32_t device, void* target, uint64_t address, size_t bytes) {
  return Guard([&]() -> int32_t {
    client->Use()->Reach(device, target, address, bytes, false);
    return 1;
  });
}

int32_t kvtier_poke(kvtier_client* client, int32_t device, uint64_t address, const void* source, size_t bytes) {
  return Guard([&]() -> int32_t {
    client->Use()->Reach(device, const_cast<void*>(source), address, bytes, true);
    return 1;
  });
}

uint64_t kvtier_payload_bytes(kvtier_client* client, int64_t layout) {
  uint64_t bytes = 0;
  Guard([&]() -> int32_t {
    bytes = client->Use()->PayloadBytes(layout);
    return 1;
  });
  return bytes;
}

int32_t kvtier_forget_layout(kvtier_client* client, int64_t layout) {
  return Guard([&]() -> int32_t {
    client->Use()->ForgetLayout(layout);
    return 1;
  });
}

int64_t kvtier_load(kvtier_client* client, int64_t arena, int64_t layout, size_t count, const uint64_t* blocks,
                    const uint64_t* offsets, const uint64_t* sums, int64_t after) {
  return Guard([&]() -> int64_t {
    return client->Use()->Begin(kvtier::JobKind::kLoad, arena, layout, 0, {blocks, count}, {offsets, count}, {sums, count}, after);
  });
}

int64_t kvtier_store(kvtier_client* client, int64_t arena, int64_t layout, size_t count, const uint64_t* blocks,
                     const uint64_t* offsets, int64_t after) {
  return Guard([&]() -> int64_t {
    return client->Use()->Begin(kvtier::JobKind::kStore, arena, layout, 0, {blocks, count}, {offsets, count}, {}, after);
  });
}

int64_t kvtier_check(kvtier_client* client, int64_t arena, uint64_t payload_bytes, size_t count, const uint64_t* offsets,
                     const uint64_t* sums) {
  return Guard([&]() -> int64_t {
    return client->Use()->Begin(kvtier::JobKind::kCheck, arena, 0, payload_bytes, {}, {offsets, count}, {sums, count}, 0);
  });
}

int32_t kvtier_wait(kvtier_client* client, int64_t job, int64_t wait_us) {
  return Guard([&]() -> int32_t { return client->Use()->Wait(job, wait_us) ? 1 : 0; });
}

int32_t kvtier_take(kvtier_client* client, int64_t job, uint64_t* sums, uint8_t* good, size_t count) {
  return Guard([&]() -> int32_t {
    client->Use()->Take(job, sums, good, count);
    return 1;
  });
}

int32_t kvtier_abandon(kvtier_client* client, int64_t job) {
  return Guard([&]() -> int32_t { return client->Use()->Abandon(job) ? 1 : 0; });
}

void kvtier_count(kvtier_client* client, kvtier_counts* counts) {
  *counts = {};
  Guard([&]() -> int32_t {
    *counts = client->Use()->Counts();
    return 1;
  });
}

}  // extern "C"
