// Row-wise kernels of a Llama layer, f32. Plain loops that the compiler vectorises; all pointers are to whole rows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvtier {

// exp for x <= ~88 in straight-line code, relative error below 2e-7; 0 for x < -87 (also -inf).
// Range reduction x = n ln2 + r, then the minimax polynomial of Cephes' expf.
inline float Exp(float x) {
  const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float n = std::floor(clamped * 1.44269504f + 0.5f);
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return x < -87.0f ? 0.0f : p * scale;
}

inline float Tanh(float x) { return 1.0f - 2.0f / (Exp(2.0f * x) + 1.0f); }

// target[i] = source[i] / rms(source) * weight[i]
void RmsNorm(float* target, const float* source, const float* weight, int64_t count, float eps);
// Rotates one head in place, Hugging Face's half split: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
void Rope(float* head, const float* cos, const float* sin, int64_t half);
// gate[i] = gate[i] * sigmoid(gate[i]) * up[i]
void SwiGlu(float* gate, const float* up, int64_t count);
// gate[i] = gelu(gate[i]) * up[i], gelu in its tanh approximation
void GeGlu(float* gate, const float* up, int64_t count);
// row[i] = cap * tanh(row[i] / cap)
void SoftCap(float* row, float cap, int64_t count);
void AddBias(float* row, const float* bias, int64_t count);
// row[i] = exp(row[i] - max); returns the sum.
float ExpSum(float* row, float max, int64_t count);
float Max(const float* row, int64_t count);

}  // namespace kvtier
