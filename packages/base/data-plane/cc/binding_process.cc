// Node-API face of the process itself: its end, whatever hangs, and how long its event loop's turns take. Mirrors the "process"
// part of binding.ts, in its order.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "binding.h"
#include "no_thread.h"
#include "pulse.h"
#include "uv_loop.h"

namespace kvtier {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// -- ends -------------------------------------------------------------------------------------------------------------

// exit(3) joins libuv's threads, and so hangs with whatever hangs in one of them.
void ExitNow(const Napi::CallbackInfo& info) { _exit(info[0].As<Napi::Number>().Int32Value()); }

// Where no thread can be had (a cgroup's limit): the kernel's own timer ends the process then, without a line.
bool HasTimerEnd(milliseconds in) {
  timer_t timer;
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return false;
  const auto ms = std::max<int64_t>(in.count(), 1);
  itimerspec at{};
  at.it_value = {ms / 1000, ms % 1000 * 1'000'000};
  return timer_settime(timer, 0, &at, nullptr) == 0;
}

// stderr may be a pipe that nobody reads, or a file on the disk that hangs: its thread is left behind.
[[noreturn]] void Die(const std::string& line) {
  try {
    std::thread([line] { (void)!write(STDERR_FILENO, line.data(), line.size()); }).detach();
    std::this_thread::sleep_for(milliseconds(100));
  } catch (const std::system_error&) {
    // Its end matters more than its last line.
  }
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

void KillAfter(const Napi::CallbackInfo& info) {
  static std::mutex mutex;
  static steady_clock::time_point earliest = steady_clock::time_point::max();
  const auto at = steady_clock::now() + milliseconds(info[0].As<Napi::Number>().Int64Value());
  const std::lock_guard lock(mutex);
  if (at >= earliest) return;
  try {
    std::thread([at, line = info[1].As<Napi::String>().Utf8Value()] {
      std::this_thread::sleep_until(at);
      Die(line);
    }).detach();
  } catch (const std::system_error& error) {
    if (!HasTimerEnd(milliseconds(info[0].As<Napi::Number>().Int64Value()))) throw Napi::Error::New(info.Env(), NoThread(error));
  }
  earliest = at;
}

void EndWithParent(const Napi::CallbackInfo& info) {
  static std::atomic<bool> watching{false};
  if (watching.exchange(true)) return;
  const milliseconds grace(info[0].As<Napi::Number>().Int64Value());
  try {
    std::thread([parent = getppid(), grace, line = info[1].As<Napi::String>().Utf8Value()] {
      while (getppid() == parent) std::this_thread::sleep_for(milliseconds(500));
      std::this_thread::sleep_for(grace);
      Die(line);
    }).detach();
  } catch (const std::system_error& error) {
    watching = false;
    throw Napi::Error::New(info.Env(), NoThread(error));
  }
}

// -- turns ------------------------------------------------------------------------------------------------------------

constexpr double kTurnLookMs = 10;     // shorter turns are not worth a look at the thread's clock
constexpr double kBaselineOldMs = 1;   // what a turn may be charged for of those before it
constexpr double kLongMs = 50;
constexpr size_t kMaxRows = 64;

double NowMs(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

// Pages that were new to this thread, without those that were read from a disk.
double NewPages() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  return static_cast<double>(used.ru_minflt);
}

struct Turns {
  struct uv_loop_s* loop = nullptr;
  double wallMs = 0;  // at the end of the last turn
  double idleMs = 0;  // that the loop has waited, up to then
  double baseWallMs = 0;
  double baseCpuMs = 0;
  double basePages = 0;
  double longestCpuMs = 0, longestWallMs = 0;
  double longTurns = 0;
  std::vector<double> rows;  // of the first long ones: [began, ended, CPU time, new pages], on the monotonic clock

  void Begin() {
    wallMs = baseWallMs = NowMs(CLOCK_MONOTONIC);
    baseCpuMs = NowMs(CLOCK_THREAD_CPUTIME_ID);
    basePages = NewPages();
    idleMs = static_cast<double>(uv_metrics_idle_time(loop)) / 1e6;
    longestCpuMs = longestWallMs = longTurns = 0;
    rows.clear();
  }

  // Just before the loop waits: a turn has ended.
  void Ended() {
    const double now = NowMs(CLOCK_MONOTONIC);
    const double elapsed = now - wallMs;
    if (elapsed >= kTurnLookMs) {
      const double idle = static_cast<double>(uv_metrics_idle_time(loop)) / 1e6;
      const double wall = std::max(0.0, elapsed - (idle - idleMs));
      longestWallMs = std::max(longestWallMs, wall);
      const double cpu = std::min(NowMs(CLOCK_THREAD_CPUTIME_ID) - baseCpuMs, elapsed);
      longestCpuMs = std::max(longestCpuMs, cpu);
      if (cpu > kLongMs) {
        longTurns++;
        if (rows.size() < kMaxRows * 4) rows.insert(rows.end(), {now - wall, now, cpu, NewPages() - basePages});
      }
    }
    if (now - baseWallMs >= kBaselineOldMs) {
      baseWallMs = now;
      baseCpuMs = NowMs(CLOCK_THREAD_CPUTIME_ID);
      basePages = NewPages();
      idleMs = static_cast<double>(uv_metrics_idle_time(loop)) / 1e6;
    }
    wallMs = now;
  }
};

Turns turns;

Napi::Value ThreadCpuMs(const Napi::CallbackInfo& info) {
  return Napi::Number::New(info.Env(), NowMs(CLOCK_THREAD_CPUTIME_ID));
}

void WatchTurns(const Napi::CallbackInfo& info) {
  struct uv_loop_s* loop = nullptr;
  if (napi_get_uv_event_loop(info.Env(), &loop) != napi_ok || loop != uv_default_loop()) {
    throw Napi::Error::New(info.Env(), "CONFIG: turns are measured in the main thread only");
  }
  const bool first = turns.loop == nullptr;
  turns.loop = loop;
  turns.Begin();
  if (!first) return;
  AtEachTurnsEnd(loop, [](struct uv_prepare_s*) { turns.Ended(); });
}

Napi::Value TurnsSeen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto rows = Napi::Float64Array::New(env, turns.rows.size());
  std::copy(turns.rows.begin(), turns.rows.end(), rows.Data());
  auto result = Napi::Object::New(env);
  result["longestCpuMs"] = Napi::Number::New(env, turns.longestCpuMs);
  result["longestWallMs"] = Napi::Number::New(env, turns.longestWallMs);
  result["longTurns"] = Napi::Number::New(env, turns.longTurns);
  result["rows"] = rows;
  return result;
}

// -- signs of life ----------------------------------------------------------------------------------------------------

Napi::Value PulseStart(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  struct uv_loop_s* loop = nullptr;
  if (napi_get_uv_event_loop(env, &loop) != napi_ok || loop != uv_default_loop()) {
    throw Napi::Error::New(env, "CONFIG: a pulse is of the main thread only");
  }
  const auto at = static_cast<uint64_t>(info[1].As<Napi::Number>().Int64Value());
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = at / page * page;
  if (at % 4 != 0 || at + 8 > first + page) throw Napi::Error::New(env, "CONFIG: a pulse is 8 bytes of one page, at a multiple of 4");
  void* map = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, info[0].As<Napi::Number>().Int32Value(), static_cast<off_t>(first));
  if (map == MAP_FAILED) throw Napi::Error::New(env, std::string("IO: a pulse cannot be mapped (") + std::strerror(errno) + ")");
  std::unique_ptr<Pulse> pulse;
  try {
    pulse = std::make_unique<Pulse>(loop, static_cast<uint8_t*>(map) + (at - first), map, page);
  } catch (const std::system_error& error) {
    munmap(map, page);
    throw Napi::Error::New(env, NoThread(error));
  }
  return Napi::External<std::unique_ptr<Pulse>>::New(env, new std::unique_ptr<Pulse>(std::move(pulse)),
                                                     [](Napi::Env, std::unique_ptr<Pulse>* held) { delete held; });
}

