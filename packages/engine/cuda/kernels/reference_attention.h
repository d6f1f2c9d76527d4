// Attention on the CPU, naively and in double: what all kernels of attention are compared with.
#pragma once
#include "kernels.h"

namespace kvtier::cuda {

// `out`: [rows][heads x head_dim]. All pointers of the arguments are host memory here; workspace is not used.
void ReferenceAttention(NumberType, const AttentionArgs&, const Batch&, double* out);

}  // namespace kvtier::cuda
