// Row kernels as plain loops; sums in double, so that what differs is the kernel's own rounding.
#include "reference.h"

#include <cmath>

#include "../checks/check.h"

namespace kvtier::cuda::reference {
namespace {

// row[i] *= weight[i] / rms(row)
void NormRow(float* row, const float* weight, int64_t columns, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < columns; ++i) sum += static_cast<double>(row[i]) * row[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(columns) + static_cast<double>(eps));
  for (int64_t i = 0; i < columns; ++i) row[i] = static_cast<float>(row[i] * scale * static_cast<double>(weight[i]));
}

// values[i] += bias[i % bias.size()]; nothing when there is none
void AddBias(Floats& values, const Floats& bias) {
  for (size_t i = 0; i < values.size() && !bias.empty(); ++i) values[i] += bias[i % bias.size()];
}

}  // namespace

Floats GatherRows(const Floats& source, const std::vector<int32_t>& index, int64_t columns, float scale) {
  Floats target;
  for (const int32_t row : index) {
    for (int64_t i = 0; i < columns; ++i) target.push_back(source[static_cast<size_t>(row * columns + i)] * scale);
  }
  return target;
}

Floats RmsNorm(const Floats& source, const Floats& weight, float eps) {
  Floats target = source;
  for (size_t row = 0; row < target.size(); row += weight.size()) {
    NormRow(target.data() + row, weight.data(), static_cast<int64_t>(weight.size()), eps);
  }
  return target;
}

Floats AddRmsNorm(Floats& residual, const Floats& added, const Floats& bias, const Floats& weight, float eps, NumberType type) {
  Floats sum = added;
  AddBias(sum, bias);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += residual[i];
  residual = check::RoundedAs(type, sum);
  return RmsNorm(residual, weight, eps);
}

void NormAdd(Floats& residual, const Floats& added, const Floats& bias, const Floats& weight, float eps) {
  Floats sum = added;
  AddBias(sum, bias);
  const Floats normed = RmsNorm(sum, weight, eps);
  for (size_t i = 0; i < normed.size(); ++i) residual[i] += normed[i];
}

Floats GatedActivation(const Floats& gate_up, int64_t columns, bool gelu) {
  Floats target;
  for (size_t row = 0; row < gate_up.size(); row += static_cast<size_t>(2 * columns)) {
    for (int64_t i = 0; i < columns; ++i) {
      const double x = static_cast<double>(gate_up[row + static_cast<size_t>(i)]);
      const double up = static_cast<double>(gate_up[row + static_cast<size_t>(columns + i)]);
      const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
      target.push_back(static_cast<float>((gelu ? 0.5 * x * (1 + std::tanh(u)) : x / (1 + std::exp(-x))) * up));
    }
  }
  return target;
}

void Rope(float* qkv, const RopeRow& rope, int64_t position) {
  const int64_t dim = rope.head_dim, half = dim / 2;
  for (int64_t i = 0; i < (rope.heads + 2 * rope.kv_heads) * dim && !rope.bias.empty(); ++i) qkv[i] += rope.bias[static_cast<size_t>(i)];
  for (int64_t head = 0; head < rope.heads + rope.kv_heads; ++head) {
    float* x = qkv + head * dim;
    const Floats& weight = head < rope.heads ? rope.q_norm : rope.k_norm;
    if (!weight.empty()) NormRow(x, weight.data(), dim, rope.eps);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * rope.freqs[static_cast<size_t>(i)];  // f32, as in the CPU backend
      const float cos = std::cos(angle) * rope.scale, sin = std::sin(angle) * rope.scale;
      const float x1 = x[i], x2 = x[i + half];
      x[i] = x1 * cos - x2 * sin;
      x[i + half] = x2 * cos + x1 * sin;
    }
  }
}

}  // namespace kvtier::cuda::reference
