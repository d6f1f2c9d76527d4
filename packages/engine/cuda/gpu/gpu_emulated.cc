// gpu.h without a GPU: the device and its memory; its streams are in emulated_streams.cc. It is stricter than a GPU where that
// finds mistakes: fresh memory holds NaNs, what lies behind a buffer's end faults, what is freed is gone at once, and a thread
// must have called Use. While a kernel hangs, freeing and unregistering wait for ever, as they do on a GPU.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "emulated_device.h"
#include "pin_remedy.h"

namespace kvtier::gpu {
namespace emulated {

thread_local bool in_runtime_thread = false;

namespace {
thread_local bool used = false;
}  // namespace

void Fail(const std::string& what) { throw std::runtime_error("GPU: " + what); }

Planned PlannedFault() {
  const char* text = getenv("KVTIER_EMULATED_FAULT");
  if (text == nullptr) return {};
  const std::string plan = text;
  const size_t at = plan.find('@');
  if (at == std::string::npos) return {};
  return {plan.substr(0, at) == "hang" ? Fault::kHang : Fault::kIllegalAccess, strtoull(plan.c_str() + at + 1, nullptr, 10)};
}

size_t PlannedBytes() {
  const char* text = getenv("KVTIER_EMULATED_MEMORY");
  return text == nullptr ? kDeviceBytes : strtoull(text, nullptr, 10);
}

size_t SharedBytesPerBlock() {
  static const char* const text = getenv("KVTIER_EMULATED_SHARED");
  return text == nullptr ? kSharedBytesPerBlock : strtoull(text, nullptr, 10);
}

// Never destroyed: threads of streams outlive everything else.
Device& device() {
  static Device& one = *new Device;
  return one;
}

void Check() {
  if (in_runtime_thread) Fail("a host function calls the runtime; enqueue from another thread");
  if (!used) Fail("this thread has no device; call Use on it first");
  if (device().failed) Fail("an illegal memory access was encountered (sticky); the process must end, start it again");
}

}  // namespace emulated

using namespace emulated;

namespace {

constexpr size_t kAlignment = 256;  // of cudaMalloc

size_t FreeBytes(const Device& d) { return d.total_bytes - std::min(d.total_bytes, d.allocated_bytes); }

void Reserve(size_t bytes, const std::string& what) {
  Check();
  Device& d = device();
  std::lock_guard lock(d.mutex);
  Fault fault = Fault::kOutOfMemory;
  const bool injected = d.next.compare_exchange_strong(fault, Fault::kNone);
  const size_t free_bytes = FreeBytes(d);
  if (injected || bytes > free_bytes) {
    throw OutOfMemory("GPU: " + what + ": " + std::to_string(bytes) + " bytes do not fit, " + std::to_string(free_bytes) +
                      " are free; lower gpu.memoryUtilization (--gpu-memory-utilization) or use a smaller model");
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

// What gives memory back waits for the device. False: it was abandoned, the memory stays.
bool DeviceEnds() {
  while (device().hung && !device().abandoned) std::this_thread::sleep_for(kSlice);
  return !device().abandoned;
}

}  // namespace

void Abandon() noexcept { device().abandoned = true; }
bool Abandoned() noexcept { return device().abandoned; }

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
  return {"emulated", 90, 4, device().total_bytes, FreeBytes(device()), SharedBytesPerBlock(), kMaxPitchBytes, true};
}

void* DeviceMemory::Allocate(size_t bytes, const std::string& what) {
  Reserve(bytes, what);
  return Map(bytes, what);
}
void DeviceMemory::Free(void* data, size_t bytes) noexcept {
  if (!DeviceEnds()) return;
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
  if (!DeviceEnds()) return;
  UnregisterHost(data);
  Unmap(data, bytes);
}

void RegisterHost(void* base, size_t bytes) {
  Check();
  const auto start = reinterpret_cast<uintptr_t>(base);
  if (bytes == 0 || start % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) != 0) Fail("host memory to be registered must be whole pages");
  if (getenv("KVTIER_EMULATED_UNPINNED") != nullptr) {
    Fail("pinning " + std::to_string(bytes) + " bytes of host memory: operation not supported; " + PinRemedy(kPinningNotSupported));
  }
  if (const char* slow = getenv("KVTIER_EMULATED_PIN_MS")) std::this_thread::sleep_for(std::chrono::milliseconds(atoi(slow)));
  std::lock_guard lock(device().mutex);
  auto& ranges = device().host_ranges;
  const auto next = ranges.lower_bound(start);
  const bool overlaps = (next != ranges.end() && next->first < start + bytes) ||
                        (next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > start);
  if (overlaps) Fail("host memory is registered already; unregister it first");
  ranges[start] = bytes;
}

void UnregisterHost(void* base) noexcept {
  if (!DeviceEnds()) return;
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

void TellMemory(size_t total_bytes) {
  std::lock_guard lock(device().mutex);
  device().total_bytes = total_bytes == 0 ? PlannedBytes() : total_bytes;
}

void HoldCopies(bool held) { device().copies_held = held; }

void Inject(Fault fault) {
  Device& d = device();
  d.next = fault;
  if (fault != Fault::kNone) return;
  ++d.life;
  d.hung = false;
  DrainQueues();
  d.failed = d.abandoned = false;
}

}  // namespace kvtier::gpu
