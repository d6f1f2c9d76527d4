// 16 bytes of a tensor as floats: how row kernels read and write memory, one full-width access per thread and step.
#pragma once
#include <stdexcept>
#include <string>

#include "../gpu/device.h"

namespace kvtier::cuda {

// Elements of T in one access.
template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class T>
struct Pack {
  float v[kPack<T>];
};

template <class T>
__device__ __forceinline__ Pack<T> Unpack(uint4 bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  Pack<T> pack;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.v[i] = BitsToFloat(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pack.v[2 * i] = ToFloat(T{static_cast<uint16_t>(words[i])});
      pack.v[2 * i + 1] = ToFloat(T{static_cast<uint16_t>(words[i] >> 16)});
    }
  }
  return pack;
}

template <class T>
__device__ __forceinline__ Pack<T> LoadPack(const T* address) {
  return Unpack<T>(gpu::LoadWide(address));
}

// Rounds to T and stores; returns what a later load will see.
template <class T>
__device__ __forceinline__ uint4 RoundPack(const Pack<T>& pack) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = FloatToBits(pack.v[i]);
    } else {
      words[i] = gpu::PackFloats<T>(pack.v[2 * i], pack.v[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <class T>
__device__ __forceinline__ void StorePack(T* address, const Pack<T>& pack) {
  gpu::StoreWide(address, RoundPack<T>(pack));
}

// Sum over the block; every thread gets it. `shared`: 32 floats that nobody else uses until the next barrier. All threads call.
__device__ __forceinline__ float BlockSum(float value, float* shared) {
  value = gpu::WarpSum(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned warps = (blockDim.x + 31) / 32;
  float sum = 0;
  for (unsigned i = 0; i < warps; ++i) sum += shared[i];  // the same order in every thread
  return sum;
}

// fn(T{}) with the type of weights and activations.
template <class Fn>
void WithFloatType(NumberType type, const char* what, const Fn& fn) {
  switch (type) {
    case NumberType::kF32:
      return fn(float{});
    case NumberType::kF16:
      return fn(f16{});
    case NumberType::kBf16:
      return fn(bf16{});
    case NumberType::kE4m3:
      break;
  }
  throw std::invalid_argument(std::string(what) + ": weights and activations are f32, f16 or bf16");
}

}  // namespace kvtier::cuda
