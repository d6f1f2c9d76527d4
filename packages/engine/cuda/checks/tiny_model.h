// Small random models of every family that is served, as a weights file on disk, for checks of whole forward passes; and
// sequences over a paged pool whose blocks lie in random order.
#pragma once
#include <string>
#include <vector>

#include "../gpu/numeric.h"
#include "model.h"
#include "step.h"

namespace kvtier::cuda::check {

// What sets a family apart (packages/engine/model/src/model-config.ts).
struct Family {
  const char* name;
  int64_t heads = 4, kv_heads = 2, head_dim = 32;
  bool tied = false, qkv_bias = false, o_bias = false, qk_norm = false, gemma = false;
  std::vector<int64_t> windows = {0, 0};  // per layer
  float rope_scale = 1;
  float logit_cap = 0;
};
const std::vector<Family>& Families();

// The file lives as long as this does.
class TinyModel {
 public:
  TinyModel(const Family& family, NumberType file_type);
  ~TinyModel();
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;
  Shape shape;
  WeightPlan plan;
};

// Sequences that grow, and the steps that make them grow. Block ids come from a shuffled list; blocks that have left a
// window are null in the tables, as the scheduler leaves them.
class Sequences {
 public:
  Sequences(const Shape& shape, const Limits& limits) : shape_(shape), limits_(limits) {}
  // Index of a new sequence with this prompt, nothing of it computed.
  int64_t Add(std::vector<int32_t> tokens);
  struct Part {
    int64_t sequence, tokens;
    bool sample;
  };
  // The next `tokens` of each; they count as computed from then on. Even sequences are greedy, odd ones are drawn for.
  Step Next(const std::vector<Part>& parts, bool want_logits = true);
  void Append(int64_t sequence, int32_t token) { all_[static_cast<size_t>(sequence)].tokens.push_back(token); }

 private:
  struct One {
    std::vector<int32_t> tokens;
    int64_t computed = 0;
    std::vector<std::vector<int32_t>> blocks;  // [group]
  };
  int32_t NextBlock();
  const Shape& shape_;
  const Limits limits_;
  std::vector<One> all_;
  int64_t taken_ = 0;
};

}  // namespace kvtier::cuda::check
