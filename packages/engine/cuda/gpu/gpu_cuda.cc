// gpu.h over the CUDA runtime, which is linked statically: the module loads on a machine without a driver, and DeviceCount
// says what is missing there.
//
// Waits poll: the runtime's own waits have no deadline, and a hung kernel must not take its caller along.
#include "gpu.h"

#include <cuda_runtime.h>
#include <sys/prctl.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "connections.h"
#include "pin_remedy.h"
#include "poll.h"

namespace kvtier::gpu {
namespace {

constexpr int kLeastCapability = 80;
constexpr size_t kPlainSharedBytes = 48 << 10;  // what a block gets without asking

const char* Remedy(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "lower gpu.memoryUtilization (--gpu-memory-utilization), use a smaller model, or end what else uses this GPU";
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
      return "a defect of kvtier: report it";
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNoKernelImageForDevice:
      return "update the NVIDIA driver, or build on this machine: npm run test:gpu";
    default:
      return "the process must end, start it again; nvidia-smi shows the GPU's state";
  }
}

void Require(cudaError_t error, const std::string& what, const char* remedy) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // an error that is not sticky must not show up in the next call
  const std::string text = "GPU: " + what + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + "); " + remedy;
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw std::runtime_error(text);
}
void Require(cudaError_t error, const std::string& what) { Require(error, what, Remedy(error)); }

std::string Version(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// Indices of CUDA of the devices that are new enough.
std::vector<int> Usable(std::string* why) {
  AskForConnections();
  std::vector<int> usable;
  const auto because = [&](const std::string& text) {
    if (why != nullptr) *why = text;
    (void)cudaGetLastError();
    return usable;
  };
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return because("no NVIDIA driver (libcuda.so.1) on this machine; install one");
  }
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    return because("the NVIDIA driver is too old: it serves CUDA " + Version(driver) + ", needed is " + Version(CUDART_VERSION) +
                   "; update it");
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return because("the NVIDIA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (error != cudaSuccess) return because(std::string("CUDA cannot start: ") + cudaGetErrorString(error) + "; check nvidia-smi");
  for (int i = 0; i < count; ++i) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i) != cudaSuccess) continue;
    if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i) != cudaSuccess) continue;
    if (10 * major + minor >= kLeastCapability) usable.push_back(i);
  }
  if (usable.empty()) return because("no GPU here is new enough: compute capability 8.0 (Ampere) or newer is needed");
  if (why != nullptr) *why = "";
  return usable;
}

// Until what `query` asks for is done; false: not within `deadline_us`.
template <class Query>
bool Poll(const Query& query, int64_t deadline_us, const char* what) {
  return PollUntil(
      [&] {
        const cudaError_t state = query();
        if (state == cudaSuccess) return true;
        if (state != cudaErrorNotReady) Require(state, what);
        (void)cudaGetLastError();
        return false;
      },
      deadline_us);
}

int Attribute(cudaDeviceAttr attribute, int index) {
  int value = 0;
  Require(cudaDeviceGetAttribute(&value, attribute, index), "device attribute");
  return value;
}

// What is known of kernels.
struct Kernels {
  struct Facts {
    size_t shared_bytes = 0;  // granted, where it is more than 48 KiB
    int waits = -1;           // whether WaitForPrevious is in its code; not asked yet
  };
  std::mutex mutex;
  std::unordered_map<const void*, Facts> facts;
};
Kernels& kernels() {
  static Kernels& one = *new Kernels;
  return one;
}

constexpr int kDependentPtx = 90;        // the oldest code that has the wait
constexpr int kDependentDriver = 12030;  // the oldest that captures such launches

std::atomic<bool> abandoned{false};

}  // namespace

void Abandon() noexcept { abandoned = true; }
bool Abandoned() noexcept { return abandoned; }

int DeviceCount(std::string* why) { return static_cast<int>(Usable(why).size()); }

void Use(int index) {
  std::string why;
  const std::vector<int> usable = Usable(&why);
  if (index < 0 || index >= static_cast<int>(usable.size())) {
    throw std::runtime_error("GPU: device " + std::to_string(index) + " cannot be used: " +
                             (why.empty() ? std::to_string(usable.size()) + " are there, counted from 0; name another" : why));
  }
  Require(cudaSetDevice(usable[static_cast<size_t>(index)]), "device " + std::to_string(index));
  Require(cudaFree(nullptr), "context of device " + std::to_string(index));
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the default of 50,000 would make each pause of a wait as long
}

DeviceInfo Info() {
  int index = 0;
  Require(cudaGetDevice(&index), "current device");
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, index), "device properties");
  DeviceInfo info{properties.name, 10 * properties.major + properties.minor, properties.multiProcessorCount, 0, 0,
                  static_cast<size_t>(Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)), properties.memPitch, false};
  Require(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "memory info");
  Require(cudaDriverGetVersion(&info.driver_version), "driver version");
  return info;
}

