// Whether a prompt whose blocks came back from the arena gives what it gave cold: which bits must be equal, what rounding may change.
#include <cmath>
#include <stdexcept>

#include "bench_engine.h"
#include "same_answers.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int64_t kEqualTokens = 64, kEqualBlocks = kEqualTokens / kBlockTokens - 1;
static_assert(kEqualBlocks <= kHeld);

// A prompt's logits: computed in one step; its tail over the blocks of that step; the same when these have been to the arena and back.
struct Answers {
  std::vector<float> cold, near, warm;
};
Answers AnswersOf(Engine& engine, int64_t prompt) {
  const auto logits = [&](int64_t computed) {
    Step step = MakeStep({{prompt, computed, kEqualTokens - computed, 1, true}});
    step.want_logits = true;
    return engine.model.Run(step).logits;
  };
  const auto first_of = [](auto& all) { return std::span(all).first(static_cast<size_t>(kEqualBlocks)); };
  Answers answers;
  answers.cold = logits(0);
  Require(engine.transfers.Export(engine.id, first_of(engine.ids), first_of(engine.offsets), first_of(engine.sums)));
  answers.near = logits(kEqualBlocks * kBlockTokens);
  engine.Forget();
  engine.Import(0, kEqualBlocks);
  answers.warm = logits(kEqualBlocks * kBlockTokens);
  return answers;
}

// What must be equal in every bit: a tail over blocks that came back, and over the same that never left. What differs by rounding alone: both,
// and the prompt in one step (same_answers.h). A prompt for which either does not hold is an error.
KVTIER_BENCH(system_equal) {
  Engine engine(Scaled(8192));
  const int64_t prompts = kTiny ? 4 : 1000;
  const double tolerance = RoundingTolerance(NumberType::kBf16, kLayers);
  int64_t same_bits = 0, same_token = 0, ties = 0;
  double distance = 0, gap = 0;
  for (int64_t prompt = 0; prompt < prompts; ++prompt) {
    const Answers answers = AnswersOf(engine, prompt);
    same_bits += answers.warm == answers.near ? 1 : 0;
    const Agreement agreement = CompareAnswers(answers.cold, answers.warm, tolerance);
    same_token += agreement.kind == Agreement::Kind::kEqual ? 1 : 0;
    ties += agreement.kind == Agreement::Kind::kTie ? 1 : 0;
    distance = std::max(distance, std::isnan(agreement.distance) ? HUGE_VAL : agreement.distance);
    gap = std::max(gap, agreement.gap);
  }
  const auto all = static_cast<double>(prompts);
  const std::string of = "prompts of " + std::to_string(kEqualTokens) + " tokens";
  ReportCount("8B: prompts with the same bits from blocks that came back as from blocks that never left", static_cast<double>(same_bits), all, of);
  ReportCount("8B: prompts with the same greedy token warm as cold, or a tie", static_cast<double>(same_token + ties), all, of + ", " + std::to_string(ties) + " ties");
  ReportCount("8B: logits warm, their largest distance from cold", distance, tolerance, "what rounding explains");
  if (same_bits == prompts && same_token + ties == prompts) return;
  throw std::runtime_error(std::to_string(prompts - same_bits) + " prompts with other bits, " + std::to_string(prompts - same_token - ties) +
                           " with logits or tokens that rounding does not explain: distance " + std::to_string(distance) + ", gap " + std::to_string(gap) + " times the noise");
}

// With equal bits, a tail over a cached prefix is the prompt in one step.
KVTIER_BENCH(system_equal_bits) {
  CudaOptions options;
  options.gemm.equal_bits = true;
  Engine engine(Scaled(8192), kPromptBlocks + 64, 1, options);
  const int64_t prompts = Scaled(100);
  int64_t same = 0;
  for (int64_t prompt = 0; prompt < prompts; ++prompt) {
    const Answers answers = AnswersOf(engine, prompt);
    same += answers.cold == answers.warm && answers.cold == answers.near ? 1 : 0;
  }
  ReportCount("8B with equal bits: prompts with the same bits warm as cold", static_cast<double>(same), static_cast<double>(prompts), "prompts of " + std::to_string(kEqualTokens) + " tokens");
  if (same != prompts) throw std::runtime_error(std::to_string(prompts - same) + " prompts have other bits warm than cold");
}

}  // namespace
}  // namespace kvtier::cuda::bench
