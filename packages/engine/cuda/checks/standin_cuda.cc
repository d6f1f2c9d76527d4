// A library with the entry points of CUDA's driver that runs on the emulator: libkvtier's copies are tested by the very file
// that ships, where there is no GPU. Strict where that finds mistakes: a thread without a context, an unknown handle or a
// kernel that the module does not have is an error of the kind that the driver gives. Device memory can be read by the CPU.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../gpu/gpu.h"
#include "../kernels/transfer_kernels.h"

using namespace kvtier;

#define ENTRY extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kAlreadyRegistered = 712, kNotFound = 500, kNotReady = 600,
              kIllegalAddress = 700, kNotSupported = 801, kInvalidHandle = 400, kCaptureUnsupported = 900;
// A context is a word: its device's number. The two devices have memory and streams in common.
constexpr int kDevices = 2;
int contexts[kDevices] = {0, 1};
thread_local std::vector<void*> current;  // contexts, or null

std::mutex mutex;
std::map<void*, std::unique_ptr<gpu::Buffer>> buffers;
std::map<void*, std::unique_ptr<gpu::PinnedBuffer>> pinned;
std::set<void*> streams, events;
std::string module;
int refuse_pinning = 0, refuse_memory = 0;
// An engine captures a graph, for all threads. What threads begin with, and what they must ask for to be let alone.
constexpr int kGlobalMode = 0, kRelaxedMode = 2;
thread_local int capture_mode = kGlobalMode;
std::atomic<bool> capturing{false};
std::atomic<int> captures_broken{0};
std::atomic<int> giving_back{0};  // calls that give memory back and have not come back: they wait for the device
size_t registered_bytes = 0;
std::map<void*, size_t> registered;

enum Kernel : intptr_t { kGather = 1, kScatter, kHash, kExport, kImport, kSumRows, kChainRows };

bool HasContext() {
  return !current.empty() && std::ranges::any_of(contexts, [](const int& one) { return current.back() == &one; });
}

// What `call` throws, as a status.
template <class Call>
int Guard(const Call& call) {
  if (!HasContext()) return kInvalidContext;
  try {
    return call();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (text.find("do not fit") != std::string::npos) return kOutOfMemory;
    if (text.find("illegal") != std::string::npos) return kIllegalAddress;
    if (text.find("registered already") != std::string::npos) return kAlreadyRegistered;
    return kInvalidValue;
  }
}

// Of calls that end a capture of another thread: what allocates, frees, pins, unpins or asks whether something has ended.
template <class Call>
int GuardUnsafe(const Call& call) {
  if (capturing && capture_mode != kRelaxedMode) {
    ++captures_broken;
    return kCaptureUnsupported;
  }
  return Guard(call);
}

// Of calls that give memory back.
template <class Call>
int GuardFree(const Call& call) {
  ++giving_back;
  const int status = GuardUnsafe(call);
  --giving_back;
  return status;
}

gpu::Stream* StreamOf(void* handle) {
  static gpu::Stream& null_stream = *new gpu::Stream;
  if (handle == nullptr) return &null_stream;
  const std::lock_guard lock(mutex);
  return streams.contains(handle) ? static_cast<gpu::Stream*>(handle) : nullptr;
}
gpu::Event* EventOf(void* handle) {
  const std::lock_guard lock(mutex);
  return events.contains(handle) ? static_cast<gpu::Event*>(handle) : nullptr;
}

template <class... Params>
void Run(gpu::Stream& stream, const char* name, void (*kernel)(Params...), gpu::Dim grid, gpu::Dim block, size_t shared, void** arguments) {
  size_t at = 0;
  const auto next = [&]<class T>(T*) { return *static_cast<T*>(arguments[at++]); };
  const std::tuple<Params...> values{next(static_cast<Params*>(nullptr))...};
  std::apply([&](auto... value) { gpu::Launch(stream, name, kernel, grid, block, shared, value...); }, values);
}

}  // namespace

