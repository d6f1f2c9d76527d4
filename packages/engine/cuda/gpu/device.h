// The dialect in which kernels are written: CUDA C++, and below the few instructions that are not in it, under names of ours.
// Where nvcc compiles, they are PTX; where the host compiler does (KVTIER_EMULATED), emulator.h gives all of CUDA's words and
// these the same meaning on the CPU, one fiber per thread. A kernel that keeps to this file runs on both.
//
// Kernels for the emulator keep three rules: all 32 lanes of a warp reach a warp operation; the mask is ~0u; dynamic shared
// memory is taken by KVTIER_DYNAMIC_SHARED.
#pragma once
#include <cstdint>

#include "numeric.h"

#if defined(KVTIER_EMULATED)
#include "emulator.h"
#elif defined(KVTIER_DRIVER)  // host code alone: the kernels come as a module (gpu_driver.cc)
#define __global__
#else
#include <cuda_runtime.h>
#endif

#if !defined(KVTIER_EMULATED) && defined(__CUDACC__)
#define KVTIER_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

namespace kvtier::gpu {

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes global -> shared without passing through registers; zeros when not `valid` (the address is not read then).
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest `Pending` groups of this thread have arrived; others' need __syncthreads as well.
template <int Pending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four (two) 8x8 matrices of 16-bit numbers from shared memory into fragments; lane i gives the address of row i % 8 of
// matrix i / 8. Each row: 16 bytes, aligned.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}

// d += a x b on tensor cores: a 16x16 row-major, b 16x8 column-major, d 16x8 f32, in the fragments of PTX's mma.m16n8k16.
template <class T>
__device__ __forceinline__ void MultiplyAdd16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void MultiplyAdd16816<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void MultiplyAdd16816<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two floats as a pair of T, the first in the low half: one instruction on the hardware.
template <class T>
__device__ __forceinline__ uint32_t PackFloats(float low, float high);
template <>
__device__ __forceinline__ uint32_t PackFloats<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t PackFloats<f16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// 2^x, the hardware's approximation (relative error 2^-22).
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of kernels that LaunchDependent (gpu.h) launches. WaitForPrevious: until all launches before this one have ended, and what they wrote
// can be read; every thread calls it before it touches what any launch of the graph writes. LetNextStart: the next launch may take what
// room this one leaves, once all of its blocks have said so. Both do nothing in other launches, and before sm_90.
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes at once, at a multiple of 16.
__device__ __forceinline__ uint4 LoadWide(const void* address) { return *static_cast<const uint4*>(address); }
__device__ __forceinline__ void StoreWide(void* address, uint4 value) { *static_cast<uint4*>(address) = value; }

// Tensors that are used once: do not keep their lines.
__device__ __forceinline__ uint4 LoadStreaming(const uint4* address) { return __ldcs(address); }
__device__ __forceinline__ void StoreStreaming(uint4* address, uint4 value) { __stcs(address, value); }

}  // namespace kvtier::gpu
#endif

#if defined(KVTIER_EMULATED) || defined(__CUDACC__)
namespace kvtier::gpu {

constexpr unsigned kAllLanes = ~0u;

__device__ __forceinline__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
__device__ __forceinline__ float WarpMax(float value) {
  for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

}  // namespace kvtier::gpu
#endif
