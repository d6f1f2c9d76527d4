// The whole 8B Llama with random weights made on the device: prefill against the matrix rate, decode against the bandwidth,
// both measured in the same run. Wall time of Run, with everything that a step of the engine pays on this side.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../model/transformer.h"
#include "bench.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int64_t kLayers = 32, kBlockTokens = 16, kMaxTokens = 16384, kContextTokens = 2048;
constexpr Limits kLimits{.block_tokens = kBlockTokens, .blocks = 32 * kContextTokens / kBlockTokens + 64, .threads = 1,
                         .max_step_tokens = 8192, .max_step_sequences = 32};

Shape Llama8B() {
  Shape shape{kVocab, kHidden, kIntermediate, kLayers, kHeads, kKvHeads, kHeadDim, kMaxTokens, 1e-5f, 0,
              1 / std::sqrt(static_cast<float>(kHeadDim)), 1, 0, false, {}, {}, 1, kLayers, {0}};
  RopeTable rope{{}, 1};
  for (int64_t i = 0; i < kHeadDim / 2; ++i) rope.freqs.push_back(std::pow(5e5f, -2.0f * static_cast<float>(i) / static_cast<float>(kHeadDim)));
  shape.ropes = {rope};
  for (int64_t l = 0; l < kLayers; ++l) shape.kinds.push_back({0, 0, 0, l});
  return shape;
}

// Multiplications of a token with all matrices of the layers.
double LayerParameters(const Shape& s) {
  return static_cast<double>(s.layers * s.hidden * (s.qkv_columns() + s.q_columns() + 3 * s.intermediate));
}

// `sequences` sequences that have computed `computed` tokens and get `queries` more; each has its own blocks.
Step Uniform(int64_t sequences, int64_t computed, int64_t queries) {
  Step step{};
  const int64_t blocks = (computed + queries + kBlockTokens - 1) / kBlockTokens;
  step.block_table_stride = blocks;
  for (int64_t i = 0; i < sequences; ++i) {
    step.query_tokens.push_back(static_cast<int32_t>(queries));
    step.computed_tokens.push_back(static_cast<int32_t>(computed));
    step.sample.push_back(1);
    step.sampling.push_back({0, 0, 1, 0});
    for (int64_t t = 0; t < queries; ++t) step.token_ids.push_back(static_cast<int32_t>((i * 7919 + t * 104729) % kVocab));
    for (int64_t b = 0; b < blocks; ++b) step.block_tables.push_back(static_cast<int32_t>(1 + i * blocks + b));
  }
  return step;
}

double MedianUs(CudaTransformer& model, const Step& step, int repeats) {
  model.Check(step);
  for (int i = 0; i < 2; ++i) model.Run(step);  // loads kernels, captures the graph
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) times.push_back(model.Run(step).elapsed_us);
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)];
}

KVTIER_BENCH(model_8b) {
  const Shape shape = Llama8B();
  CudaTransformer model(shape, RandomDeviceWeights(shape, {}, NumberType::kBf16, 1), kLimits, {});
  fprintf(stderr, "8B: matrix products by %s; weights made in %.2f s, buffers in %.2f s\n", model.gemm_name().c_str(),
          model.start_times().weights_us / 1e6, model.start_times().buffers_us / 1e6);
  gpu::Stream stream;
  const auto pool_numbers = static_cast<int64_t>(model.block_bytes()) / 2 * kLimits.blocks;
  FillRandom(stream, NumberType::kBf16, model.pool(), pool_numbers, 2, 1, 0);
  if (!stream.Synchronize(60'000'000)) throw std::runtime_error("the KV pool was not filled within 60 s");

  const double lm_head = static_cast<double>(shape.vocab * shape.hidden);
  for (const int64_t tokens : {2048, 8192}) {
    // Queries see half of the others; scores and their product with the values, 2 FLOPs a multiply-add.
    const double attention = 2.0 * 2 * static_cast<double>(shape.layers * shape.q_columns() * tokens) * (static_cast<double>(tokens) / 2);
    const double flops = 2 * (LayerParameters(shape) * static_cast<double>(tokens) + lm_head) + attention;
    ReportFlops("8B prefill", "bf16 " + std::to_string(tokens) + " tokens", MedianUs(model, Uniform(1, 0, tokens), 9), flops);
  }
  for (const int64_t batch : {1, 32}) {
    const double kv = static_cast<double>(model.block_bytes()) / kBlockTokens * static_cast<double>(batch * kContextTokens);
    ReportBytes("8B decode", "bf16 batch " + std::to_string(batch) + ", " + std::to_string(kContextTokens) + " tokens each",
                MedianUs(model, Uniform(batch, kContextTokens - 1, 1), 41), (LayerParameters(shape) + lm_head) * 2 + kv);
  }
}

}  // namespace
}  // namespace kvtier::cuda::bench