// For tests. 0: none, 1: the next operation hangs, 2: it is an illegal access; 0 also ends what hangs.
ENTRY kvtier_standin_fault(int fault) {
  gpu::Inject(fault == 1 ? gpu::Fault::kHang : fault == 2 ? gpu::Fault::kIllegalAccess : gpu::Fault::kNone);
  return 0;
}
// The status that pinning gives from now on; 0: it works.
ENTRY kvtier_standin_refuse_pinning(int status) {
  refuse_pinning = status;
  return 0;
}
// The same of memory that is pinned from its beginning.
ENTRY kvtier_standin_refuse_memory(int status) {
  refuse_memory = status;
  return 0;
}
extern "C" __attribute__((visibility("default"))) size_t kvtier_standin_registered_bytes() {
  const std::lock_guard lock(mutex);
  return registered_bytes;
}
// How many buffers are pinned from their beginning.
extern "C" __attribute__((visibility("default"))) size_t kvtier_standin_pinned_buffers() {
  const std::lock_guard lock(mutex);
  return pinned.size();
}
ENTRY kvtier_standin_giving_back() { return giving_back; }
// A stream that stands still until it is let go.
struct kvtier_standin_gate {
  gpu::Stream stream;
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
};
extern "C" __attribute__((visibility("default"))) void* kvtier_standin_held_stream(void** gate) {
  gpu::Use(0);
  auto* held = new kvtier_standin_gate;
  held->stream.Host([held] {
    std::unique_lock lock(held->mutex);
    held->changed.wait(lock, [held] { return held->open; });
  });
  *gate = held;
  const std::lock_guard lock(mutex);
  streams.insert(&held->stream);
  return &held->stream;
}
// Writes `value` to the memory behind what the stream did before.
ENTRY kvtier_standin_set(void* stream, void* target, int value, size_t bytes) {
  return Guard([&] {
    StreamOf(stream)->Set(target, static_cast<uint8_t>(value), bytes);
    return 0;
  });
}
ENTRY kvtier_standin_open(void* gate) {
  auto* held = static_cast<kvtier_standin_gate*>(gate);
  const std::lock_guard lock(held->mutex);
  held->open = true;
  held->changed.notify_all();
  return 0;
}

// 1: an engine's thread captures a graph. Answers how many captures were ended by calls of others since it was asked last.
ENTRY kvtier_standin_capturing(int wanted) {
  capturing = wanted != 0;
  return captures_broken.exchange(0);
}
ENTRY cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

