// target[rows, outputs] (+)= source[rows, inputs] x weight[outputs, inputs]^T, all f32. A row's result depends on that row alone (tile.h).
#pragma once
#include <cstdint>

#include "thread_pool.h"

namespace kvtier {

struct GemmArgs {
  float* target;
  int64_t target_stride;
  const float* source;
  int64_t source_stride;
  const float* weight;
  int64_t rows, outputs, inputs;
  bool accumulate;  // add to what target holds (residual) instead of replacing it
};

// In place, once: a row-major weight[outputs, inputs] becomes panels of 16 outputs, in which an input's weights lie side by side; what is
// left at the end lies the same way.
void PackPanels(float* weight, int64_t outputs, int64_t inputs);
// Of a packed weight; spread over the pool.
void Gemm(const GemmArgs& args, ThreadPool& pool);
// Of a row-major weight, for one that is read as rows, too (the embedding); for few rows as fast.
void GemmOfRows(const GemmArgs& args, ThreadPool& pool);

}  // namespace kvtier