void* DeviceMemory::Allocate(size_t bytes, const std::string& what) {
  void* data = nullptr;
  Require(cudaMalloc(&data, bytes), what + ": " + std::to_string(bytes) + " bytes of GPU memory");
  return data;
}
void DeviceMemory::Free(void* data, size_t) noexcept {
  if (!abandoned && cudaFree(data) != cudaSuccess) (void)cudaGetLastError();
}

void* PinnedMemory::Allocate(size_t bytes, const std::string& what) {
  void* data = nullptr;
  Require(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
          what + ": " + std::to_string(bytes) + " bytes of pinned host memory");
  return data;
}
void PinnedMemory::Free(void* data, size_t) noexcept {
  if (!abandoned && cudaFreeHost(data) != cudaSuccess) (void)cudaGetLastError();
}

void RegisterHost(void* base, size_t bytes) {
  const cudaError_t error = cudaHostRegister(base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  Require(error, "pinning " + std::to_string(bytes) + " bytes of host memory", PinRemedy(error));
}
void UnregisterHost(void* base) noexcept {
  if (!abandoned && cudaHostUnregister(base) != cudaSuccess) (void)cudaGetLastError();
}
void* DeviceView(void* host) {
  void* view = nullptr;
  Require(cudaHostGetDevicePointer(&view, host, 0), "host memory that is not registered");
  return view;
}

struct Stream::Impl {
  cudaStream_t stream = nullptr;
  bool dependent = false;      // launches of this capture may be
  bool behind_launch = false;  // the last thing that was captured is a launch of ours
  ~Impl() {
    if (stream != nullptr && cudaStreamDestroy(stream) != cudaSuccess) (void)cudaGetLastError();
  }
  // CUDA would take some of this into a graph; the emulator does not, and nothing needs it.
  void RequireNoCapture() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    Require(cudaStreamIsCapturing(stream, &status), "stream");
    if (status == cudaStreamCaptureStatusNone) return;
    throw std::runtime_error(
        "GPU: events, waits, host functions and graphs cannot be captured; use them around the graph's launch");
  }
};

Stream::Stream(Priority priority) : impl_(std::make_unique<Impl>()) {
  int least = 0, greatest = 0;
  Require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  const int value = priority == Priority::kHigh ? greatest : priority == Priority::kLow ? least : (least + greatest) / 2;
  Require(cudaStreamCreateWithPriority(&impl_->stream, cudaStreamNonBlocking, value), "a new stream");
}
Stream::~Stream() = default;

WaitAtEnd::~WaitAtEnd() {
  if (abandoned) return;
  try {
    if (!stream_.Synchronize(deadline_us_)) Abandon();
  } catch (const std::exception&) {
    Abandon();
  }
}

