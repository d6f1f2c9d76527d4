// What the worker needs of a GPU's runtime, and no more: memory, streams, events, graphs, launches. Two implementations:
// gpu_cuda.cc over the CUDA runtime, and gpu_emulated.cc, where a stream is a thread and a kernel runs on emulator.h, so that
// everything above can be tested where there is no GPU: with real asynchrony, so that a missing wait shows.
//
// Errors are std::runtime_error("GPU: what; where; how to mend it"). After an illegal access or a hung kernel every call of the
// process fails with it (CUDA's sticky errors): the worker must end, its supervisor starts a new one.
// Deadlines are microseconds from now. Between BeginCapture and EndCapture only copies, sets and launches are allowed.
//
// The end of a Stream, Event or Graph does not wait for what was enqueued: WaitAtEnd does, where buffers follow that it uses.
// Freeing a buffer and unregistering memory wait for the whole device on CUDA, for ever when a kernel hangs: whoever sees a
// deadline pass calls Abandon first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "device.h"

namespace kvtier::gpu {

struct DeviceInfo {
  std::string name;
  int compute_capability;  // 10 * major + minor: 80, 90, 100
  int multiprocessors;
  size_t total_bytes, free_bytes;
  size_t shared_bytes_per_block;  // with opt-in
  size_t max_pitch_bytes;         // of Copy2D
  bool emulated;
  int driver_version = 0;  // 1000 * major + 10 * minor of the CUDA that the driver serves
};

// Memory of the device that is not there; nothing else has happened.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Devices that can be used; 0 where there is no GPU or no driver: never throws. `why` says what is missing, in one line.
int DeviceCount(std::string* why);
// Makes device `index` the current one of this thread and creates its context. Every thread that calls below needs it once.
void Use(int index);
DeviceInfo Info();

// The device does not answer: from now on nothing is given back to it (free, unregister), so that no destructor waits for it.
// The process has to end.
void Abandon() noexcept;
bool Abandoned() noexcept;

// What a buffer consists of. `what` names the owner in the error when it does not fit.
struct DeviceMemory {
  static void* Allocate(size_t bytes, const std::string& what);
  static void Free(void* data, size_t bytes) noexcept;
};
struct PinnedMemory {
  static void* Allocate(size_t bytes, const std::string& what);
  static void Free(void* data, size_t bytes) noexcept;
};

// Memory that frees itself; empty, it allocates nothing.
template <class Memory>
class OwnedBuffer {
 public:
  OwnedBuffer() = default;
  OwnedBuffer(size_t bytes, const std::string& what) : data_(bytes == 0 ? nullptr : Memory::Allocate(bytes, what)), bytes_(bytes) {}
  OwnedBuffer(OwnedBuffer&& other) noexcept { *this = std::move(other); }
  OwnedBuffer& operator=(OwnedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~OwnedBuffer() {
    if (data_ != nullptr) Memory::Free(data_, bytes_);
  }
  template <class T = uint8_t>
  T* data() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Device memory, zeroed or not.
using Buffer = OwnedBuffer<DeviceMemory>;
// Pinned host memory of our own, mapped into the device's address space.
using PinnedBuffer = OwnedBuffer<PinnedMemory>;

// Pins memory that exists (a piece of the arena) and maps it for the device. Page-aligned.
void RegisterHost(void* base, size_t bytes);
void UnregisterHost(void* base) noexcept;
// Where kernels see registered or pinned host memory (with unified addressing: the same address).
void* DeviceView(void* host);

class Event;
class Graph;

class Stream {
 public:
  enum class Priority { kHigh, kNormal, kLow };
  explicit Stream(Priority priority = Priority::kNormal);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Copy(void* target, const void* source, size_t bytes);  // any direction, by address
  // `rows` pieces of `bytes`, at these distances, each at most max_pitch_bytes.
  void Copy2D(void* target, size_t target_stride, const void* source, size_t source_stride, size_t bytes, size_t rows);
  // Several copies in any order among themselves: one call of the runtime where it has one for them. Not captured.
  struct Piece {
    void* target;
    const void* source;
    size_t bytes;
  };
  void CopyPieces(std::span<const Piece> pieces);
  void Set(void* target, uint8_t value, size_t bytes);
  void Wait(const Event& event);
  // Runs `work` on a thread of the runtime when all before it has ended; it must not call this interface.
  void Host(std::function<void()> work);
  // False when `deadline_us` passes first. Throws what the device reports.
  bool Synchronize(int64_t deadline_us);

  // What is put into this stream until EndCapture becomes a graph instead of running. `dependent`: with launches that begin before the
  // one before them has ended (LaunchDependent).
  void BeginCapture(bool dependent = false);
  Graph EndCapture();
  void Launch(const Graph& graph);

  struct Impl;
  Impl* impl() const { return impl_.get(); }

 private:
  std::unique_ptr<Impl> impl_;
};

// Waits for a stream when it goes out of scope: declared after the buffers that the stream uses, it ends before them. Past the
// deadline, or after an error of the device, the device is abandoned.
class WaitAtEnd {
 public:
  WaitAtEnd(Stream& stream, int64_t deadline_us) : stream_(stream), deadline_us_(deadline_us) {}
  ~WaitAtEnd();
  WaitAtEnd(const WaitAtEnd&) = delete;
  WaitAtEnd& operator=(const WaitAtEnd&) = delete;

 private:
  Stream& stream_;
  const int64_t deadline_us_;
};

class Event {
 public:
  explicit Event(bool timed = false);
  ~Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) noexcept;
  void Record(Stream& stream);
  // True once all before its last Record has ended (or if it was never recorded). Throws what the device reports.
  bool Done() const;
  // Waits without spinning hot; false when `deadline_us` passes first.
  bool Wait(int64_t deadline_us) const;
  // Both timed and done.
  static double ElapsedUs(const Event& from, const Event& to);

  struct Impl;
  Impl* impl() const { return impl_.get(); }

 private:
  std::unique_ptr<Impl> impl_;
};

class Graph {
 public:
  Graph();
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// The runtime's own stream, for libraries that enqueue by themselves: a cudaStream_t; null on the emulator. What is launched next depends on
// whatever they did in full.
void* NativeStream(Stream& stream);

// One launch, untyped. `kernel` is the host stub of a __global__ function on CUDA; `emulated` calls it once per thread there.
struct LaunchArgs {
  const void* kernel;
  Dim grid, block;
  size_t shared_bytes;
  void** arguments;                  // CUDA
  std::function<void()> emulated;    // the emulator
  const char* name;
  bool dependent;
};
void LaunchRaw(Stream& stream, const LaunchArgs& args);

template <class... Params, class... Args>
void LaunchAs(bool dependent, Stream& stream, const char* name, void (*kernel)(Params...), Dim grid, Dim block, size_t shared_bytes,
              Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args));
  std::tuple<std::decay_t<Params>...> values(static_cast<std::decay_t<Params>>(args)...);
#if defined(KVTIER_EMULATED)
  LaunchRaw(stream, {nullptr, grid, block, shared_bytes, nullptr, [kernel, values] { std::apply(kernel, values); }, name, dependent});
#else
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {static_cast<void*>(&value)..., nullptr};
        LaunchRaw(stream, {reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, pointers, {}, name, dependent});
      },
      values);
