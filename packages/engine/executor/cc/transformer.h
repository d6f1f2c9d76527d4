// One forward pass over a mixed batch. Owns the weights, the KV pool and all scratch, sized once; nothing is allocated
// in a step that grows with the model.
#pragma once
#include <memory>
#include <vector>

#include "attention.h"
#include "kv_pool.h"
#include "model.h"
#include "step.h"
#include "thread_pool.h"

namespace kvtier {

class Transformer {
 public:
  Transformer(Shape shape, const WeightPlan& plan, const Limits& limits);

  void Check(const Step& step) const { CheckStep(step, shape_, limits_); }
  StepResult Run(const Step& step);

  const KvPool& pool() const { return pool_; }

 private:
  void Layers(const std::vector<Sequence>& batch, int64_t rows);
  // hidden = hidden + norm(normed), row by row: what a block of a layer adds, where the family norms it first.
  void AddNormed(const float* weight, int64_t rows);
  void RotateAndStore(int64_t layer, const std::vector<Sequence>& batch, int64_t rows);

  int64_t rope_columns() const { return static_cast<int64_t>(shape_.ropes.size()) * shape_.head_dim / 2; }

  const Shape shape_;
  const Limits limits_;
  ThreadPool threads_;
  Weights weights_;
  KvPool pool_;
  Attention attention_;
  Memory hidden_, normed_, qkv_, mixed_, gate_up_, logits_, cos_, sin_;
  std::vector<int32_t> row_sequence_;  // row -> index in the batch
};

}  // namespace kvtier
