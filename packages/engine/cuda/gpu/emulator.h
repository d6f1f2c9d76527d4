// CUDA's words on the CPU, so that every kernel runs in tests where there is no GPU. A block is a set of fibers, one per
// thread, on the OS thread of its stream; blocks run one after another. A fiber runs until it meets a barrier or a warp
// operation; these are exact, so results do not depend on timing.
//
// It is meant to show every wait that a kernel lacks. One warp runs as far as it can before another one begins, from the first
// warp on in one block, from the last one on in the next; so do the lanes of a warp. cp.async makes its target NaNs when it
// is issued, and the bytes come when the thread waits for them, not before. Dynamic shared memory starts as NaNs in each block.
// `kernel_check --mutate` takes the waits away one by one. Threads that wait for each other for ever end the process with a line
// that says so; so does what moves 16 bytes at once and is given an address that is no multiple of 16, where a GPU ends the kernel.
//
// Of a chain of dependent launches (LaunchDependent), a block of each of the next launches begins before the first one does, and stands at its
// wait until all before it have ended: what it read too early is old, what it wrote too early is written over. A thread that ends
// without that wait ends the process.
//
// What it does not model: weak memory order (a store is there when it is made: a missing __syncwarp before a shuffle goes unseen, before
// ldmatrix it does not), stale content of static shared memory, bank conflicts, speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "numeric.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)
#define KVTIER_DYNAMIC_SHARED(name) uint8_t* const name = ::kvtier::gpu::emulated::SharedMemory()

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace kvtier::gpu::emulated {

struct Index {
  dim3 thread, block, block_size, grid;
  unsigned lane;
};
extern thread_local const Index* current;

uint8_t* SharedMemory();
using Site = std::source_location;  // in a kernel
void SyncThreads(Site at);
void SyncWarp(Site at);
void CopyAsync(void* shared, const void* global);  // null: zeros
void CopyAsyncCommit();
void CopyAsyncWait(size_t pending, Site at);
void WaitForPrevious(Site at);

[[noreturn]] void EndMisaligned(const void* address, const char* what);
inline void RequireAligned(const void* address, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) [[unlikely]] EndMisaligned(address, what);
}

// For tests of tests: from now on waits are noted as "file:line" where kernels meet them, and the one named here, if any, does
// nothing. Before the first kernel.
void WatchWaits(const std::string& without);
std::vector<std::string> WaitsMet();

// Leaves `bytes` (at most 64) for the other lanes of the warp and waits for theirs; what lane i left is then at
// returned + 64 * i, until the next warp operation but one.
const uint8_t* Exchange(const void* data, size_t bytes);

struct Grid {
  dim3 grid, block;
  size_t shared_bytes;
  std::function<void()> body;  // once per thread
  const char* name;
};
// Runs them one after another, on this OS thread; all but the first are dependent launches.
void RunGrids(std::span<const Grid> chain);

template <class T>
T FromLane(T value, unsigned lane) {
  const uint8_t* all = Exchange(&value, sizeof value);
  memcpy(&value, all + 64 * (lane & 31), sizeof value);
  return value;
}

}  // namespace kvtier::gpu::emulated

#define threadIdx (::kvtier::gpu::emulated::current->thread)
#define blockIdx (::kvtier::gpu::emulated::current->block)
#define blockDim (::kvtier::gpu::emulated::current->block_size)
#define gridDim (::kvtier::gpu::emulated::current->grid)

inline void __syncthreads(kvtier::gpu::emulated::Site at = kvtier::gpu::emulated::Site::current()) { kvtier::gpu::emulated::SyncThreads(at); }
inline void __syncwarp(unsigned = ~0u, kvtier::gpu::emulated::Site at = kvtier::gpu::emulated::Site::current()) {
  kvtier::gpu::emulated::SyncWarp(at);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const unsigned me = kvtier::gpu::emulated::current->lane;
  return kvtier::gpu::emulated::FromLane(value, (me & ~static_cast<unsigned>(width - 1)) + (static_cast<unsigned>(lane) & static_cast<unsigned>(width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  (void)width;
  return kvtier::gpu::emulated::FromLane(value, kvtier::gpu::emulated::current->lane ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  const unsigned me = kvtier::gpu::emulated::current->lane;
  const unsigned last = me | static_cast<unsigned>(width - 1);
  return kvtier::gpu::emulated::FromLane(value, me + delta > last ? me : me + delta);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  const unsigned me = kvtier::gpu::emulated::current->lane;
  const unsigned first = me & ~static_cast<unsigned>(width - 1);
  return kvtier::gpu::emulated::FromLane(value, me < first + delta ? me : me - delta);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const int yes = predicate != 0;
  const uint8_t* all = kvtier::gpu::emulated::Exchange(&yes, sizeof yes);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    int other;
    memcpy(&other, all + 64 * lane, sizeof other);
    bits |= static_cast<unsigned>(other) << lane;
  }
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }

template <class T>
T atomicAdd(T* address, T value) {  // one grid runs on one OS thread, other streams' on others
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  } else {
    T seen = *address, next;
    do next = seen + value;
    while (!__atomic_compare_exchange(address, &seen, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
  }
}
template <class T>
T atomicMax(T* address, T value) {
  T seen = *address;
  while (seen < value && !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
template <class T>
T atomicMin(T* address, T value) {
  T seen = *address;
  while (value < seen && !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
template <class T>
T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }
template <class T>
T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }
template <class T>
T atomicCAS(T* address, T expected, T desired) {
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

template <class T>
T __ldg(const T* address) { return *address; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline unsigned __float_as_uint(float x) { return kvtier::FloatToBits(x); }
inline float __uint_as_float(unsigned x) { return kvtier::BitsToFloat(x); }
inline int __float_as_int(float x) { return static_cast<int>(kvtier::FloatToBits(x)); }
inline float __int_as_float(int x) { return kvtier::BitsToFloat(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
using std::max;
using std::min;

namespace kvtier::gpu {

inline void CopyAsync16(void* shared, const void* global, bool valid = true) {
  emulated::CopyAsync(shared, valid ? global : nullptr);
}
inline void CopyAsyncCommit() { emulated::CopyAsyncCommit(); }
template <int Pending>
inline void CopyAsyncWait(emulated::Site at = emulated::Site::current()) {
  emulated::CopyAsyncWait(Pending, at);
}

inline void WaitForPrevious(emulated::Site at = emulated::Site::current()) { emulated::WaitForPrevious(at); }
inline void LetNextStart() {}  // the next launch has begun already

void LoadMatrix4(uint32_t (&r)[4], const void* row);
void LoadMatrix4Transposed(uint32_t (&r)[4], const void* row);

template <class T>
void MultiplyAdd16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <class T>
inline uint32_t PackFloats(float low, float high) {
  return PackPair(FromFloat<T>(low).bits, FromFloat<T>(high).bits);
}
inline float Exp2(float x) { return std::exp2(x); }
inline uint4 LoadWide(const void* address) {
  emulated::RequireAligned(address, "a load of 16 bytes");
  return *static_cast<const uint4*>(address);
}
inline void StoreWide(void* address, uint4 value) {
  emulated::RequireAligned(address, "a store of 16 bytes");
  *static_cast<uint4*>(address) = value;
}
inline uint4 LoadStreaming(const uint4* address) { return LoadWide(address); }
inline void StoreStreaming(uint4* address, uint4 value) { StoreWide(address, value); }

}  // namespace kvtier::gpu
