// That the comparison of prompts computed cold and warm (same_answers.h) tells a tie from an error.
#include <cmath>
#include <limits>

#include "../model/transformer.h"
#include "check.h"
#include "same_answers.h"
#include "tiny_model.h"

namespace kvtier::cuda::check {
namespace {

using Kind = Agreement::Kind;

// 1,000 logits around zero; `best` and `second` stand out, so far from one another.
std::vector<float> Logits(float gap) {
  auto logits = RandomFloats(11, 1000, -1, 1);
  logits[300] = 5;
  logits[700] = 5 - gap;
  return logits;
}

std::vector<float> Noisy(std::vector<float> logits, float noise) {
  const auto by = RandomFloats(12, static_cast<int64_t>(logits.size()), -noise, noise);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += by[i];
  return logits;
}

KVTIER_CHECK(same_answers) {
  const double tolerance = RoundingTolerance(NumberType::kBf16, 32);
  const auto is = [&](const std::string& name, Kind kind, const std::vector<float>& expected, const std::vector<float>& got) {
    ExpectTrue("CompareAnswers", name, CompareAnswers(expected, got, tolerance).kind == kind);
  };
  ExpectTrue("CompareAnswers", "the tolerance of 32 layers in bf16 is a sixteenth", tolerance == 0x1p-4);
  const auto clear = Logits(1), close = Logits(0.001f);
  is("the same bits", Kind::kEqual, clear, clear);
  is("rounded otherwise, the same token", Kind::kEqual, clear, Noisy(clear, 0.02f));
  auto swapped = Noisy(close, 0.02f);
  swapped[300] = 4.99f, swapped[700] = 5.01f;
  is("two that are closer than rounding change places", Kind::kTie, close, swapped);
  auto far = Noisy(clear, 0.02f);
  std::swap(far[300], far[700]);
  is("two that are not", Kind::kWrong, clear, far);
  is("the same token from logits that are too far away", Kind::kWrong, clear, Noisy(clear, 0.5f));
  auto nan = clear;
  nan[5] = std::numeric_limits<float>::quiet_NaN();
  is("a logit that is no number", Kind::kWrong, clear, nan);
  is("fewer logits", Kind::kWrong, clear, std::vector<float>(clear.begin(), clear.end() - 1));
  is("none", Kind::kWrong, {}, {});
}

// Prompts in one piece, and their tails over a cached prefix whose blocks are as they were, or have lost a block's keys.
KVTIER_CHECK(same_answers_of_prefixes) {
  constexpr auto kType = NumberType::kBf16;
  constexpr Limits kLimits{.block_tokens = 8, .blocks = 128, .threads = 2, .max_step_tokens = 96, .max_step_sequences = 4};
  constexpr int64_t kTokens = 64, kPrefix = 48, kPrompts = 8;
  const TinyModel model(Families()[0], kType);
  CudaOptions options;
  options.compute = options.kv = kType;
  CudaTransformer cuda(model.shape, model.plan, kLimits, options);
  const double tolerance = RoundingTolerance(kType, model.shape.layers);
  int wrong = 0, missed = 0;
  for (int64_t prompt = 0; prompt < kPrompts; ++prompt) {
    const auto tokens = RandomInts(static_cast<uint64_t>(prompt), kTokens, 0, static_cast<int32_t>(model.shape.vocab) - 1);
    Sequences whole(model.shape, kLimits), parts(model.shape, kLimits);
    const StepResult cold = cuda.Run(whole.Next({{whole.Add(tokens), kTokens, true}}));
    const int64_t one = parts.Add(tokens);
    cuda.Run(parts.Next({{one, kPrefix, false}}));
    const Step tail = parts.Next({{one, kTokens - kPrefix, true}});
    wrong += CompareAnswers(cold.logits, cuda.Run(tail).logits, tolerance).kind == Kind::kWrong ? 1 : 0;
    gpu::Stream stream;
    stream.Set(cuda.block(tail.block_tables[2]), 0, cuda.block_bytes());
    Finish(stream);
    missed += CompareAnswers(cold.logits, cuda.Run(tail).logits, tolerance).kind == Kind::kWrong ? 0 : 1;
  }
  Expect("CompareAnswers", "prompts whose prefix was cached, and that count as wrong", wrong, 0);
  Expect("CompareAnswers", "prompts of which a block was lost, and that do not", missed, 0);
}

}  // namespace
}  // namespace kvtier::cuda::check
