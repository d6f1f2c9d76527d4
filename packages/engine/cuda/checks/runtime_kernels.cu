// Kernels of runtime_kernels.h.
#include "runtime_kernels.h"

namespace kvtier::cuda::check {
namespace {

constexpr unsigned kThreads = 128;

__global__ void AddKernel(int32_t* values, int32_t count, int32_t added) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] += added;
}

__global__ void TripleKernel(uint32_t* values, int32_t count) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] *= 3;
}

__global__ void ReverseKernel(int32_t* values, int32_t count) {
  KVTIER_DYNAMIC_SHARED(bytes);
  auto* copy = reinterpret_cast<int32_t*>(bytes);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) copy[i] = values[i];
  __syncthreads();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) {
    values[i] = copy[count - 1 - i];
  }
}

template <bool kLate>
__global__ void RotateKernel(uint32_t* target, const uint32_t* source, int32_t count) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x), from = (i + 1) % count;
  gpu::LetNextStart();
  uint32_t value = kLate ? *reinterpret_cast<const volatile uint32_t*>(source + from) : 0;
  gpu::WaitForPrevious();
  if (i >= count) return;
  if (!kLate) value = source[from];
  target[i] = 10 * value + static_cast<uint32_t>(i % 10);
}

unsigned Blocks(int32_t count) { return (static_cast<unsigned>(count) + kThreads - 1) / kThreads; }

}  // namespace

void LaunchAdd(gpu::Stream& stream, int32_t* values, int32_t count, int32_t added) {
  gpu::Launch(stream, "AddKernel", AddKernel, {Blocks(count)}, {kThreads}, 0, values, count, added);
}
void LaunchTriple(gpu::Stream& stream, int32_t* values, int32_t count) {
  gpu::Launch(stream, "TripleKernel", TripleKernel, {Blocks(count)}, {kThreads}, 0, reinterpret_cast<uint32_t*>(values), count);
}
void LaunchReverse(gpu::Stream& stream, int32_t* values, int32_t count) {
  gpu::Launch(stream, "ReverseKernel", ReverseKernel, {1}, {kThreads}, static_cast<size_t>(count) * 4, values, count);
}

void LaunchRotate(gpu::Stream& stream, uint32_t* target, const uint32_t* source, int32_t count, bool late) {
  gpu::LaunchDependent(stream, "RotateKernel", late ? RotateKernel<true> : RotateKernel<false>, {Blocks(count)}, {kThreads}, 0, target, source, count);
}

}  // namespace kvtier::cuda::check
