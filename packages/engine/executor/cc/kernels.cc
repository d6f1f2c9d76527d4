#include "kernels.h"

#include <algorithm>

namespace kvtier {

void RmsNorm(float* target, const float* source, const float* weight, int64_t count, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += source[i] * source[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(count) + eps);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) target[i] = source[i] * scale * weight[i];
}

void Rope(float* head, const float* cos, const float* sin, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float x1 = head[i], x2 = head[i + half];
    head[i] = x1 * cos[i] - x2 * sin[i];
    head[i + half] = x2 * cos[i] + x1 * sin[i];
  }
}

void SwiGlu(float* gate, const float* up, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1.0f + Exp(-gate[i])) * up[i];
}

void GeGlu(float* gate, const float* up, int64_t count) {
  constexpr float kSqrt2OverPi = 0.7978845608f;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float x = gate[i];
    gate[i] = 0.5f * x * (1.0f + Tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x))) * up[i];
  }
}

void SoftCap(float* row, float cap, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) row[i] = cap * Tanh(row[i] / cap);
}

void AddBias(float* row, const float* bias, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) row[i] += bias[i];
}

float ExpSum(float* row, float max, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    row[i] = Exp(row[i] - max);
    sum += row[i];
  }
  return sum;
}

float Max(const float* row, int64_t count) {
  float max = row[0];
#pragma omp simd reduction(max : max)
  for (int64_t i = 0; i < count; ++i) max = row[i] > max ? row[i] : max;
  return max;
}

}  // namespace kvtier
