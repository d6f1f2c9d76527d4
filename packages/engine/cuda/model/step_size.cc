#include "step_size.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "../gemm/kept_file.h"

namespace kvtier::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStepRounds = 3;
constexpr char kKind[] = "steps";
constexpr int64_t kSetDeadlineUs = 60'000'000;
constexpr double kMostUs = 1e9;  // of what is believed of a file

std::string Hex(uint64_t value) {
  char text[17];
  snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(value));
  return text;
}

uint64_t Fnv(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

// All that a step's time depends on, beside the step: models of the same shape are computed in the same time.
std::string Model(const Shape& s, const Limits& limits, const CudaOptions& options) {
  std::ostringstream out;
  for (const int64_t each : {s.vocab, s.hidden, s.intermediate, s.layers, s.heads, s.kv_heads, s.head_dim, s.groups, s.block_layers, limits.block_tokens}) {
    out << each << ' ';
  }
  out << s.gelu << ' ' << static_cast<int>(options.compute) << ' ' << static_cast<int>(options.kv) << ' ' << options.gemm.equal_bits;
  for (const LayerKind& kind : s.kinds) out << ' ' << kind.window << '/' << kind.group << '/' << kind.slot;
  return out.str();
}

// A prompt's tokens [computed, computed + queries), the last one asked for. Blocks of each group follow one another.
Step PromptStep(const Shape& shape, const Limits& limits, int64_t computed, int64_t queries) {
  Step step{};
  step.query_tokens = {static_cast<int32_t>(queries)};
  step.computed_tokens = {static_cast<int32_t>(computed)};
  step.sample = {1};
  step.sampling = {{0, 0, 1, 0}};
  for (int64_t t = computed; t < computed + queries; ++t) step.token_ids.push_back(static_cast<int32_t>((t * 7919 + 13) % shape.vocab));
  step.block_table_stride = (computed + queries + limits.block_tokens - 1) / limits.block_tokens;
  const int64_t each = (limits.blocks - 1) / shape.groups;
  for (int64_t group = 0; group < shape.groups; ++group) {
    for (int64_t b = 0; b < step.block_table_stride; ++b) step.block_tables.push_back(static_cast<int32_t>(1 + group * each + b));
  }
  return step;
}

// A model that is there to be timed.
class StepTrial {
 public:
  StepTrial(const Shape& shape, const std::shared_ptr<const DeviceWeights>& weights, const Limits& limits, const CudaOptions& options)
      : free_before_(static_cast<int64_t>(gpu::Info().free_bytes)), model_(shape, weights, limits, options) {
    // Keys and values that no step has made are read, too: they must be numbers.
    gpu::Stream stream;
    stream.Set(model_.pool(), 0, model_.block_bytes() * static_cast<size_t>(limits.blocks));
    if (!stream.Synchronize(kSetDeadlineUs)) {
      gpu::Abandon();
      throw std::runtime_error("GPU: the KV cache of a trial was not filled within 60 s; restart the worker");
    }
  }

  StepTime Time(int64_t tokens, int64_t prompt, const std::function<double(const Step&)>& stopwatch) {
    const auto median = [&](int64_t computed) {
      const Step step = PromptStep(model_.shape(), model_.limits(), computed, tokens);
      std::array<double, kStepRounds> times{};
      for (double& us : times) {
        us = stopwatch ? stopwatch(step) : model_.Run(step).elapsed_us;
      }
      std::sort(times.begin(), times.end());
      return times[kStepRounds / 2];
    };
    model_.Run(PromptStep(model_.shape(), model_.limits(), 0, tokens));  // kernels are loaded
    const double first = median(0);
    return {tokens, first, median(prompt - tokens)};
  }
  int64_t taken_bytes() const { return free_before_ - static_cast<int64_t>(gpu::Info().free_bytes); }

 private:
  const int64_t free_before_;
  CudaTransformer model_;
};

// What was measured before, of prompts of so many tokens.
class KeptTimes {
 public:
  KeptTimes(const std::string& folder, const std::string& of, const std::string& model, int64_t prompt)
      : file_(folder, kKind, of, "kvtier: what steps take, 1: " + model), prompt_(prompt) {
    Read();
  }
  const StepTime* Find(int64_t tokens) const {
    const auto found = times_.find({prompt_, tokens});
    return found == times_.end() ? nullptr : &found->second;
  }
  // What counts from now on: `time`, or what another process has kept before.
  StepTime Keep(const StepTime& time) {
    file_.Change([&] {
      Read();
      times_.emplace(std::pair{prompt_, time.tokens}, time);
      std::vector<std::string> lines;
      for (const auto& [key, each] : times_) {
        std::ostringstream line;
        line << key.first << ' ' << each.tokens << ' ' << each.first_us << ' ' << each.last_us;
        lines.push_back(line.str());
      }
      return lines;
    });
    return times_.emplace(std::pair{prompt_, time.tokens}, time).first->second;
  }

 private:
  void Read() {
    const auto lines = file_.Read();
    if (!lines) return;
    std::map<std::pair<int64_t, int64_t>, StepTime> found;
    for (const std::string& line : *lines) {
      std::istringstream fields(line);
      int64_t prompt = 0;
      StepTime time{};
      const bool valid = (fields >> prompt >> time.tokens >> time.first_us >> time.last_us) && time.tokens > 0 && prompt >= time.tokens &&
                         time.first_us > 0 && time.first_us < kMostUs && time.last_us > 0 && time.last_us < kMostUs;
      if (!valid) return;
      found[{prompt, time.tokens}] = time;
    }
    times_.swap(found);
  }

  KeptFile file_;
  const int64_t prompt_;
  std::map<std::pair<int64_t, int64_t>, StepTime> times_;
};

}  // namespace

