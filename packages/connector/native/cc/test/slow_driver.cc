// The driver on the emulator (packages/engine/cuda/checks/standin_cuda.cc), but that device 0 can be slow to say whether something has
// ended, and that it tells who has come to a place in a stream. What is not here is found in the library that this one needs.
#include <dlfcn.h>

#include <condition_variable>
#include <map>
#include <mutex>

#define ENTRY extern "C" __attribute__((visibility("default"))) int

ENTRY cuCtxGetDevice(int* device);

namespace {

std::mutex mutex;
std::condition_variable changed;
bool slow = false;
int waiting = 0;
std::map<void*, void*> recorded;  // event -> its stream
std::map<void*, int> awaited;     // stream -> times that somebody asked for, or began to wait for, an event of it

void Await(void* event) {
  const std::lock_guard lock(mutex);
  if (const auto found = recorded.find(event); found != recorded.end()) ++awaited[found->second];
}

template <class Entry>
Entry* Behind(Entry* here, const char* name) {
  (void)here;
  return reinterpret_cast<Entry*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

ENTRY kvtier_slow(int wanted) {
  const std::lock_guard lock(mutex);
  slow = wanted != 0;
  changed.notify_all();
  return 0;
}
// Threads that ask device 0 and have no answer yet.
ENTRY kvtier_slow_waiting() {
  const std::lock_guard lock(mutex);
  return waiting;
}
ENTRY kvtier_slow_awaited(void* stream) {
  const std::lock_guard lock(mutex);
  return awaited[stream];
}
ENTRY cuEventRecord(void* event, void* stream) {
  static auto* const record = Behind(&cuEventRecord, "cuEventRecord");
  const int status = record(event, stream);
  const std::lock_guard lock(mutex);
  recorded[event] = stream;
  return status;
}
ENTRY cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  static auto* const wait = Behind(&cuStreamWaitEvent, "cuStreamWaitEvent");
  const int status = wait(stream, event, flags);
  Await(event);
  return status;
}
ENTRY cuEventQuery(void* event) {
  Await(event);
  static auto* const ask = Behind(&cuEventQuery, "cuEventQuery");
  int device = -1;
  if (cuCtxGetDevice(&device) == 0 && device == 0) {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.wait(lock, [] { return !slow; });
    --waiting;
  }
  return ask(event);
}