ENTRY cuInit(unsigned) { return 0; }
ENTRY cuGetErrorName(int status, const char** name) {
  static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                                                   {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
                                                   {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(status);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}
ENTRY cuGetErrorString(int status, const char** text) {
  *text = status == kNotSupported ? "operation not supported" : "an error of the emulated driver";
  return 0;
}
ENTRY cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? 0 : 101;
}
ENTRY cuDeviceGetName(char* name, int bytes, int) {
  strncpy(name, "emulated", static_cast<size_t>(bytes));
  return 0;
}
ENTRY cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 11: *value = INT32_MAX; return 0;
    case 16: *value = 4; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
    default: return kInvalidValue;
  }
}
ENTRY cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}
ENTRY cuCtxSetCurrent(void* context) {
  if (current.empty()) current.push_back(nullptr);
  current.back() = context;
  gpu::Use(0);
  return 0;
}
ENTRY cuCtxPushCurrent_v2(void* context) {
  current.push_back(context);
  gpu::Use(0);
  return 0;
}
ENTRY cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
ENTRY cuCtxGetDevice(int* device) {
  if (!HasContext()) return kInvalidContext;
  *device = *static_cast<int*>(current.back());
  return 0;
}
ENTRY cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
ENTRY cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return Guard([&] {
    const gpu::DeviceInfo info = gpu::Info();
    *free_bytes = info.free_bytes;
    *total_bytes = info.total_bytes;
    return 0;
  });
}
ENTRY cuMemAlloc_v2(void** data, size_t bytes) {
  return GuardUnsafe([&] {
    auto buffer = std::make_unique<gpu::Buffer>(bytes, "the emulated driver");
    *data = buffer->data();
    const std::lock_guard lock(mutex);
    buffers[*data] = std::move(buffer);
    return 0;
  });
}
ENTRY cuMemFree_v2(void* data) {
  return GuardFree([&] {
    std::unique_lock lock(mutex);
    auto node = buffers.extract(data);
    lock.unlock();
    return node.empty() ? kInvalidValue : 0;
  });
}
ENTRY cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  if (refuse_memory != 0) return refuse_memory;
  return GuardUnsafe([&] {
    auto buffer = std::make_unique<gpu::PinnedBuffer>(bytes, "the emulated driver");
    *data = buffer->data();
    const std::lock_guard lock(mutex);
    pinned[*data] = std::move(buffer);
    return 0;
  });
}
ENTRY cuMemFreeHost(void* data) {
  return GuardFree([&] {
    std::unique_lock lock(mutex);
    auto node = pinned.extract(data);
    lock.unlock();
    return node.empty() ? kInvalidValue : 0;
  });
}
ENTRY cuMemHostRegister_v2(void* base, size_t bytes, unsigned) {
  if (refuse_pinning != 0) return refuse_pinning;
  return GuardUnsafe([&] {
    gpu::RegisterHost(base, bytes);
    const std::lock_guard lock(mutex);
    registered[base] = bytes;
    registered_bytes += bytes;
    return 0;
  });
}
ENTRY cuMemHostUnregister(void* base) {
  return GuardFree([&] {
    gpu::UnregisterHost(base);
    const std::lock_guard lock(mutex);
    registered_bytes -= registered[base];
    registered.erase(base);
    return 0;
  });
}
ENTRY cuMemHostGetDevicePointer_v2(void** view, void* host, unsigned) {
  return Guard([&] {
    *view = gpu::DeviceView(host);
    return 0;
  });
}
ENTRY cuMemcpyAsync(void* target, const void* source, size_t bytes, void* stream) {
  return Guard([&] {
    StreamOf(stream)->Copy(target, source, bytes);
    return 0;
  });
}
struct Copy2DArgs {
  size_t source_x, source_y;
  int source_type;
  const void* source_host;
  const void* source;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  int target_type;
  void* target_host;
  void* target;
  void* target_array;
  size_t target_pitch, bytes, rows;
};
ENTRY cuMemcpy2DAsync_v2(const Copy2DArgs* args, void* stream) {
  return Guard([&] {
    if (args->source_type != 4 || args->target_type != 4) return kInvalidValue;
    StreamOf(stream)->Copy2D(args->target, args->target_pitch, args->source, args->source_pitch, args->bytes, args->rows);
    return 0;
  });
}
struct CopyAttributes {
  int source_order, source_hint[2], target_hint[2];
  unsigned flags;
};
ENTRY cuMemcpyBatchAsync_v2(void** targets, void** sources, size_t* sizes, size_t count, CopyAttributes* attributes, size_t* firsts, size_t kinds,
                            void* stream) {
  return Guard([&] {
    if (kinds != 1 || firsts[0] != 0 || attributes->source_order != 1 || count == 0) return kInvalidValue;
    std::vector<gpu::Stream::Piece> pieces;
    for (size_t i = 0; i < count; ++i) pieces.push_back({targets[i], sources[i], sizes[i]});
    StreamOf(stream)->CopyPieces(pieces);
    return 0;
  });
}
ENTRY cuStreamCreateWithPriority(void** stream, unsigned, int) {
  return Guard([&] {
    *stream = new gpu::Stream;
    const std::lock_guard lock(mutex);
    streams.insert(*stream);
    return 0;
  });
}
ENTRY cuStreamDestroy_v2(void* stream) {
  return Guard([&] {
    {
      const std::lock_guard lock(mutex);
      if (streams.erase(stream) == 0) return kInvalidHandle;
    }
    delete static_cast<gpu::Stream*>(stream);
    return 0;
  });
}
ENTRY cuStreamQuery(void* stream) {
  return GuardUnsafe([&] { return StreamOf(stream)->Synchronize(0) ? 0 : kNotReady; });
}
ENTRY cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return Guard([&] {
    StreamOf(stream)->Wait(*EventOf(event));
    return 0;
  });
}
ENTRY cuEventCreate(void** event, unsigned flags) {
  return Guard([&] {
    *event = new gpu::Event(flags == 0);
    const std::lock_guard lock(mutex);
    events.insert(*event);
    return 0;
  });
}
ENTRY cuEventDestroy_v2(void* event) {
  return Guard([&] {
    {
      const std::lock_guard lock(mutex);
      if (events.erase(event) == 0) return kInvalidHandle;
    }
    delete static_cast<gpu::Event*>(event);
    return 0;
  });
}
ENTRY cuEventRecord(void* event, void* stream) {
  return Guard([&] {
    gpu::Stream* to = StreamOf(stream);
    if (to == nullptr) return kInvalidHandle;
    EventOf(event)->Record(*to);
    return 0;
  });
}
ENTRY cuEventQuery(void* event) {
  return GuardUnsafe([&] { return EventOf(event)->Done() ? 0 : kNotReady; });
}
ENTRY cuEventElapsedTime(float* ms, void* from, void* to) {
  return Guard([&] {
    *ms = static_cast<float>(gpu::Event::ElapsedUs(*EventOf(from), *EventOf(to)) / 1000);
    return 0;
  });
}
ENTRY cuModuleLoadData(void** handle, const void* image) {
  return GuardUnsafe([&] {
    module = static_cast<const char*>(image);
    if (module.find(".target sm_80") == std::string::npos) return kInvalidValue;
    *handle = &module;
    return 0;
  });
}
ENTRY cuModuleGetFunction(void** function, void* handle, const char* name) {
  return Guard([&] {
    static const std::map<std::string, Kernel> kernels = {
        {"kvtier_gather_pieces", kGather}, {"kvtier_scatter_pieces", kScatter}, {"kvtier_hash_blocks", kHash}, {"kvtier_export_blocks", kExport},
        {"kvtier_import_blocks", kImport}, {"kvtier_sum_rows", kSumRows}, {"kvtier_chain_rows", kChainRows}};
    const auto found = kernels.find(name);
    if (handle != &module || found == kernels.end()) return kNotFound;
    if (module.find(".visible .entry " + found->first + "(") == std::string::npos) return kNotFound;
    *function = reinterpret_cast<void*>(found->second);
    return 0;
  });
}
ENTRY cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                     void* stream, void** arguments, void**) {
  return Guard([&] {
    gpu::Stream& to = *StreamOf(stream);
    const gpu::Dim grid{gx, gy, gz}, block{bx, by, bz};
    switch (reinterpret_cast<intptr_t>(function)) {
      case kGather: Run(to, "gather_pieces", kvtier_gather_pieces, grid, block, shared, arguments); return 0;
      case kScatter: Run(to, "scatter_pieces", kvtier_scatter_pieces, grid, block, shared, arguments); return 0;
      case kHash: Run(to, "hash_blocks", kvtier_hash_blocks, grid, block, shared, arguments); return 0;
      case kExport: Run(to, "export_blocks", kvtier_export_blocks, grid, block, shared, arguments); return 0;
      case kImport: Run(to, "import_blocks", kvtier_import_blocks, grid, block, shared, arguments); return 0;
      case kSumRows: Run(to, "sum_rows", kvtier_sum_rows, grid, block, shared, arguments); return 0;
      case kChainRows: Run(to, "chain_rows", kvtier_chain_rows, grid, block, shared, arguments); return 0;
      default: return kInvalidHandle;
    }
  });
}
