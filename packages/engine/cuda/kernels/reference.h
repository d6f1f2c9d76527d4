// What the row kernels compute, naively on the CPU in f32: for the comparisons in checks/. Vectors are whole matrices,
// row-major. Inputs that a kernel sees as T are rounded to T by the caller; the residual is rounded where the kernels store it.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace kvtier::cuda::reference {

using Floats = std::vector<float>;

Floats GatherRows(const Floats& source, const std::vector<int32_t>& index, int64_t columns, float scale);
Floats RmsNorm(const Floats& source, const Floats& weight, float eps);  // columns = weight.size()
// residual is rounded to `type` after the sum, as it is stored.
Floats AddRmsNorm(Floats& residual, const Floats& added, const Floats& bias, const Floats& weight, float eps, NumberType type);
void NormAdd(Floats& residual, const Floats& added, const Floats& bias, const Floats& weight, float eps);
Floats GatedActivation(const Floats& gate_up, int64_t columns, bool gelu);

// One row of RopeAndStore: bias (or empty), norms (or empty) and rotation of q and k at `position`, in place.
struct RopeRow {
  int64_t heads, kv_heads, head_dim;
  Floats bias, q_norm, k_norm, freqs;
  float eps, scale;
};
void Rope(float* qkv, const RopeRow& rope, int64_t position);

}  // namespace kvtier::cuda::reference