void PulseEnd(const Napi::CallbackInfo& info) { info[0].As<Napi::External<std::unique_ptr<Pulse>>>().Data()->reset(); }

// -- files of processes that died -------------------------------------------------------------------------------------

Napi::Value UnlinkUnlocked(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = info[0].As<Napi::String>().Utf8Value();
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    if (errno == ENOENT) return Napi::Boolean::New(env, false);
    throw Napi::Error::New(env, "IO: " + path + ": cannot be opened (" + std::strerror(errno) + "); remove it by hand");
  }
  // Removed while it is locked: whoever makes such a file looks, once it has the lock, whether it is still there.
  const bool ours = flock(fd, LOCK_EX | LOCK_NB) == 0;
  const int error = errno;
  const bool removed = ours && unlink(path.c_str()) == 0;
  const int unlinkError = errno;
  close(fd);
  if (!ours && error != EWOULDBLOCK) throw Napi::Error::New(env, "IO: " + path + ": cannot be locked (" + std::strerror(error) + ")");
  if (ours && !removed && unlinkError != ENOENT) {
    throw Napi::Error::New(env, "IO: " + path + ": cannot be removed (" + std::strerror(unlinkError) + ")");
  }
  return Napi::Boolean::New(env, removed);
}

Napi::Value IsLocked(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = info[0].As<Napi::String>().Utf8Value();
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) throw Napi::Error::New(env, "IO: " + path + ": cannot be opened (" + std::strerror(errno) + ")");
  const bool ours = flock(fd, LOCK_SH | LOCK_NB) == 0;
  const int error = errno;
  close(fd);
  if (!ours && error != EWOULDBLOCK) throw Napi::Error::New(env, "IO: " + path + ": cannot be locked (" + std::strerror(error) + ")");
  return Napi::Boolean::New(env, !ours);
}

}  // namespace

void RegisterProcess(Napi::Env env, Napi::Object exports) {
  exports["exitNow"] = Napi::Function::New(env, ExitNow);
  exports["killAfter"] = Napi::Function::New(env, KillAfter);
  exports["endWithParent"] = Napi::Function::New(env, EndWithParent);
  exports["threadCpuMs"] = Napi::Function::New(env, ThreadCpuMs);
  exports["watchTurns"] = Napi::Function::New(env, WatchTurns);
  exports["turnsSeen"] = Napi::Function::New(env, TurnsSeen);
  exports["pulseStart"] = Napi::Function::New(env, PulseStart);
  exports["pulseEnd"] = Napi::Function::New(env, PulseEnd);
  exports["unlinkUnlocked"] = Napi::Function::New(env, UnlinkUnlocked);
  exports["isLocked"] = Napi::Function::New(env, IsLocked);
}

}  // namespace kvtier