void Stream::Copy(void* target, const void* source, size_t bytes) {
  impl_->behind_launch = false;
  Require(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, impl_->stream), "copy");
}
void Stream::CopyPieces(std::span<const Piece> pieces) {
#if CUDART_VERSION >= 13000  // each copy of its own costs the engine two microseconds; in a call of several, half of one
  if (pieces.size() > 1) {
    std::vector<void*> targets;
    std::vector<const void*> sources;
    std::vector<size_t> sizes;
    for (const Piece& piece : pieces) {
      targets.push_back(piece.target);
      sources.push_back(piece.source);
      sizes.push_back(piece.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;  // multiprocessors are the model's
    size_t first = 0;                                           // of these attributes' copies
    impl_->behind_launch = false;
    Require(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1, impl_->stream), "copies");
    return;
  }
#endif
  for (const Piece& piece : pieces) Copy(piece.target, piece.source, piece.bytes);
}
void Stream::Copy2D(void* target, size_t target_stride, const void* source, size_t source_stride, size_t bytes, size_t rows) {
  if (bytes > target_stride || bytes > source_stride) throw std::runtime_error("GPU: Copy2D: a row is longer than its stride");
  impl_->behind_launch = false;
  Require(cudaMemcpy2DAsync(target, target_stride, source, source_stride, bytes, rows, cudaMemcpyDefault, impl_->stream), "2D copy");
}
void Stream::Set(void* target, uint8_t value, size_t bytes) {
  impl_->behind_launch = false;
  Require(cudaMemsetAsync(target, value, bytes, impl_->stream), "set");
}

void Stream::Host(std::function<void()> work) {
  impl_->RequireNoCapture();
  auto owned = std::make_unique<std::function<void()>>(std::move(work));
  const auto call = [](void* data) {
    const std::unique_ptr<std::function<void()>> function(static_cast<std::function<void()>*>(data));
    (*function)();
  };
  Require(cudaLaunchHostFunc(impl_->stream, call, owned.get()), "host function");
  (void)owned.release();  // after a device error it is never called, and lost with the process
}

bool Stream::Synchronize(int64_t deadline_us) {
  impl_->RequireNoCapture();
  return Poll([&] { return cudaStreamQuery(impl_->stream); }, deadline_us, "stream");
}

struct Graph::Impl {
  cudaGraphExec_t graph = nullptr;
  ~Impl() {
    if (graph != nullptr && cudaGraphExecDestroy(graph) != cudaSuccess) (void)cudaGetLastError();
  }
};
Graph::Graph() = default;
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

void Stream::BeginCapture(bool dependent) {
  impl_->RequireNoCapture();
  int driver = 0;
  Require(cudaDriverGetVersion(&driver), "driver version");
  impl_->dependent = dependent && driver >= kDependentDriver;
  impl_->behind_launch = false;
  Require(cudaStreamBeginCapture(impl_->stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
}
Graph Stream::EndCapture() {
  impl_->dependent = false;
  cudaGraph_t captured = nullptr;
  Require(cudaStreamEndCapture(impl_->stream, &captured), "end of a capture");
  Graph graph;
  graph.impl = std::make_unique<Graph::Impl>();
  const cudaError_t error = cudaGraphInstantiate(&graph.impl->graph, captured, 0);
  (void)cudaGraphDestroy(captured);
  Require(error, "instantiation of a graph");
  return graph;
}
void Stream::Launch(const Graph& graph) {
  if (!graph.impl) throw std::runtime_error("GPU: an empty graph was launched");
  impl_->RequireNoCapture();
  Require(cudaGraphLaunch(graph.impl->graph, impl_->stream), "graph");
}

struct Event::Impl {
  cudaEvent_t event = nullptr;
  ~Impl() {
    if (event != nullptr && cudaEventDestroy(event) != cudaSuccess) (void)cudaGetLastError();
  }
};
Event::Event(bool timed) : impl_(std::make_unique<Impl>()) {
  Require(cudaEventCreateWithFlags(&impl_->event, timed ? cudaEventDefault : cudaEventDisableTiming), "a new event");
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;

void Event::Record(Stream& stream) {
  stream.impl()->RequireNoCapture();
  Require(cudaEventRecord(impl_->event, stream.impl()->stream), "event");
}
bool Event::Done() const { return Wait(0); }
bool Event::Wait(int64_t deadline_us) const {
  return Poll([&] { return cudaEventQuery(impl_->event); }, deadline_us, "event");
}
double Event::ElapsedUs(const Event& from, const Event& to) {
  float ms = 0;
  Require(cudaEventElapsedTime(&ms, from.impl_->event, to.impl_->event), "time between events");
  return static_cast<double>(ms) * 1000;
}

void Stream::Wait(const Event& event) {
  impl_->RequireNoCapture();
  Require(cudaStreamWaitEvent(impl_->stream, event.impl()->event, 0), "wait for an event");
}

void* NativeStream(Stream& stream) {
  stream.impl()->behind_launch = false;
  return stream.impl()->stream;
}

void LaunchRaw(Stream& stream, const LaunchArgs& args) {
  const auto require = [&](cudaError_t error) {
    if (error != cudaSuccess) Require(error, std::string("kernel ") + args.name);
  };
  Stream::Impl& to = *stream.impl();
  bool dependent = args.dependent && to.dependent && to.behind_launch;
  if (args.shared_bytes > kPlainSharedBytes || args.dependent) {
    std::lock_guard lock(kernels().mutex);
    Kernels::Facts& facts = kernels().facts[args.kernel];
    if (args.shared_bytes > kPlainSharedBytes && facts.shared_bytes < args.shared_bytes) {
      require(cudaFuncSetAttribute(args.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(args.shared_bytes)));
      facts.shared_bytes = args.shared_bytes;
    }
    // Asked at the first launch, which no capture is. What the driver made of older PTX has no wait, on whatever GPU it runs.
    if (args.dependent && facts.waits < 0) {
      cudaFuncAttributes code{};
      require(cudaFuncGetAttributes(&code, args.kernel));
      facts.waits = code.ptxVersion >= kDependentPtx ? 1 : 0;
    }
    dependent = dependent && facts.waits == 1;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(args.grid.x, args.grid.y, args.grid.z);
  config.blockDim = dim3(args.block.x, args.block.y, args.block.z);
  config.dynamicSmemBytes = args.shared_bytes;
  config.stream = to.stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  require(cudaLaunchKernelExC(&config, args.kernel, args.arguments));
  to.behind_launch = true;
}

}  // namespace kvtier::gpu
