// The 8B Llama of the benches, with random weights, and steps of it: what bench_model.cc and bench_system.cc share.
#pragma once
#include "../model/transformer.h"
#include "bench.h"

namespace kvtier::cuda::bench {

constexpr int64_t kBlockTokens = 16, kMaxTokens = 131072;

Shape Llama8B();
// Multiplications of a token with all matrices of the layers.
double LayerParameters(const Shape& shape);
// Of `queries` new tokens behind `computed` ones, with logits of one.
double StepFlops(const Shape& shape, double computed, double queries);
// What a step reads at least: every weight once, keys and values of so many tokens.
double StepBytesAtLeast(const CudaTransformer& model, double tokens);

// A sequence's part of a step; its blocks follow one another from `first_block`. Tokens follow from the prompt's number.
struct Piece {
  int64_t prompt, computed, queries, first_block;
  bool sample;
};
Step MakeStep(const std::vector<Piece>& pieces);
// `sequences` sequences that have computed `computed` tokens and get `queries` more; each has its own blocks.
Step Uniform(int64_t sequences, int64_t computed, int64_t queries);

class Model8B : public CudaTransformer {
 public:
  // The pool is filled with noise: contexts that nobody computed.
  explicit Model8B(const Limits& limits, const CudaOptions& options = {});
  double MedianUs(const Step& step, int repeats);
};

}  // namespace kvtier::cuda::bench
