// How large steps become (model/step_size.h), and what each size takes: the 8B Llama with random weights.
#include <algorithm>

#include "../model/step_size.h"
#include "bench_model.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int64_t kLargest = Scaled(kTiny ? 1024 : 8192);

// The choice that a worker makes at its start, and what each size takes.
KVTIER_BENCH(system_step_sizes) {
  Limits limits{.block_tokens = kBlockTokens, .blocks = 64, .threads = 1, .max_step_tokens = Scaled(512), .max_step_sequences = 64};
  CudaOptions options;
  StepSizeOptions sizes;
  if (kTiny) sizes.bounds.longest_us = 1e9;
  for (int64_t tokens = Scaled(512); tokens <= kLargest; tokens *= 2) sizes.sizes.push_back({tokens, limits.blocks});
  const auto weights = std::make_shared<const DeviceWeights>(RandomDeviceWeights(Llama8B(), {}, NumberType::kBf16, 1));
  const StepChoice choice = MeasureStepSize(Llama8B(), weights, limits, options, sizes);
  const std::string prompt = "8B, a prompt of " + std::to_string(choice.prompt) + " tokens";
  for (const StepTime& time : choice.times) {
    const std::string name = prompt + " in steps of " + std::to_string(time.tokens);
    ReportUs("step size: a token", name, time.PerToken(), choice.times[0].PerToken(), "in the smallest steps");
    ReportUs("step size: the longest step", name, std::max(time.first_us, time.last_us), sizes.bounds.longest_us, "the bound");
  }
  ReportCount("step size: tokens, as chosen for " + prompt, static_cast<double>(choice.limits.max_step_tokens), static_cast<double>(sizes.sizes.back().tokens), "the largest");
  ReportCount("step size: device memory of the trial", static_cast<double>(choice.taken_bytes), static_cast<double>(choice.reckoned_bytes), "what was reckoned");
  ReportUs("start: the size of steps measured", prompt, choice.measuring_us, weights->elapsed_us, "weights made on the device");
}

}  // namespace
}  // namespace kvtier::cuda::bench
