// Random numbers on the device: weights and inputs of real shapes for measuring, without files. SplitMix64 of the element's
// index, so that the numbers depend on nothing but the seed. Writes count elements.
#include <stdexcept>

#include "../gpu/device.h"
#include "kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int kFillThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

template <class T>
__global__ void __launch_bounds__(kFillThreads) Fill(T* target, int64_t count, uint64_t seed, float scale, float offset) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFillThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; i < count; i += step) {
    uint64_t z = seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    const float unit = static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1.0f;  // [-1, 1)
    target[i] = FromFloat<T>(unit * scale + offset);
  }
}

template <class T>
void Run(Stream& stream, void* target, int64_t count, uint64_t seed, float scale, float offset) {
  const int64_t blocks = (count + kFillThreads - 1) / kFillThreads;
  gpu::Launch(stream, "fill random", Fill<T>, {static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks)}, {kFillThreads}, 0,
              static_cast<T*>(target), count, seed, scale, offset);
}

}  // namespace

void FillRandom(Stream& stream, NumberType type, void* target, int64_t count, uint64_t seed, float scale, float offset) {
  if (count == 0) return;
  switch (type) {
    case NumberType::kF32: return Run<float>(stream, target, count, seed, scale, offset);
    case NumberType::kF16: return Run<f16>(stream, target, count, seed, scale, offset);
    case NumberType::kBf16: return Run<bf16>(stream, target, count, seed, scale, offset);
    case NumberType::kE4m3: break;
  }
  throw std::invalid_argument("fill: f32, f16 or bf16");
}

}  // namespace kvtier::cuda
