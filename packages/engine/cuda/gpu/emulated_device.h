// What the two halves of the emulated runtime share: the one device, its state and its faults.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "gpu.h"

namespace kvtier::gpu::emulated {

constexpr auto kSlice = std::chrono::milliseconds(1);  // how often a wait looks whether it has become pointless
constexpr size_t kSharedBytesPerBlock = 227 << 10;     // as sm_90 allows, unless it is told otherwise: KVTIER_EMULATED_SHARED=BYTES
constexpr size_t kDeviceBytes = size_t{1} << 30;  // unless it is told otherwise: KVTIER_EMULATED_MEMORY=BYTES, TellMemory
constexpr size_t kMaxPitchBytes = (size_t{1} << 31) - 1;

// From the environment, for tests of whole processes: KVTIER_EMULATED_FAULT=hang@N or illegal@N, the Nth operation.
struct Planned {
  Fault fault = Fault::kNone;
  uint64_t operation = 0;  // 0: never
};
Planned PlannedFault();
size_t PlannedBytes();
size_t SharedBytesPerBlock();

struct Device {
  std::mutex mutex;
  std::atomic<Fault> next{Fault::kNone};
  std::atomic<bool> failed{false}, hung{false}, abandoned{false}, copies_held{false};
  std::atomic<uint64_t> life{0};  // counts what Inject(kNone) has ended
  size_t allocated_bytes = 0, total_bytes = PlannedBytes();
  std::map<uintptr_t, size_t> host_ranges;  // registered: start -> bytes
  std::set<std::string> loaded_kernels;
  const Planned planned = PlannedFault();
  std::atomic<uint64_t> operations{0};
};
Device& device();

// Set on the threads that run streams' operations.
extern thread_local bool in_runtime_thread;

[[noreturn]] void Fail(const std::string& what);
// What every call begins with.
void Check();
// Until all that is enqueued anywhere has run or was dropped, or until the device hangs; some seconds at most: false then.
bool DrainQueues(bool even_hung = true);

}  // namespace kvtier::gpu::emulated
