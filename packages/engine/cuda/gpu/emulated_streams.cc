// Streams, events and graphs of the emulated runtime. As on a GPU, streams are put onto hardware queues: a queue is a thread that
// runs what its streams enqueue in the order of the calls, beside the caller and beside other queues, so that a missing wait
// or a buffer freed too early shows. There are as many as CUDA_DEVICE_MAX_CONNECTIONS says (eight by default): streams that
// share one hold each other up.
//
// Stricter than a GPU: no copy is synchronous. As careless as one: the end of a stream waits for nothing.
//
// Invariant: an operation runs after all before it in its stream; an event is done after all before its Record.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "connections.h"
#include "emulated_device.h"

namespace kvtier::gpu {
namespace emulated {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kQueueOperations = 1024;  // of a stream; an enqueuer waits beyond this, as it does on a GPU
constexpr auto kDrainLimit = std::chrono::seconds(10);

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  bool timed = false;
  Clock::time_point at;
};

struct Operation {
  std::function<void()> run;
  uint64_t work;  // pieces of it; 0: bookkeeping of events, which neither faults nor is skipped
  uint64_t life;
  std::shared_ptr<size_t> of;  // its stream's operations that have not ended
};

// A hardware queue. Never destroyed.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Operation> operations;
  bool busy = false;
  int streams = 0;  // by the mutex of Queues
  std::thread thread{[this] { Run(); }};

  void Run() {
    in_runtime_thread = true;
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return !operations.empty(); });
      Operation operation = std::move(operations.front());
      operations.pop_front();
      busy = true;
      lock.unlock();
      Perform(operation);
      operation.run = nullptr;
      lock.lock();
      busy = false;
      --*operation.of;
      changed.notify_all();
    }
  }

  static void Perform(const Operation& operation) {
    Device& d = device();
    if (operation.work == 0) return operation.run();
    if (operation.life != d.life) return;
    const uint64_t before = d.operations.fetch_add(operation.work);
    if (before < d.planned.operation && d.planned.operation <= before + operation.work) d.next = d.planned.fault;
    for (Fault fault : {Fault::kHang, Fault::kIllegalAccess}) {
      Fault expected = fault;
      if (!d.next.compare_exchange_strong(expected, Fault::kNone)) continue;
      (fault == Fault::kHang ? d.hung : d.failed) = true;
      while (fault == Fault::kHang && operation.life == d.life) std::this_thread::sleep_for(kSlice);
      return;
    }
    if (!d.failed) operation.run();
  }
};

struct Queues {
  std::mutex mutex;
  std::vector<Queue*> all;
  const size_t most = [] {
    AskForConnections();
    const char* text = getenv(kConnectionsVariable);
    const int wanted = text == nullptr ? kDefaultConnections : atoi(text);
    return static_cast<size_t>(wanted < 1 ? kDefaultConnections : std::min(wanted, kMostConnections));
  }();
};
Queues& queues() {
  static Queues& one = *new Queues;
  return one;
}

// The one with the fewest streams.
Queue* TakeQueue() {
  Queues& q = queues();
  std::lock_guard lock(q.mutex);
  const auto fewest = std::ranges::min_element(q.all, {}, &Queue::streams);
  Queue* queue = fewest == q.all.end() ? nullptr : *fewest;
  if (queue == nullptr || (queue->streams > 0 && q.all.size() < q.most)) {
    queue = new Queue;
    q.all.push_back(queue);
  }
  ++queue->streams;
  return queue;
}

}  // namespace

bool DrainQueues(bool even_hung) {
  std::vector<Queue*> all;
  {
    Queues& q = queues();
    std::lock_guard lock(q.mutex);
    all = q.all;
  }
  const auto deadline = Clock::now() + kDrainLimit;
  for (Queue* queue : all) {
    std::unique_lock lock(queue->mutex);
    const auto drained = [&] { return (queue->operations.empty() && !queue->busy) || (device().hung && !even_hung); };
    while (!queue->changed.wait_for(lock, kSlice, drained)) {
      if (Clock::now() > deadline) return false;
    }
  }
  return true;
}

}  // namespace emulated

using namespace emulated;

struct Event::Impl {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct Graph::Impl {
  // Launches of which all but the first are dependent, or anything else.
  struct Operation {
    std::function<void()> run;
    std::shared_ptr<std::vector<Grid>> launches;
  };
  std::vector<Operation> operations;
};

struct Stream::Impl {
  Queue* const queue = TakeQueue();
  const std::shared_ptr<size_t> pending = std::make_shared<size_t>(0);  // by the queue's mutex
  std::unique_ptr<Graph::Impl> capture;                                 // while capturing
  bool dependent = false, behind_launch = false;                        // as in gpu_cuda.cc

  ~Impl() {
    std::lock_guard lock(queues().mutex);
    --queue->streams;
  }

  // What cannot be part of a graph.
  void RequireNoCapture() const {
    Check();
    if (capture) Fail("events, waits, host functions and graphs cannot be captured; use them around the graph's launch");
  }

