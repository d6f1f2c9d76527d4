// The driver on the emulator (packages/engine/cuda/checks/standin_cuda.cc), but that device 0 can be slow to say whether something has
// ended, and that it tells who has come to a place in a stream, and how late the system may wake those who ask. What is not here is found in the
// library that this one needs.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#define ENTRY extern "C" __attribute__((visibility("default"))) int

ENTRY cuCtxGetDevice(int* device);

namespace {

std::mutex mutex;
std::condition_variable changed;
bool slow = false;
int waiting = 0;
std::map<void*, void*> recorded;   // event -> its stream
std::map<std::string, int> slack;  // nanoseconds, of threads that asked, by their names
std::map<void*, int> awaited;      // stream -> times that somebody asked for, or began to wait for, an event of it

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
// -1: no such thread has asked.
ENTRY kvtier_slow_slack(const char* thread) {
  const std::lock_guard lock(mutex);
  const auto found = slack.find(thread);
  return found == slack.end() ? -1 : found->second;
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
  {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    const std::lock_guard lock(mutex);
    slack[name] = prctl(PR_GET_TIMERSLACK);
  }
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
