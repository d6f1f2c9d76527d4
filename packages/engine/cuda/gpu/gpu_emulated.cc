// gpu.h without a GPU. A stream is a thread with a queue: what is enqueued runs later, in order, beside the caller and beside
// other streams, so that a missing wait or a buffer freed too early shows. It is stricter than a GPU where that finds mistakes:
// fresh memory holds NaNs, what lies behind a buffer's end faults, no copy is synchronous, and a thread must have called Use.
//
// Invariant: an operation runs after all before it in its stream; an event is done after all before its Record.
#include "gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace kvtier::gpu {
namespace {

constexpr size_t kDeviceBytes = size_t{1} << 30;
constexpr size_t kSharedBytesPerBlock = 227 << 10;  // as sm_90 allows
constexpr size_t kQueueOperations = 1024;           // an enqueuer waits beyond this, as it does on a GPU
constexpr size_t kAlignment = 256;                  // of cudaMalloc
constexpr auto kSlice = std::chrono::milliseconds(1);  // how often a wait looks whether it has become pointless

using Clock = std::chrono::steady_clock;

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error("GPU: " + what); }

// All of the process: there is one emulated device.
struct Planned {
  Fault fault = Fault::kNone;
  uint64_t operation = 0;  // 0: never
};
Planned PlannedFault();

struct Device {
  std::mutex mutex;
  std::atomic<Fault> next{Fault::kNone};
  std::atomic<bool> failed{false}, hung{false};
  size_t allocated_bytes = 0;
  std::map<uintptr_t, size_t> host_ranges;  // registered: start -> bytes
  const Planned planned = PlannedFault();
  std::atomic<uint64_t> operations{0};
};
// From the environment, for tests of whole processes: KVTIER_EMULATED_FAULT=hang@N or illegal@N, the Nth operation.
Planned PlannedFault() {
  const char* text = getenv("KVTIER_EMULATED_FAULT");
  if (text == nullptr) return {};
  const std::string plan = text;
  const size_t at = plan.find('@');
  if (at == std::string::npos) return {};
  return {plan.substr(0, at) == "hang" ? Fault::kHang : Fault::kIllegalAccess, strtoull(plan.c_str() + at + 1, nullptr, 10)};
}

// Never destroyed: threads of streams that are static variables may outlive everything else.
Device& device() {
  static Device& one = *new Device;
  return one;
}

thread_local bool used = false;
thread_local bool in_runtime_thread = false;

void Check() {
  if (in_runtime_thread) Fail("a host function calls the runtime; enqueue from another thread");
  if (!used) Fail("this thread has no device; call Use on it first");
  if (device().failed) Fail("an illegal memory access was encountered (sticky); the process must end, start it again");
}

void Reserve(size_t bytes, const std::string& what) {
  Check();
  Device& d = device();
  std::lock_guard lock(d.mutex);
  Fault fault = Fault::kOutOfMemory;
  const bool injected = d.next.compare_exchange_strong(fault, Fault::kNone);
  if (injected || bytes > kDeviceBytes - d.allocated_bytes) {
    Fail(what + ": " + std::to_string(bytes) + " bytes do not fit, " + std::to_string(kDeviceBytes - d.allocated_bytes) +
         " are free; lower --gpu-memory-utilization or use a smaller model");
  }
  d.allocated_bytes += bytes;
}

// Pages with a forbidden one behind them; the buffer ends at it, up to alignment.
struct Pages {
  explicit Pages(size_t bytes)
      : page(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        used_bytes((bytes + kAlignment - 1) / kAlignment * kAlignment),
        mapped_bytes((used_bytes + page - 1) / page * page + page) {}
  const size_t page, used_bytes, mapped_bytes;
};

void* Map(size_t bytes, const std::string& what) {
  const Pages pages(bytes);
  void* base = mmap(nullptr, pages.mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) Fail(what + ": this machine has no memory for the emulated device; close other programs");
  uint8_t* end = static_cast<uint8_t*>(base) + pages.mapped_bytes - pages.page;
  mprotect(end, pages.page, PROT_NONE);
  uint8_t* data = end - pages.used_bytes;
  memset(data, 0xff, pages.used_bytes);  // NaN in every type
  return data;
}

void Unmap(void* data, size_t bytes) {
  const Pages pages(bytes);
  uint8_t* end = static_cast<uint8_t*>(data) + pages.used_bytes + pages.page;
  munmap(end - pages.mapped_bytes, pages.mapped_bytes);
}

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  bool timed = false;
  Clock::time_point at;
};

struct Operation {
  std::function<void()> run;
  bool work;  // false: bookkeeping of events, which neither faults nor is skipped after an error
};

}  // namespace

