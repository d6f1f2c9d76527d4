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

}  // namespace kvtier::cuda::check
