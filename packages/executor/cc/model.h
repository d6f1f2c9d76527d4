// What a model is to the native side: shapes, and weights as f32 in one piece of memory. TypeScript has read and
// checked config.json and the safetensors headers (packages/executor/src/weights.ts); here only bytes are converted.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "thread_pool.h"

namespace kvtier {

enum class Dtype { kF32 = 0, kF16 = 1, kBf16 = 2 };

// A tensor in a file; count is elements.
struct TensorRef {
  int file;
  uint64_t offset;
  uint64_t count;
  Dtype dtype;
};

struct Shape {
  int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_tokens;
  float rms_eps;
  float rope_scale;                // multiplies cos and sin (yarn's attention factor), else 1
  std::vector<float> rope_freqs;   // [head_dim / 2]
  std::vector<int64_t> windows;    // [layers]: a query at position p sees keys > p - window; 0 = all
  int64_t q_columns() const { return heads * head_dim; }
  int64_t kv_columns() const { return kv_heads * head_dim; }
  int64_t qkv_columns() const { return q_columns() + 2 * kv_columns(); }
};

// Matrices are [outputs, inputs] row-major, as in the files; null where the family has none.
struct Layer {
  const float* input_norm;
  const float* qkv;       // q, k, v stacked
  const float* qkv_bias;
  const float* q_norm;    // [head_dim], Qwen3
  const float* k_norm;
  const float* o;
  const float* o_bias;
  const float* post_norm;
  const float* gate_up;   // gate, up stacked
  const float* down;
};

// The tensors that are stacked into one matrix, in order; empty where the family has none.
using TensorStack = std::vector<TensorRef>;
struct LayerPlan {
  TensorStack input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, post_norm, gate_up, down;
};
struct WeightPlan {
  std::vector<std::string> files;
  TensorStack embedding, norm, lm_head;  // lm_head empty: tied to the embedding
  std::vector<LayerPlan> layers;
};

struct Weights {
  const float* embedding;
  const float* norm;
  const float* lm_head;
  std::vector<Layer> layers;
  Memory memory;
};

// Maps the files, converts to f32 with the pool's threads. Throws std::runtime_error("MODEL: ...").
Weights LoadWeights(const WeightPlan& plan, ThreadPool& pool);

}  // namespace kvtier
