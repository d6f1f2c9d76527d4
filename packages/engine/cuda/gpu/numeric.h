// Storage types of weights, activations and KV: what a number looks like in memory. Arithmetic is done in float. The same
// source serves nvcc and the host compiler, bit for bit: round to nearest, ties to even, as the hardware converts.
//
//   bf16  1 sign, 8 exponent, 7 mantissa     f16  IEEE binary16     e4m3  OCP FP8 E4M3: no infinities, 448 is the largest
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVTIER_HD __host__ __device__ __forceinline__
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#else
#define KVTIER_HD inline
#endif

namespace kvtier {

enum class NumberType : int32_t { kF32 = 0, kF16 = 1, kBf16 = 2, kE4m3 = 3 };

KVTIER_HD constexpr int64_t NumberBytes(NumberType type) {
  return type == NumberType::kF32 ? 4 : type == NumberType::kE4m3 ? 1 : 2;
}

struct alignas(2) bf16 {
  uint16_t bits;
};
struct alignas(2) f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};

template <class T>
struct NumberTypeOf;
template <>
struct NumberTypeOf<float> {
  static constexpr NumberType value = NumberType::kF32;
};
template <>
struct NumberTypeOf<f16> {
  static constexpr NumberType value = NumberType::kF16;
};
template <>
struct NumberTypeOf<bf16> {
  static constexpr NumberType value = NumberType::kBf16;
};
template <>
struct NumberTypeOf<e4m3> {
  static constexpr NumberType value = NumberType::kE4m3;
};

KVTIER_HD float BitsToFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
KVTIER_HD uint32_t FloatToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

KVTIER_HD float ToFloat(float value) { return value; }
KVTIER_HD float ToFloat(bf16 value) { return BitsToFloat(static_cast<uint32_t>(value.bits) << 16); }
KVTIER_HD float ToFloat(f16 value) {
#if defined(__CUDA_ARCH__)
  __half_raw raw;
  raw.x = value.bits;
  return __half2float(__half(raw));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1f, mantissa = value.bits & 0x3ff;
  if (exponent == 0x1f) return BitsToFloat(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return BitsToFloat(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign != 0 ? -tiny : tiny;
#endif
}
KVTIER_HD float ToFloat(e4m3 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
  const uint32_t exponent = (value.bits >> 3) & 0xf, mantissa = value.bits & 7;
  if (exponent == 0xf && mantissa == 7) return BitsToFloat(sign | 0x7fc00000);
  if (exponent != 0) return BitsToFloat(sign | (exponent + 120) << 23 | mantissa << 20);
  const float tiny = static_cast<float>(mantissa) * 0.001953125f;  // 2^-9
  return sign != 0 ? -tiny : tiny;
}

template <class T>
KVTIER_HD T FromFloat(float value);

template <>
KVTIER_HD float FromFloat<float>(float value) {
  return value;
}

template <>
KVTIER_HD bf16 FromFloat<bf16>(float value) {
  const uint32_t bits = FloatToBits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};  // NaN
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// `bits`: a float's; `mantissa_bits` and `bias` of the target, whose subnormals are multiples of `unit` = 1 / `scale`.
// Returns exponent and mantissa rounded to nearest even, not clamped at the top.
KVTIER_HD uint32_t RoundToSmall(float magnitude, int mantissa_bits, int bias, float scale) {
  const uint32_t bits = FloatToBits(magnitude);
  const int exponent = static_cast<int>(bits >> 23) - 127 + bias;
  const int drop = 23 - mantissa_bits;
  if (exponent >= 1) {
    const uint32_t rounded = bits + (1u << (drop - 1)) - 1 + ((bits >> drop) & 1);
    return (rounded >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa_bits);
  }
  const float units = magnitude * scale;  // exact: a power of two
  const float shifted = units + 8388608.0f;  // rounds to a whole number, ties to even
  return FloatToBits(shifted) - 0x4b000000u;
}

template <>
KVTIER_HD f16 FromFloat<f16>(float value) {
#if defined(__CUDA_ARCH__)
  return {static_cast<__half_raw>(__float2half_rn(value)).x};
#else
  const uint16_t sign = static_cast<uint16_t>((FloatToBits(value) >> 16) & 0x8000);
  const uint32_t bits = FloatToBits(value) & 0x7fffffff;
  if (bits > 0x7f800000) return {0x7fff};
  if (bits >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to infinity
  return {static_cast<uint16_t>(sign | RoundToSmall(BitsToFloat(bits), 10, 15, 16777216.0f))};
#endif
}

// Saturates at +-448 (and infinities too), as cvt.rn.satfinite does.
template <>
KVTIER_HD e4m3 FromFloat<e4m3>(float value) {
  const uint8_t sign = static_cast<uint8_t>((FloatToBits(value) >> 24) & 0x80);
  const uint32_t bits = FloatToBits(value) & 0x7fffffff;
  if (bits > 0x7f800000) return {static_cast<uint8_t>(sign | 0x7f)};
  if (bits >= 0x43e00000) return {static_cast<uint8_t>(sign | 0x7e)};
  return {static_cast<uint8_t>(sign | RoundToSmall(BitsToFloat(bits), 3, 7, 512.0f))};
}

KVTIER_HD uint32_t PackPair(uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; }

}  // namespace kvtier
