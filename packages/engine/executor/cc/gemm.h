// target[rows, outputs] (+)= source[rows, inputs] x weight[outputs, inputs]^T, all row-major f32.
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

// OpenBLAS is told to use no threads of its own: call once before the first Gemm.
void GemmSetup();
// Many rows: pieces of OpenBLAS's sgemm, spread over the pool. Few rows (decode): each weight is read from memory once,
// outputs spread over the pool, because memory bandwidth is then the limit.
void Gemm(const GemmArgs& args, ThreadPool& pool);

}  // namespace kvtier
