// What a model is to the native side: shapes, and weights as f32 in one piece of memory. TypeScript has read and
// checked config.json and the safetensors headers (packages/engine/model/src/weights.ts); here only bytes are converted.
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

struct RopeTable {
  std::vector<float> freqs;  // [head_dim / 2], radians per position
  float scale;               // multiplies cos and sin (yarn's attention factor), else 1
};

// What one layer sees, and where its keys and values lie.
struct LayerKind {
  int64_t window;  // a query at position p sees keys > p - window; 0 = all
  int64_t rope;    // index into Shape::ropes
  int64_t group;   // attention group: which of a sequence's block tables
  int64_t slot;    // place among the group's layers inside a block
};

struct Shape {
  int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_tokens;
  float rms_eps;
  float norm_offset;      // added to every norm's weight: 1 where the files hold the distance from 1 (Gemma)
  float attention_scale;  // of q.k
  float embedding_scale;
  float logit_cap;        // final logits are cap * tanh(x / cap); 0 = off
  bool gelu;              // tanh-approximated GELU instead of SiLU
  std::vector<RopeTable> ropes;
  std::vector<LayerKind> kinds;  // [layers]
  int64_t groups = 1;            // attention groups; they share the pool's blocks
  int64_t block_layers = 1;      // layers that one block has room for: the most that a group has
  // [groups]: the window of its layers, 0 = all
  std::vector<int64_t> group_windows;
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
  const float* attention_out_norm;  // over what attention adds to the residual; Gemma 3
  const float* post_norm;           // before the feed-forward
  const float* gate_up;   // gate, up stacked
  const float* down;
  const float* mlp_out_norm;  // over what the feed-forward adds; Gemma 3
};

// The tensors that are stacked into one matrix, in order; empty where the family has none.
using TensorStack = std::vector<TensorRef>;
struct LayerPlan {
  TensorStack input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, attention_out_norm, post_norm, gate_up, down, mlp_out_norm;
};
// Read by a descriptor that the caller keeps open, so that it is the file whose digest he took, whatever has its name by now.
struct PlanFile {
  std::string path;  // for errors
  int fd;
};
struct WeightPlan {
  std::vector<PlanFile> files;
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

// Reads the files, converts to f32 and packs the layers' matrices (gemm.h) with the pool's threads. Throws std::runtime_error("MODEL: ...").
Weights LoadWeights(const WeightPlan& plan, const Shape& shape, ThreadPool& pool);

}  // namespace kvtier