int DeviceCount(std::string* why) {
  if (why != nullptr) *why = "";
  return 1;
}

void Use(int index) {
  if (index != 0) Fail("device " + std::to_string(index) + " does not exist; the emulator has device 0 only");
  used = true;
}

DeviceInfo Info() {
  Check();
  std::lock_guard lock(device().mutex);
  return {"emulated", 90, 4, kDeviceBytes, kDeviceBytes - device().allocated_bytes, kSharedBytesPerBlock, true};
}

void* DeviceMemory::Allocate(size_t bytes, const std::string& what) {
  Reserve(bytes, what);
  return Map(bytes, what);
}
void DeviceMemory::Free(void* data, size_t bytes) noexcept {
  Unmap(data, bytes);
  std::lock_guard lock(device().mutex);
  device().allocated_bytes -= bytes;
}

void* PinnedMemory::Allocate(size_t bytes, const std::string& what) {
  Check();
  void* data = Map(bytes, what);
  std::lock_guard lock(device().mutex);
  device().host_ranges[reinterpret_cast<uintptr_t>(data)] = bytes;
  return data;
}
void PinnedMemory::Free(void* data, size_t bytes) noexcept {
  UnregisterHost(data);
  Unmap(data, bytes);
}

void RegisterHost(void* base, size_t bytes) {
  Check();
  const auto start = reinterpret_cast<uintptr_t>(base);
  if (bytes == 0 || start % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) != 0) Fail("host memory to be registered must be whole pages");
  std::lock_guard lock(device().mutex);
  auto& ranges = device().host_ranges;
  const auto next = ranges.lower_bound(start);
  const bool overlaps = (next != ranges.end() && next->first < start + bytes) ||
                        (next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > start);
  if (overlaps) Fail("host memory is registered already; unregister it first");
  ranges[start] = bytes;
}

void UnregisterHost(void* base) noexcept {
  std::lock_guard lock(device().mutex);
  device().host_ranges.erase(reinterpret_cast<uintptr_t>(base));
}

void* DeviceView(void* host) {
  Check();
  const auto address = reinterpret_cast<uintptr_t>(host);
  std::lock_guard lock(device().mutex);
  const auto& ranges = device().host_ranges;
  const auto next = ranges.upper_bound(address);
  if (next == ranges.begin() || std::prev(next)->first + std::prev(next)->second <= address) {
    Fail("this host memory is not registered; call RegisterHost first");
  }
  return host;
}

struct Event::Impl {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct Graph::Impl {
  std::vector<Operation> operations;
};

struct Stream::Impl {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Operation> queue;
  bool busy = false;
  std::atomic<bool> stopping{false};
  std::unique_ptr<Graph::Impl> capture;  // while capturing
  std::thread thread{[this] { Run(); }};

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();  // what is queued still runs, unless the device hangs
  }

  bool Abandoned() const { return stopping && device().hung; }

  // What cannot be part of a graph.
  void RequireNoCapture() const {
    Check();
    if (capture) Fail("events, waits, host functions and graphs cannot be captured; use them around the graph's launch");
  }

  void Enqueue(std::function<void()> run, bool work = true) {
    Check();
    std::unique_lock lock(mutex);
    if (capture) {
      capture->operations.push_back({std::move(run), true});
      return;
    }
    while (queue.size() >= kQueueOperations && !device().hung) changed.wait_for(lock, kSlice);
    queue.push_back({std::move(run), work});
    changed.notify_all();
  }

  void Run() {
    in_runtime_thread = true;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !queue.empty(); });
      if (queue.empty() || Abandoned()) return;
      const Operation operation = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      Perform(operation);
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  void Perform(const Operation& operation) {
    Device& d = device();
    if (!operation.work) return operation.run();
    if (d.operations.fetch_add(1) + 1 == d.planned.operation) d.next = d.planned.fault;
    for (Fault fault : {Fault::kHang, Fault::kIllegalAccess}) {
      Fault expected = fault;
      if (!d.next.compare_exchange_strong(expected, Fault::kNone)) continue;
      if (fault == Fault::kIllegalAccess) {
        d.failed = true;
      } else {
        d.hung = true;
        std::unique_lock lock(mutex);
        while (!stopping) changed.wait_for(lock, kSlice);
        return;
      }
    }
    if (!d.failed && !Abandoned()) operation.run();
  }
};

Stream::Stream(Priority) {
  Check();
  impl_ = std::make_unique<Impl>();
}
Stream::~Stream() = default;

