#include "reference_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvtier::cuda {
namespace {

double At(NumberType type, const void* base, int64_t index) {
  switch (type) {
    case NumberType::kF32:
      return static_cast<const float*>(base)[index];
    case NumberType::kF16:
      return ToFloat(static_cast<const f16*>(base)[index]);
    case NumberType::kBf16:
      return ToFloat(static_cast<const bf16*>(base)[index]);
    default:
      return ToFloat(static_cast<const e4m3*>(base)[index]);
  }
}

}  // namespace

void ReferenceAttention(NumberType type, const AttentionArgs& a, const Batch& b, double* out) {
  const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads;
  const auto row_of = [&](const int32_t* table, int32_t kv, int64_t head, int64_t key) -> const void* {
    const int64_t block = table[key / a.kv.block_tokens];
    return static_cast<const uint8_t*>(a.kv.pool) + block * a.kv.block_bytes + a.kv.layer_offset +
           a.kv.Row(kv, static_cast<int32_t>(head), static_cast<int32_t>(key % a.kv.block_tokens));
  };
  std::vector<double> scores;
  for (int64_t sequence = 0; sequence < b.sequences; ++sequence) {
    const int32_t* table = a.table + sequence * b.table_stride;
    for (int64_t row = b.query_start[sequence]; row < b.query_start[sequence + 1]; ++row) {
      const int64_t position = b.computed[sequence] + row - b.query_start[sequence];
      const int64_t first = a.window == 0 ? 0 : std::max<int64_t>(0, position - a.window + 1);
      for (int64_t head = 0; head < a.heads; ++head) {
        scores.clear();
        for (int64_t key = first; key <= position; ++key) {
          const void* k = row_of(table, 0, head / group, key);
          double dot = 0;
          for (int64_t i = 0; i < dim; ++i) dot += At(type, a.q, row * a.q_stride + head * dim + i) * At(a.kv.type, k, i);
          dot *= a.scale;
          scores.push_back(a.soft_cap > 0 ? a.soft_cap * std::tanh(dot / a.soft_cap) : dot);
        }
        const double max = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - max);
        double* target = out + (row * a.heads + head) * dim;
        std::fill_n(target, dim, 0.0);
        for (int64_t key = first; key <= position; ++key) {
          const void* v = row_of(table, 1, head / group, key);
          const double weight = scores[static_cast<size_t>(key - first)] / sum;
          for (int64_t i = 0; i < dim; ++i) target[i] += weight * At(a.kv.type, v, i);
        }
      }
    }
  }
}

}  // namespace kvtier::cuda
