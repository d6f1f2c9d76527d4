// The whole 8B Llama with random weights made on the device: prefill against the matrix rate, decode against the bandwidth,
// both measured in the same run. Wall time of Run, with everything that a step of the engine pays on this side.
#include "bench_model.h"

#include <cmath>

#include "../kernels/kernels.h"

namespace kvtier::cuda::bench {

Shape Llama8B() {
  Shape shape{kVocab, kHidden, kIntermediate, kLayers, kHeads, kKvHeads, kHeadDim, kMaxTokens, 1e-5f, 0,
              1 / std::sqrt(static_cast<float>(kHeadDim)), 1, 0, false, {}, {}, 1, kLayers, {0}};
  RopeTable rope{{}, 1};
  for (int64_t i = 0; i < kHeadDim / 2; ++i) rope.freqs.push_back(std::pow(5e5f, -2.0f * static_cast<float>(i) / static_cast<float>(kHeadDim)));
  shape.ropes = {rope};
  for (int64_t l = 0; l < kLayers; ++l) shape.kinds.push_back({0, 0, 0, l});
  return shape;
}

double LayerParameters(const Shape& s) {
  return static_cast<double>(s.layers * s.hidden * (s.qkv_columns() + s.q_columns() + 3 * s.intermediate));
}

double StepFlops(const Shape& s, double computed, double queries) {
  // Scores and their product with the values, 2 FLOPs a multiply-add; a new token sees what is computed and half of the new ones.
  const double attention = 2.0 * 2 * static_cast<double>(s.layers * s.q_columns()) * queries * (computed + queries / 2);
  return 2 * (LayerParameters(s) * queries + static_cast<double>(s.vocab * s.hidden)) + attention;
}

double StepBytesAtLeast(const CudaTransformer& model, double tokens) {
  const Shape& s = model.shape();
  return (LayerParameters(s) + static_cast<double>(s.vocab * s.hidden)) * 2 + static_cast<double>(model.block_bytes()) / kBlockTokens * tokens;
}

Step MakeStep(const std::vector<Piece>& pieces) {
  Step step{};
  const auto entries = [](const Piece& piece) { return (piece.computed + piece.queries + kBlockTokens - 1) / kBlockTokens; };
  for (const Piece& piece : pieces) step.block_table_stride = std::max(step.block_table_stride, entries(piece));
  for (const Piece& piece : pieces) {
    step.query_tokens.push_back(static_cast<int32_t>(piece.queries));
    step.computed_tokens.push_back(static_cast<int32_t>(piece.computed));
    step.sample.push_back(piece.sample ? 1 : 0);
    step.sampling.push_back({0, 0, 1, 0});
    for (int64_t t = piece.computed; t < piece.computed + piece.queries; ++t) {
      step.token_ids.push_back(static_cast<int32_t>((piece.prompt * 7919 + t * 104729 + t * t % 1009) % kVocab));
    }
    for (int64_t b = 0; b < step.block_table_stride; ++b) {
      step.block_tables.push_back(b < entries(piece) ? static_cast<int32_t>(piece.first_block + b) : 0);
    }
  }
  return step;
}

Step Uniform(int64_t sequences, int64_t computed, int64_t queries) {
  std::vector<Piece> pieces;
  const int64_t blocks = (computed + queries + kBlockTokens - 1) / kBlockTokens;
  for (int64_t i = 0; i < sequences; ++i) pieces.push_back({i, computed, queries, 1 + i * blocks, true});
  return MakeStep(pieces);
}

Model8B::Model8B(const Limits& limits, const CudaOptions& options)
    : CudaTransformer(Llama8B(), std::make_shared<const DeviceWeights>(RandomDeviceWeights(Llama8B(), {}, NumberType::kBf16, 1)), limits, options) {
  fprintf(stderr, "8B: matrix products by %s; weights made in %.2f s, buffers in %.2f s\n", gemm_name().c_str(),
          start_times().weights_us / 1e6, start_times().buffers_us / 1e6);
  gpu::Stream stream;
  FillRandom(stream, NumberType::kBf16, pool(), static_cast<int64_t>(block_bytes()) / 2 * limits.blocks, 2, 1, 0);
  Finish(stream);
}

double Model8B::MedianUs(const Step& step, int repeats) {
  Check(step);
  for (int i = 0; i < Rounds(2); ++i) Run(step);  // loads kernels, captures the graph
  std::vector<double> times;
  for (int i = 0; i < Rounds(repeats); ++i) times.push_back(Run(step).elapsed_us);
  return Median(times);
}

namespace {

constexpr int64_t kContextTokens = Scaled(2048);

KVTIER_BENCH(model_8b) {
  Model8B model({.block_tokens = kBlockTokens, .blocks = 32 * (kContextTokens / kBlockTokens + 1) + 64, .threads = 1,
                 .max_step_tokens = Scaled(8192), .max_step_sequences = 32});
  for (const int64_t tokens : {Scaled(2048), Scaled(8192)}) {
    const double us = model.MedianUs(Uniform(1, 0, tokens), 9);
    ReportFlops("8B prefill", "bf16 " + std::to_string(tokens) + " tokens", us, StepFlops(model.shape(), 0, static_cast<double>(tokens)));
  }
  for (const int64_t batch : {1, 32}) {
    const std::string shape = "bf16 batch " + std::to_string(batch) + ", " + std::to_string(kContextTokens) + " tokens each";
    ReportBytes("8B decode", shape, model.MedianUs(Uniform(batch, kContextTokens - 1, 1), 41),
                StepBytesAtLeast(model, static_cast<double>(batch * kContextTokens)));
  }
}

// What it is worth that kernels of decodes begin before the one before them has ended.
KVTIER_BENCH(model_8b_dependent) {
  const std::vector<int64_t> batches = {1, 8, 32};
  std::vector<double> times[2];
  for (const bool dependent : {false, true}) {
    CudaOptions options;
    options.dependent_launches = dependent;
    Model8B model({.block_tokens = kBlockTokens, .blocks = 32 * (kContextTokens / kBlockTokens + 1) + 64, .threads = 1,
                   .max_step_tokens = 64, .max_step_sequences = 32}, options);
    for (const int64_t batch : batches) times[dependent ? 1 : 0].push_back(model.MedianUs(Uniform(batch, kContextTokens - 1, 1), 41));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const std::string shape = "bf16 batch " + std::to_string(batches[i]) + ", " + std::to_string(kContextTokens) + " tokens each, dependent launches";
    ReportUs("8B decode", shape, times[1][i], times[0][i], "without them");
  }
}

// One long context among short ones: it should cost what its bytes cost.
KVTIER_BENCH(model_8b_unequal) {
  const int64_t longest = Scaled(100'000), others = Scaled(500), each = others / kBlockTokens + 1;
  Model8B model({.block_tokens = kBlockTokens, .blocks = longest / kBlockTokens + 32 * each + 64, .threads = 1,
                 .max_step_tokens = 64, .max_step_sequences = 32});
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 31; ++i) pieces.push_back({i, others - 1, 1, 1 + i * each, true});
  pieces.push_back({31, longest - 1, 1, 1 + 31 * each, true});
  const std::string shape = "bf16 batch 32, one of " + std::to_string(longest) + " tokens among 31 of " + std::to_string(others);
  ReportBytes("8B decode", shape, model.MedianUs(MakeStep(pieces), 41), StepBytesAtLeast(model, static_cast<double>(longest + 31 * others)));
}

// What is left of a prompt whose prefix came from the tier.
KVTIER_BENCH(model_8b_tails) {
  const int64_t most = Scaled(30'000) + 500;
  Model8B model({.block_tokens = kBlockTokens, .blocks = most / kBlockTokens + 64, .threads = 1, .max_step_tokens = 512, .max_step_sequences = 1});
  for (const int64_t computed : {Scaled(10'000), Scaled(30'000)}) {
    for (const int64_t asked : {32, 128, 500}) {
      const int64_t queries = kTiny ? 2 + asked / 50 : asked;
      const double us = model.MedianUs(Uniform(1, computed, queries), 15);
      const std::string shape = "bf16 " + std::to_string(queries) + " tokens over " + std::to_string(computed);
      if (asked < 500) {
        ReportBytes("8B tail", shape, us, StepBytesAtLeast(model, static_cast<double>(computed + queries)));
      } else {
        ReportFlops("8B tail", shape, us, StepFlops(model.shape(), static_cast<double>(computed), static_cast<double>(queries)));
      }
    }
  }
}

}  // namespace
}  // namespace kvtier::cuda::bench
