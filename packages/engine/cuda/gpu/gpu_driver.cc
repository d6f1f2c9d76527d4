// gpu.h over CUDA's driver API, which is opened at run time: for libkvtier, one object that serves machines with and without a
// GPU and lives in an engine's process, whose CUDA runtime it neither needs nor disturbs. Of gpu.h it has what transfer/ uses.
// Devices are CUDA's own numbers, with the context that the engine's runtime has (the primary one). Kernels come as PTX.
//
// Waits poll, as in gpu_cuda.cc.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

#include "driver.h"
#include "pin_remedy.h"
#include "poll.h"

// The PTX as it lies in the file, ended by a zero.
asm(".section .rodata\n"
    ".balign 16\n"
    "kvtier_transfer_ptx:\n"
    ".incbin \"" KVTIER_TRANSFER_PTX "\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const char kvtier_transfer_ptx[];

namespace kvtier::gpu {
namespace {

using Status = int;
using Address = unsigned long long;
using Handle = void*;

constexpr Status kSuccess = 0, kNotReady = 600;
constexpr int kMaxPitch = 11, kMultiprocessors = 16, kMajor = 75, kMinor = 76;  // attributes
constexpr int kLeastCapability = 80;
constexpr unsigned kNonBlocking = 1, kNoTiming = 2, kPortableMapped = 1 | 2;
constexpr int kUnified = 4;  // memory that says itself where it lies
constexpr int kInStreamOrder = 1;
constexpr unsigned kBesideCompute = 1;
constexpr int kRelaxedCapture = 2, kUnknownCapture = -1;

struct Copy2DArgs {
  size_t source_x = 0, source_y = 0;
  int source_type = kUnified;
  const void* source_host = nullptr;
  Address source = 0;
  Handle source_array = nullptr;
  size_t source_pitch = 0;
  size_t target_x = 0, target_y = 0;
  int target_type = kUnified;
  void* target_host = nullptr;
  Address target = 0;
  Handle target_array = nullptr;
  size_t target_pitch = 0;
  size_t bytes = 0, rows = 0;
};

// Of several copies; an engine's own memory needs no hints of where it lies.
struct CopyAttributes {
  int source_order = kInStreamOrder;
  int source_hint[2] = {}, target_hint[2] = {};
  unsigned flags = kBesideCompute;  // multiprocessors are the model's
};

// Its entry points, by the names that they have had since CUDA 4 and earlier, but for two.
struct Driver {
  Status (*cuInit)(unsigned);
  Status (*cuGetErrorName)(Status, const char**);
  Status (*cuGetErrorString)(Status, const char**);
  Status (*cuDeviceGet)(int*, int);
  Status (*cuDeviceGetName)(char*, int, int);
  Status (*cuDeviceGetAttribute)(int*, int, int);
  Status (*cuDevicePrimaryCtxRetain)(Handle*, int);
  Status (*cuCtxSetCurrent)(Handle);
  Status (*cuCtxPushCurrent_v2)(Handle);
  Status (*cuCtxPopCurrent_v2)(Handle*);
  Status (*cuCtxGetDevice)(int*);
  Status (*cuThreadExchangeStreamCaptureMode)(int*);  // null before CUDA 10.1
  Status (*cuCtxGetStreamPriorityRange)(int*, int*);
  Status (*cuMemGetInfo_v2)(size_t*, size_t*);
  Status (*cuMemAlloc_v2)(Address*, size_t);
  Status (*cuMemFree_v2)(Address);
  Status (*cuMemHostAlloc)(void**, size_t, unsigned);
  Status (*cuMemFreeHost)(void*);
  Status (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  Status (*cuMemHostUnregister)(void*);
  Status (*cuMemHostGetDevicePointer_v2)(Address*, void*, unsigned);
  Status (*cuMemcpyAsync)(Address, Address, size_t, Handle);
  Status (*cuMemcpy2DAsync_v2)(const Copy2DArgs*, Handle);
  Status (*cuMemcpyBatchAsync_v2)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t, Handle);  // null before CUDA 13
  Status (*cuStreamCreateWithPriority)(Handle*, unsigned, int);
  Status (*cuStreamDestroy_v2)(Handle);
  Status (*cuStreamQuery)(Handle);
  Status (*cuStreamWaitEvent)(Handle, Handle, unsigned);
  Status (*cuEventCreate)(Handle*, unsigned);
  Status (*cuEventDestroy_v2)(Handle);
  Status (*cuEventRecord)(Handle, Handle);
  Status (*cuEventQuery)(Handle);
  Status (*cuEventElapsedTime)(float*, Handle, Handle);
  Status (*cuModuleLoadData)(Handle*, const void*);
  Status (*cuModuleGetFunction)(Handle*, Handle, const char*);
  Status (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
};

std::string Opened(Driver& driver) {
  const char* named = std::getenv("KVTIER_CUDA_DRIVER");
  const std::string name = named == nullptr ? "libcuda.so.1" : named;
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "no NVIDIA driver (" + name + ") on this machine; install one";
  std::string missing;
  const auto find = [&](auto& entry, const char* symbol) {
    entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(dlsym(library, symbol));
    if (entry == nullptr) missing = symbol;
  };
#define KVTIER_FIND(symbol) find(driver.symbol, #symbol)
  KVTIER_FIND(cuInit);
  KVTIER_FIND(cuGetErrorName);
  KVTIER_FIND(cuGetErrorString);
  KVTIER_FIND(cuDeviceGet);
  KVTIER_FIND(cuDeviceGetName);
  KVTIER_FIND(cuDeviceGetAttribute);
  KVTIER_FIND(cuDevicePrimaryCtxRetain);
  KVTIER_FIND(cuCtxSetCurrent);
  KVTIER_FIND(cuCtxPushCurrent_v2);
  KVTIER_FIND(cuCtxPopCurrent_v2);
  KVTIER_FIND(cuCtxGetDevice);
  KVTIER_FIND(cuCtxGetStreamPriorityRange);
  KVTIER_FIND(cuMemGetInfo_v2);
  KVTIER_FIND(cuMemAlloc_v2);
  KVTIER_FIND(cuMemFree_v2);
  KVTIER_FIND(cuMemHostAlloc);
  KVTIER_FIND(cuMemFreeHost);
  KVTIER_FIND(cuMemHostRegister_v2);
  KVTIER_FIND(cuMemHostUnregister);
  KVTIER_FIND(cuMemHostGetDevicePointer_v2);
  KVTIER_FIND(cuMemcpyAsync);
  KVTIER_FIND(cuMemcpy2DAsync_v2);
  KVTIER_FIND(cuStreamCreateWithPriority);
  KVTIER_FIND(cuStreamDestroy_v2);
  KVTIER_FIND(cuStreamQuery);
  KVTIER_FIND(cuStreamWaitEvent);
  KVTIER_FIND(cuEventCreate);
  KVTIER_FIND(cuEventDestroy_v2);
  KVTIER_FIND(cuEventRecord);
  KVTIER_FIND(cuEventQuery);
  KVTIER_FIND(cuEventElapsedTime);
  KVTIER_FIND(cuModuleLoadData);
  KVTIER_FIND(cuModuleGetFunction);
  KVTIER_FIND(cuLaunchKernel);
#undef KVTIER_FIND
  driver.cuThreadExchangeStreamCaptureMode =
      reinterpret_cast<decltype(driver.cuThreadExchangeStreamCaptureMode)>(dlsym(library, "cuThreadExchangeStreamCaptureMode"));
  driver.cuMemcpyBatchAsync_v2 = reinterpret_cast<decltype(driver.cuMemcpyBatchAsync_v2)>(dlsym(library, "cuMemcpyBatchAsync_v2"));
  if (!missing.empty()) return "the NVIDIA driver (" + name + ") has no " + missing + "; update it";
  if (driver.cuInit(0) != kSuccess) return "the NVIDIA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  return "";
}

const Driver& driver() {
  static const Driver& one = []() -> const Driver& {
    auto* made = new Driver;
    if (const std::string why = Opened(*made); !why.empty()) {
      delete made;
      throw std::runtime_error("GPU: " + why);  // tried again at the next call
    }
    return *made;
  }();
  return one;
}

void Require(Status status, const std::string& what, const char* remedy = "restart the engine if this goes on") {
  if (status == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  (void)driver().cuGetErrorName(status, &name);
  (void)driver().cuGetErrorString(status, &text);
  throw std::runtime_error("GPU: " + what + ": " + (text == nullptr ? "error " + std::to_string(status) : text) + " (" +
                           (name == nullptr ? "?" : name) + "); " + remedy);
}

// Until what `query` asks for is done; false: not within `deadline_us`.
template <class Query>
bool Poll(const Query& query, int64_t deadline_us, const char* what) {
  return PollUntil(
      [&] {
        const Status state = query();
        if (state == kSuccess) return true;
        if (state != kNotReady) Require(state, what);
        return false;
      },
      deadline_us);
}

// A device's primary context and our kernels in it. Kept to the end of the process, as the engine's runtime keeps it.
struct Context {
  Handle context = nullptr, module = nullptr;
  std::map<std::string, Handle> kernels;
};
std::mutex contexts_mutex;
std::map<int, Context>& contexts() {
  static auto& all = *new std::map<int, Context>;
  return all;
}

Handle ContextOf(int device) {
  const std::lock_guard lock(contexts_mutex);
  const auto found = contexts().find(device);
  if (found != contexts().end()) return found->second.context;
  const std::string name = "device " + std::to_string(device);
  int number = 0, major = 0, minor = 0;
  Require(driver().cuDeviceGet(&number, device), name);
  Require(driver().cuDeviceGetAttribute(&major, kMajor, number), name);
  Require(driver().cuDeviceGetAttribute(&minor, kMinor, number), name);
  if (10 * major + minor < kLeastCapability) {
    throw std::runtime_error("GPU: " + name + " is not new enough: compute capability 8.0 (Ampere) or newer is needed");
  }
  Handle context = nullptr;
  Require(driver().cuDevicePrimaryCtxRetain(&context, number), "context of " + name);
  contexts()[device].context = context;
  return context;
}

Handle KernelOf(const char* name) {
  int device = 0;
  Require(driver().cuCtxGetDevice(&device), "current device");
  const std::lock_guard lock(contexts_mutex);
  Context& context = contexts().at(device);
  if (context.module == nullptr) Require(driver().cuModuleLoadData(&context.module, kvtier_transfer_ptx), "kernels of copies");
  Handle& kernel = context.kernels[name];
  if (kernel == nullptr) {
    Require(driver().cuModuleGetFunction(&kernel, context.module, (std::string("kvtier_") + name).c_str()), std::string("kernel ") + name);
  }
  return kernel;
}

Address At(const void* place) { return reinterpret_cast<Address>(place); }

// An engine that captures a graph does so for all threads, as torch does: one that then pins, allocates or asks for an event would end the
// capture, but for threads in this mode. What it was before; unknown where the driver does not say.
int ExchangeCaptureMode(int mode) {
  if (driver().cuThreadExchangeStreamCaptureMode == nullptr) return kUnknownCapture;
  return driver().cuThreadExchangeStreamCaptureMode(&mode) == kSuccess ? mode : kUnknownCapture;
}

std::atomic<bool> abandoned{false};

}  // namespace

void OpenDriver() { (void)driver(); }

void Use(int device) {
  Require(driver().cuCtxSetCurrent(ContextOf(device)), "device " + std::to_string(device));
  (void)ExchangeCaptureMode(kRelaxedCapture);
}

OnDevice::OnDevice(int device) {
  Require(driver().cuCtxPushCurrent_v2(ContextOf(device)), "device " + std::to_string(device));
  capture_mode_ = ExchangeCaptureMode(kRelaxedCapture);
}
OnDevice::~OnDevice() {
  if (capture_mode_ != kUnknownCapture) (void)ExchangeCaptureMode(capture_mode_);
  Handle popped = nullptr;
  (void)driver().cuCtxPopCurrent_v2(&popped);
}

void Abandon() noexcept { abandoned = true; }
bool Abandoned() noexcept { return abandoned; }

DeviceInfo Info() {
  int device = 0, pitch = 0, multiprocessors = 0, major = 0, minor = 0;
  Require(driver().cuCtxGetDevice(&device), "current device");
  Require(driver().cuDeviceGetAttribute(&pitch, kMaxPitch, device), "device properties");
  Require(driver().cuDeviceGetAttribute(&multiprocessors, kMultiprocessors, device), "device properties");
  Require(driver().cuDeviceGetAttribute(&major, kMajor, device), "device properties");
  Require(driver().cuDeviceGetAttribute(&minor, kMinor, device), "device properties");
  char name[256] = "";
  Require(driver().cuDeviceGetName(name, sizeof name, device), "device properties");
  DeviceInfo info{name, 10 * major + minor, multiprocessors, 0, 0, 0, static_cast<size_t>(pitch), false};
  Require(driver().cuMemGetInfo_v2(&info.free_bytes, &info.total_bytes), "memory info");
  return info;
}

void* DeviceMemory::Allocate(size_t bytes, const std::string& what) {
  Address data = 0;
  Require(driver().cuMemAlloc_v2(&data, bytes), what + ": " + std::to_string(bytes) + " bytes of GPU memory");
  return reinterpret_cast<void*>(data);
}
void DeviceMemory::Free(void* data, size_t) noexcept {
  if (!abandoned) (void)driver().cuMemFree_v2(At(data));
}

void* PinnedMemory::Allocate(size_t bytes, const std::string& what) {
  void* data = nullptr;
  Require(driver().cuMemHostAlloc(&data, bytes, kPortableMapped), what + ": " + std::to_string(bytes) + " bytes of pinned host memory");
  return data;
}
void PinnedMemory::Free(void* data, size_t) noexcept {
  if (!abandoned) (void)driver().cuMemFreeHost(data);
}

void RegisterHost(void* base, size_t bytes) {
  const Status status = driver().cuMemHostRegister_v2(base, bytes, kPortableMapped);
  Require(status, "pinning " + std::to_string(bytes) + " bytes of host memory", PinRemedy(status));
}
void UnregisterHost(void* base) noexcept {
  if (!abandoned) (void)driver().cuMemHostUnregister(base);
}
void* DeviceView(void* host) {
  Address view = 0;
  Require(driver().cuMemHostGetDevicePointer_v2(&view, host, 0), "host memory that is not registered");
  return reinterpret_cast<void*>(view);
}

struct Stream::Impl {
  Handle stream = nullptr;
  ~Impl() {
    if (stream != nullptr && !abandoned) (void)driver().cuStreamDestroy_v2(stream);
  }
};

Stream::Stream(Priority priority) : impl_(std::make_unique<Impl>()) {
  int least = 0, greatest = 0;
  Require(driver().cuCtxGetStreamPriorityRange(&least, &greatest), "stream priorities");
  const int value = priority == Priority::kHigh ? greatest : priority == Priority::kLow ? least : (least + greatest) / 2;
  Require(driver().cuStreamCreateWithPriority(&impl_->stream, kNonBlocking, value), "a new stream");
}
Stream::~Stream() = default;

void Stream::Copy(void* target, const void* source, size_t bytes) {
  Require(driver().cuMemcpyAsync(At(target), At(source), bytes, impl_->stream), "copy");
}
void Stream::CopyPieces(std::span<const Piece> pieces) {
  if (pieces.size() < 2 || driver().cuMemcpyBatchAsync_v2 == nullptr) {
    for (const Piece& piece : pieces) Copy(piece.target, piece.source, piece.bytes);
    return;
  }
  std::vector<Address> targets, sources;
  std::vector<size_t> sizes;
  for (const Piece& piece : pieces) {
    targets.push_back(At(piece.target));
    sources.push_back(At(piece.source));
    sizes.push_back(piece.bytes);
  }
  CopyAttributes attributes;
  size_t first = 0;  // of these attributes' copies
  Require(driver().cuMemcpyBatchAsync_v2(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1, impl_->stream), "copies");
}
void Stream::Copy2D(void* target, size_t target_stride, const void* source, size_t source_stride, size_t bytes, size_t rows) {
  Copy2DArgs args;
  args.source = At(source);
  args.source_pitch = source_stride;
  args.target = At(target);
  args.target_pitch = target_stride;
  args.bytes = bytes;
  args.rows = rows;
  Require(driver().cuMemcpy2DAsync_v2(&args, impl_->stream), "2D copy");
}
bool Stream::Synchronize(int64_t deadline_us) {
  return Poll([&] { return driver().cuStreamQuery(impl_->stream); }, deadline_us, "stream");
}

WaitAtEnd::~WaitAtEnd() {
  if (abandoned) return;
  try {
    if (!stream_.Synchronize(deadline_us_)) Abandon();
  } catch (const std::exception&) {
    Abandon();
  }
}

struct Event::Impl {
  Handle event = nullptr;
  ~Impl() {
    if (event != nullptr && !abandoned) (void)driver().cuEventDestroy_v2(event);
  }
};
Event::Event(bool timed) : impl_(std::make_unique<Impl>()) {
  Require(driver().cuEventCreate(&impl_->event, timed ? 0 : kNoTiming), "a new event");
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;

void Event::Record(Stream& stream) { RecordOn(*this, stream.impl()->stream); }
void RecordOn(Event& event, void* stream) { Require(driver().cuEventRecord(event.impl()->event, stream), "event"); }
bool Event::Done() const { return Wait(0); }
bool Event::Wait(int64_t deadline_us) const {
  return Poll([&] { return driver().cuEventQuery(impl_->event); }, deadline_us, "event");
}
double Event::ElapsedUs(const Event& from, const Event& to) {
  float ms = 0;
  Require(driver().cuEventElapsedTime(&ms, from.impl_->event, to.impl_->event), "time between events");
  return static_cast<double>(ms) * 1000;
}
void Stream::Wait(const Event& event) {
  Require(driver().cuStreamWaitEvent(impl_->stream, event.impl()->event, 0), "wait for an event");
}

void LaunchRaw(Stream& stream, const LaunchArgs& args) {
  const Status status = driver().cuLaunchKernel(KernelOf(args.name), args.grid.x, args.grid.y, args.grid.z, args.block.x, args.block.y,
                                                args.block.z, static_cast<unsigned>(args.shared_bytes), stream.impl()->stream,
                                                args.arguments, nullptr);
  if (status != kSuccess) Require(status, std::string("kernel ") + args.name);
}

}  // namespace kvtier::gpu