size_t ChooseStepSize(std::span<const StepTime> times, const StepBounds& bounds) {
  size_t chosen = 0;
  for (size_t i = 1; i < times.size() && std::max(times[i].first_us, times[i].last_us) <= bounds.longest_us; ++i) {
    if (times[i].PerToken() <= times[chosen].PerToken() * (1 - bounds.least_gain)) chosen = i;
  }
  return chosen;
}

StepChoice MeasureStepSize(const Shape& shape, const std::shared_ptr<const DeviceWeights>& weights, const Limits& limits,
                           const CudaOptions& options, const StepSizeOptions& asked) {
  const auto start = Clock::now();
  StepChoice choice{.limits = limits};
  std::vector<StepSize> sizes = asked.sizes;
  // One prompt for all sizes. One that no prompt can fill is not measured.
  const int64_t longest = std::min(shape.max_tokens, sizes.empty() ? 0 : sizes.back().tokens);
  while (sizes.size() > 1 && sizes.back().tokens > longest) sizes.pop_back();
  choice.prompt = longest;
  if (sizes.empty()) return choice;
  const auto take = [&](const StepSize& size) { choice.limits.max_step_tokens = size.tokens, choice.limits.blocks = size.blocks; };
  take(sizes.front());
  if (sizes.size() == 1) return choice;

  gpu::Use(options.device);
  const auto info = gpu::Info();
  const std::string model = Model(shape, limits, options);
  const std::string gemm = Gemm(options.gemm).name();
  KeptTimes kept(asked.folder,
                 info.name + " " + std::to_string(info.compute_capability) + " driver " + std::to_string(info.driver_version) + " " + Gemm::kKernels +
                     " " + Hex(Fnv(model + " " + gemm)),
                 model + " " + gemm, longest);

  // Made when the first size has to be measured, as large as the device has room for.
  std::optional<StepTrial> trial;
  CudaOptions plain = options;
  plain.capture_at_start = false;
  const auto try_sizes = [&] {
    while (!trial && sizes.size() > 1) {
      Limits all = limits;
      all.max_step_tokens = sizes.back().tokens;
      all.max_step_sequences = 1;
      all.blocks = 1 + shape.groups * ((longest + limits.block_tokens - 1) / limits.block_tokens);
      choice.reckoned_bytes = static_cast<int64_t>(StepBytes(shape, all, options, info.multiprocessors) +
                                                   KvBlockBytes(shape, limits.block_tokens, options.kv) * static_cast<size_t>(all.blocks + 1));
      try {
        trial.emplace(shape, weights, all, plain);
      } catch (const gpu::OutOfMemory&) {
        sizes.pop_back();
      }
    }
  };
  for (size_t i = 0; i < sizes.size(); ++i) {
    const StepTime* const known = kept.Find(sizes[i].tokens);
    if (known == nullptr) {
      try_sizes();
      if (!trial || i >= sizes.size()) break;
      choice.measured = true;
    }
    choice.times.push_back(known != nullptr ? *known : kept.Keep(trial->Time(sizes[i].tokens, longest, asked.stopwatch)));
    if (std::max(choice.times.back().first_us, choice.times.back().last_us) > asked.bounds.longest_us) break;
  }
  if (trial) choice.taken_bytes = trial->taken_bytes();
  if (!choice.times.empty()) take(sizes[ChooseStepSize(choice.times, asked.bounds)]);
  choice.measuring_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  return choice;
}

}  // namespace kvtier::cuda
