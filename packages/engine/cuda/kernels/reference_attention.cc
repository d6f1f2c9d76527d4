#include "reference_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvtier::cuda {
namespace {

template <class T>
void WidenAs(const void* base, int64_t index, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat(static_cast<const T*>(base)[index + i]);
}

void Widen(NumberType type, const void* base, int64_t index, int64_t count, double* to) {
  switch (type) {
    case NumberType::kF32:
      return WidenAs<float>(base, index, count, to);
    case NumberType::kF16:
      return WidenAs<f16>(base, index, count, to);
    case NumberType::kBf16:
      return WidenAs<bf16>(base, index, count, to);
    default:
      return WidenAs<e4m3>(base, index, count, to);
  }
}

double Dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {};  // one sum would wait for itself
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

void ReferenceAttention(NumberType type, const AttentionArgs& a, const Batch& b, double* out) {
  const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads;
  const auto row_of = [&](const int32_t* table, int32_t kv, int64_t head, int64_t key) -> const void* {
    const int64_t block = table[key / a.kv.block_tokens];
    return static_cast<const uint8_t*>(a.kv.pool) + block * a.kv.block_bytes + a.kv.layer_offset +
           a.kv.Row(kv, static_cast<int32_t>(head), static_cast<int32_t>(key % a.kv.block_tokens));
  };
  const auto first_of = [&](int64_t position) { return a.window == 0 ? 0 : std::max<int64_t>(0, position - a.window + 1); };
  std::vector<double> scores, keys, values, query(static_cast<size_t>(dim));
  for (int64_t sequence = 0; sequence < b.sequences; ++sequence) {
    const int32_t* table = a.table + sequence * b.table_stride;
    const int64_t start = b.query_start[sequence], end = b.query_start[sequence + 1], before = b.computed[sequence];
    const int64_t least = first_of(before), context = before + end - start;
    keys.resize(static_cast<size_t>((context - least) * dim));
    values.resize(keys.size());
    for (int64_t head = 0; head < a.heads; ++head) {
      if (head % group == 0) {
        for (int64_t key = least; key < context; ++key) {
          Widen(a.kv.type, row_of(table, 0, head / group, key), 0, dim, &keys[static_cast<size_t>((key - least) * dim)]);
          Widen(a.kv.type, row_of(table, 1, head / group, key), 0, dim, &values[static_cast<size_t>((key - least) * dim)]);
        }
      }
      for (int64_t row = start; row < end; ++row) {
        const int64_t position = before + row - start, first = first_of(position);
        Widen(type, a.q, row * a.q_stride + head * dim, dim, query.data());
        scores.clear();
        for (int64_t key = first; key <= position; ++key) {
          const double dot = a.scale * Dot(query.data(), &keys[static_cast<size_t>((key - least) * dim)], dim);
          scores.push_back(a.soft_cap > 0 ? a.soft_cap * std::tanh(dot / a.soft_cap) : dot);
        }
        const double max = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - max);
        double* target = out + (row * a.heads + head) * dim;
        std::fill_n(target, dim, 0.0);
        for (int64_t key = first; key <= position; ++key) {
          const double* v = &values[static_cast<size_t>((key - least) * dim)];
          const double weight = scores[static_cast<size_t>(key - first)] / sum;
          for (int64_t i = 0; i < dim; ++i) target[i] += weight * v[i];
        }
      }
    }
  }
}

}  // namespace kvtier::cuda