  void Enqueue(std::function<void()> run, uint64_t work = 1) {
    Check();
    if (capture) {
      behind_launch = false;
      capture->operations.push_back({std::move(run), nullptr});
      return;
    }
    std::unique_lock lock(queue->mutex);
    while (*pending >= kQueueOperations && !device().hung) queue->changed.wait_for(lock, kSlice);
    ++*pending;
    queue->operations.push_back({std::move(run), work, device().life, pending});
    queue->changed.notify_all();
  }
};

Stream::Stream(Priority) {
  Check();
  impl_ = std::make_unique<Impl>();
}
Stream::~Stream() = default;

WaitAtEnd::~WaitAtEnd() {
  if (device().abandoned) return;
  try {
    if (!stream_.Synchronize(deadline_us_)) Abandon();
  } catch (const std::exception&) {
    Abandon();
  }
}

namespace {

void AwaitCopyEngine() {
  for (const uint64_t life = device().life; device().copies_held && life == device().life;) std::this_thread::sleep_for(kSlice);
}

// For tests of what has to notice it: copies of KVTIER_EMULATED_LOST bytes each, out of pinned host memory, bring nothing.
bool IsLost(const void* source, size_t bytes) {
  static const char* const text = getenv("KVTIER_EMULATED_LOST");
  if (text == nullptr || bytes != strtoull(text, nullptr, 10)) return false;
  const auto address = reinterpret_cast<uintptr_t>(source);
  std::lock_guard lock(device().mutex);
  const auto& ranges = device().host_ranges;
  const auto next = ranges.upper_bound(address);
  return next != ranges.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace

void Stream::Copy(void* target, const void* source, size_t bytes) {
  impl_->Enqueue([=] {
    AwaitCopyEngine();
    if (!IsLost(source, bytes)) memmove(target, source, bytes);
  });
}
void Stream::CopyPieces(std::span<const Piece> pieces) {
  for (size_t i = pieces.size(); i-- > 0;) Copy(pieces[i].target, pieces[i].source, pieces[i].bytes);  // in any order
}
void Stream::Copy2D(void* target, size_t target_stride, const void* source, size_t source_stride, size_t bytes, size_t rows) {
  if (bytes > target_stride || bytes > source_stride) Fail("Copy2D: a row is longer than its stride");
  if (target_stride > kMaxPitchBytes || source_stride > kMaxPitchBytes) Fail("2D copy: invalid pitch argument; a defect of kvtier: report it");
  impl_->Enqueue([=] {
    AwaitCopyEngine();
    if (IsLost(source, bytes)) return;
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
      [life = device().life.load(), state, wanted] {
        std::unique_lock lock(state->mutex);
        while (state->done < wanted && life == device().life) state->changed.wait_for(lock, kSlice);
      },
      0);
}

void Stream::Host(std::function<void()> work) {
  impl_->RequireNoCapture();
  impl_->Enqueue(std::move(work));
}

bool Stream::Synchronize(int64_t deadline_us) {
  impl_->RequireNoCapture();
  const auto deadline = Clock::now() + std::chrono::microseconds(deadline_us);
  std::unique_lock lock(impl_->queue->mutex);
  const bool idle = impl_->queue->changed.wait_until(lock, deadline, [&] { return *impl_->pending == 0; });
  lock.unlock();
  Check();
  return idle;
}

void Stream::BeginCapture(bool dependent) {
  impl_->RequireNoCapture();
  impl_->dependent = dependent;
  impl_->behind_launch = false;
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
  for (const auto& [run, launches] : graph.impl->operations) {
    if (!launches) {
      impl_->Enqueue(run);
    } else {
      impl_->Enqueue([launches] { RunGrids(*launches); }, launches->size());
    }
  }
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
      0);
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

void* NativeStream(Stream& stream) {
  stream.impl()->behind_launch = false;
  return nullptr;
}

// As with CUDA's lazy loading: the first launch of a kernel loads it, and waits for all that the device has to do, with whoever launches it.
void AwaitLoaded(const char* name) {
  {
    std::lock_guard lock(device().mutex);
    if (!device().loaded_kernels.insert(name).second) return;
  }
  if (!DrainQueues(false)) Fail(std::string("kernel ") + name + ": its first launch waits for what waits for its caller; launch it at the start");
}

void ForgetKernels() {
  std::lock_guard lock(device().mutex);
  device().loaded_kernels.clear();
}

void LaunchRaw(Stream& stream, const LaunchArgs& args) {
  const Dim &grid = args.grid, &block = args.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffff || grid.y - 1 >= 65535 ||
      grid.z - 1 >= 65535) {
    Fail(std::string("kernel ") + args.name + ": a grid or block that no GPU takes");
  }
  if (args.shared_bytes > SharedBytesPerBlock()) Fail(std::string("kernel ") + args.name + ": too much shared memory");
  const Grid launch{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, args.shared_bytes, args.emulated, args.name};
  Stream::Impl& to = *stream.impl();
  if (!to.capture) {
    AwaitLoaded(args.name);
    return to.Enqueue([launch] { RunGrids({&launch, 1}); });
  }
  Check();
  auto& operations = to.capture->operations;
  if (args.dependent && to.dependent && to.behind_launch) {
    operations.back().launches->push_back(launch);
  } else {
    operations.push_back({nullptr, std::make_shared<std::vector<Grid>>(1, launch)});
  }
  to.behind_launch = true;
}

}  // namespace kvtier::gpu