#endif
}

// Launch(stream, "name", Kernel<T>, {grid}, {block}, shared_bytes, arguments...): arguments are converted to the kernel's
// parameter types and copied. Shared memory above 48 KiB is asked for by itself.
template <class... Params, class... Args>
void Launch(Stream& stream, const char* name, void (*kernel)(Params...), Dim grid, Dim block, size_t shared_bytes, Args... args) {
  LaunchAs(false, stream, name, kernel, grid, block, shared_bytes, args...);
}

// The same for a kernel each of whose threads calls WaitForPrevious (device.h): programmatic dependent launch. Right behind another launch,
// in a capture that allows it, on sm_90 and newer, its blocks take their places and do what needs no result of others while that one still
// runs. Everywhere else it is Launch. Every launch waits for all before it, so that buffers are free to be used again.
template <class... Params, class... Args>
void LaunchDependent(Stream& stream, const char* name, void (*kernel)(Params...), Dim grid, Dim block, size_t shared_bytes, Args... args) {
  LaunchAs(true, stream, name, kernel, grid, block, shared_bytes, args...);
}

#if defined(KVTIER_EMULATED)
// Faults for tests of what stands above: the next operation of any stream hangs, fails as an illegal access would, or the
// next allocation does not fit. kNone: as in a fresh process; what was enqueued and has not run is dropped.
enum class Fault { kNone, kHang, kIllegalAccess, kOutOfMemory };
void Inject(Fault fault);
// Kernels are loaded by their first launch, as in a process that has just begun.
void ForgetKernels();
// While they are held no copy of any stream begins: the copy engines have other things to do.
void HoldCopies(bool held);
// From now on the device has so many bytes; 0: as many as in a fresh process.
void TellMemory(size_t total_bytes);
#endif

}  // namespace kvtier::gpu