void Stream::Copy(void* target, const void* source, size_t bytes) {
  impl_->Enqueue([=] { memmove(target, source, bytes); });
}
void Stream::Copy2D(void* target, size_t target_stride, const void* source, size_t source_stride, size_t bytes, size_t rows) {
  if (bytes > target_stride || bytes > source_stride) Fail("Copy2D: a row is longer than its stride");
  impl_->Enqueue([=] {
    for (size_t row = 0; row < rows; ++row) {
      memcpy(static_cast<uint8_t*>(target) + row * target_stride, static_cast<const uint8_t*>(source) + row * source_stride, bytes);
    }
  });
}
void Stream::Set(void* target, uint8_t value, size_t bytes) {
  impl_->Enqueue([=] { memset(target, value, bytes); });
}

void Stream::Wait(const Event& event) {
  impl_->RequireNoCapture();
  auto state = event.impl()->state;
  uint64_t wanted;
  {
    std::lock_guard lock(state->mutex);
    wanted = state->recorded;
  }
  impl_->Enqueue(
      [impl = impl_.get(), state, wanted] {
        std::unique_lock lock(state->mutex);
        while (state->done < wanted && !impl->Abandoned()) state->changed.wait_for(lock, kSlice);
      },
      false);
}

void Stream::Host(std::function<void()> work) {
  impl_->RequireNoCapture();
  impl_->Enqueue(std::move(work));
}

bool Stream::Synchronize(int64_t deadline_us) {
  impl_->RequireNoCapture();
  const auto deadline = Clock::now() + std::chrono::microseconds(deadline_us);
  std::unique_lock lock(impl_->mutex);
  const bool idle = impl_->changed.wait_until(lock, deadline, [&] { return impl_->queue.empty() && !impl_->busy; });
  lock.unlock();
  Check();
  return idle;
}

void Stream::BeginCapture() {
  impl_->RequireNoCapture();
  impl_->capture = std::make_unique<Graph::Impl>();
}
Graph Stream::EndCapture() {
  Check();
  if (!impl_->capture) Fail("this stream is not capturing");
  Graph graph;
  graph.impl = std::move(impl_->capture);
  return graph;
}
void Stream::Launch(const Graph& graph) {
  if (!graph.impl) Fail("an empty graph was launched");
  impl_->RequireNoCapture();
  for (const Operation& operation : graph.impl->operations) impl_->Enqueue(operation.run);
}

Event::Event(bool timed) {
  Check();
  impl_ = std::make_unique<Impl>();
  impl_->state->timed = timed;
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;

void Event::Record(Stream& stream) {
  stream.impl()->RequireNoCapture();
  auto state = impl_->state;
  uint64_t mine;
  {
    std::lock_guard lock(state->mutex);
    mine = ++state->recorded;
  }
  stream.impl()->Enqueue(
      [state, mine] {
        std::lock_guard lock(state->mutex);
        state->done = std::max(state->done, mine);
        state->at = Clock::now();
        state->changed.notify_all();
      },
      false);
}

bool Event::Done() const { return Wait(0); }

bool Event::Wait(int64_t deadline_us) const {
  Check();
  EventState& state = *impl_->state;
  std::unique_lock lock(state.mutex);
  const bool done =
      state.changed.wait_for(lock, std::chrono::microseconds(deadline_us), [&] { return state.done >= state.recorded; });
  lock.unlock();
  Check();
  return done;
}

double Event::ElapsedUs(const Event& from, const Event& to) {
  Check();
  EventState &a = *from.impl_->state, &b = *to.impl_->state;
  std::scoped_lock lock(a.mutex, b.mutex);
  if (!a.timed || !b.timed || a.done == 0 || b.done == 0 || a.done < a.recorded || b.done < b.recorded) {
    Fail("ElapsedUs: both events must be timed, recorded and done");
  }
  return std::chrono::duration<double, std::micro>(b.at - a.at).count();
}

Graph::Graph() = default;
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

void* NativeStream(Stream&) { return nullptr; }

void LaunchRaw(Stream& stream, const LaunchArgs& args) {
  const Dim &grid = args.grid, &block = args.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffff || grid.y - 1 >= 65535 ||
      grid.z - 1 >= 65535) {
    Fail(std::string("kernel ") + args.name + ": a grid or block that no GPU takes");
  }
  if (args.shared_bytes > kSharedBytesPerBlock) Fail(std::string("kernel ") + args.name + ": too much shared memory");
  stream.impl()->Enqueue([grid, block, shared_bytes = args.shared_bytes, body = args.emulated, name = args.name] {
    emulated::RunGrid({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, body, name);
  });
}

void Inject(Fault fault) {
  Device& d = device();
  d.next = fault;
  if (fault == Fault::kNone) d.failed = d.hung = false;
}

}  // namespace kvtier::gpu
