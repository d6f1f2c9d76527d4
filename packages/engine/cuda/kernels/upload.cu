// A step's arrays from pinned host memory into the GPU's, by a kernel. A copy engine takes the copies of all streams one after another: a
// copy of a step would wait for the gigabyte of an import that is on the bus, a kernel's loads pass between its packets.
//
// One block takes the words of one array in turn, four of each thread in flight.
#include <cstdint>
#include <stdexcept>

#include "../gpu/device.h"
#include "kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int kUploadThreads = 512, kInFlight = 4;
constexpr int kMostArrays = 8;     // a launch
constexpr int64_t kMostBlocks = 32;  // of an array: they fill the bus

struct Arrays {
  HostArray at[kMostArrays];
};

__global__ void __launch_bounds__(kUploadThreads) UploadKernel(Arrays arrays) {
  const HostArray a = arrays.at[blockIdx.y];
  const auto columns = static_cast<uint32_t>(a.row_bytes / 4), all = static_cast<uint32_t>(a.rows) * columns;
  const uint32_t stride = gridDim.x * kUploadThreads;
  // As it lies in the host's memory now, not as a cache may still have it.
  const volatile uint32_t* source = static_cast<const uint32_t*>(a.source);
  for (uint32_t first = blockIdx.x * kUploadThreads + threadIdx.x; first < all; first += kInFlight * stride) {
    uint32_t words[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (first + i * stride < all) words[i] = source[first + i * stride];
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const uint32_t at = first + i * stride;
      if (at >= all) continue;
      const uint32_t row = at / columns;
      reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(a.target) + row * a.target_stride)[at - row * columns] = words[i];
    }
  }
}

}  // namespace

void Upload(Stream& stream, std::span<const HostArray> arrays) {
  for (size_t first = 0; first < arrays.size(); first += kMostArrays) {
    const size_t count = arrays.size() - first < kMostArrays ? arrays.size() - first : kMostArrays;
    Arrays some{};
    int64_t most = 1;
    for (size_t i = 0; i < count; ++i) {
      const HostArray& a = some.at[i] = arrays[first + i];
      const int64_t words = a.rows * (a.row_bytes / 4);
      if (words > INT32_MAX || a.row_bytes % 4 != 0) throw std::invalid_argument("upload: rows of whole words, and less than 8 GiB of them, are needed");
      most = words > most ? words : most;
    }
    const int64_t blocks = (most + kUploadThreads * kInFlight - 1) / (kUploadThreads * kInFlight);
    gpu::Launch(stream, "upload", UploadKernel, {static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), static_cast<unsigned>(count)},
                {kUploadThreads}, 0, some);
  }
}

}  // namespace kvtier::cuda
