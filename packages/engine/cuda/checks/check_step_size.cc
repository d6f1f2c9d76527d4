// How large a step becomes, by measurement: with a clock that is told what steps take, and memory that is told how much there is.
#if defined(KVTIER_EMULATED)
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "../model/step_size.h"
#include "check.h"
#include "tiny_model.h"

namespace kvtier::cuda::check {
namespace {

constexpr Limits kStepLimits{.block_tokens = 8, .blocks = 64, .threads = 2, .max_step_tokens = 8, .max_step_sequences = 4};
constexpr int64_t kSizes[] = {8, 16, 32, 48}, kPrompt = 48;

std::string Chosen(const std::vector<StepTime>& times, const StepBounds& bounds = {}) {
  return std::to_string(times[ChooseStepSize(times, bounds)].tokens);
}

KVTIER_CHECK(step_size_choice) {
  const auto is = [](const std::string& name, const std::string& got, const std::string& expected) {
    ExpectTrue("ChooseStepSize", name + ": " + got, got == expected);
  };
  is("one size", Chosen({{512, 1e9, 1e9}}), "512");
  is("each larger one is faster per token", Chosen({{512, 100, 100}, {1024, 150, 150}, {2048, 250, 250}}), "2048");
  is("a gain of exactly a twentieth is one", Chosen({{1000, 1000, 1000}, {2000, 1900, 1900}}), "2000");
  is("a smaller gain is none", Chosen({{1000, 1000, 1000}, {2000, 1901, 1901}}), "1000");
  is("gains that are small one by one are seen together", Chosen({{1000, 1000, 1000}, {2000, 1940, 1940}, {4000, 3760, 3760}}), "4000");
  is("slower in between", Chosen({{1000, 1000, 1000}, {2000, 2200, 2200}, {4000, 3600, 3600}}), "4000");
  is("first and last step count alike", Chosen({{1000, 500, 1500}, {2000, 1900, 1900}}), "2000");
  is("a step that takes too long", Chosen({{512, 100, 100}, {1024, 150, 150}, {2048, 150, 201}}, {.longest_us = 200}), "1024");
  is("as long as is allowed", Chosen({{512, 100, 100}, {1024, 150, 200}}, {.longest_us = 200}), "1024");
  is("nothing behind a step that takes too long", Chosen({{512, 100, 100}, {1024, 150, 300}, {2048, 150, 150}}, {.longest_us = 200}), "512");
  is("the first, however long it takes", Chosen({{512, 300, 300}, {1024, 301, 301}}, {.longest_us = 200}), "512");
}

// A device on which a step takes so long, and every question that it is asked.
struct Told {
  double launch_us, token_us, pair_us;
  std::vector<std::pair<int64_t, int64_t>> asked = {};  // tokens, computed
  double operator()(const Step& step) {
    const auto tokens = static_cast<int64_t>(step.token_ids.size());
    const int64_t computed = step.computed_tokens[0];
    asked.emplace_back(tokens, computed);
    return launch_us + token_us * static_cast<double>(tokens) + pair_us * static_cast<double>(tokens * (2 * computed + tokens));
  }
};

struct Measuring {
  explicit Measuring(const Family& family) : model(family, kF32), weights(LoadWeights(model.shape, model.plan, kStepLimits, options())) {}
  static CudaOptions options() {
    CudaOptions all;
    all.compute = all.kv = kF32;
    return all;
  }
  StepChoice Choose(Told& told, const std::string& folder = {}, double longest_us = 200'000, std::vector<int64_t> sizes = {std::begin(kSizes), std::end(kSizes)}) {
    StepSizeOptions asked{.bounds = {.longest_us = longest_us}, .folder = folder, .stopwatch = [&](const Step& step) { return told(step); }};
    for (const int64_t tokens : sizes) asked.sizes.push_back({tokens, 1000 - tokens});
    return MeasureStepSize(model.shape, weights, kStepLimits, options(), asked);
  }
  const TinyModel model;
  const std::shared_ptr<const DeviceWeights> weights;
};

bool Is(const StepChoice& choice, int64_t tokens, size_t times) {
  return choice.limits.max_step_tokens == tokens && choice.limits.blocks == 1000 - tokens && choice.times.size() == times &&
         choice.limits.max_step_sequences == kStepLimits.max_step_sequences;
}

KVTIER_CHECK(step_size_measured) {
  for (const Family& family : Families()) {
    if (&family != &Families()[0] && !family.gemma) continue;
    Measuring measuring(family);
    const size_t free_before = gpu::Info().free_bytes;
    const auto name = [&](const std::string& what) { return std::string(family.name) + ", " + what; };
    Told even{.launch_us = 100, .token_us = 1, .pair_us = 0};
    const StepChoice largest = measuring.Choose(even);
    ExpectTrue("MeasureStepSize", name("launches cost: the largest, with its blocks"), Is(largest, 48, 4) && largest.measured && largest.prompt == kPrompt);
    std::vector<std::pair<int64_t, int64_t>> expected;
    for (const int64_t tokens : kSizes) {
      for (const int64_t computed : {int64_t{0}, kPrompt - tokens}) expected.insert(expected.end(), 3, {tokens, computed});
    }
    ExpectTrue("MeasureStepSize", name("the first and the last step of one prompt are timed"), even.asked == expected);
    const int64_t reckoned = largest.reckoned_bytes - static_cast<int64_t>(CublasLt::kWorkspaceBytes);  // which is not there
    ExpectTrue("MeasureStepSize", name("the trial takes the memory that it was reckoned to take: " + std::to_string(largest.taken_bytes) + " of " + std::to_string(reckoned)),
               largest.taken_bytes <= reckoned && reckoned - largest.taken_bytes < 14 * 512);  // 14 buffers, each reckoned in units of 512
    ExpectTrue("MeasureStepSize", name("and gives it back"), gpu::Info().free_bytes == free_before);

    if (&family != &Families()[0]) continue;
    Told flat{.launch_us = 0.25, .token_us = 1, .pair_us = 0};
    ExpectTrue("MeasureStepSize", name("nothing gained: the smallest"), Is(measuring.Choose(flat), 8, 4));
    Told attention{.launch_us = 0, .token_us = 0, .pair_us = 0.01};  // as much for a prompt in whatever steps
    ExpectTrue("MeasureStepSize", name("attention costs the same in steps of any size"), Is(measuring.Choose(attention), 8, 4));
    Told slow{.launch_us = 100, .token_us = 1, .pair_us = 0};
    const StepChoice bounded = measuring.Choose(slow, {}, 120);
    ExpectTrue("MeasureStepSize", name("too long a step ends the search: what is larger never runs"),
               Is(bounded, 16, 3) && slow.asked.size() == 18 && slow.asked.back().first == 32);
    Told none{};
    ExpectTrue("MeasureStepSize", name("one size: nothing is measured"), Is(measuring.Choose(none, {}, 120, {32}), 32, 0) && none.asked.empty());
    ExpectTrue("MeasureStepSize", name("sizes that no prompt fills are left out"),
               Is(measuring.Choose(even, {}, 200'000, {8, 16, 320}), 16, 2) && Is(measuring.Choose(none, {}, 120, {200, 400}), 200, 0) && none.asked.empty());
  }
}

KVTIER_CHECK(step_size_kept) {
  std::string name = TemporaryName("steps-");
  const std::string folder = mkdtemp(name.data());
  Measuring measuring(Families()[0]);
  Told first{.launch_us = 100, .token_us = 1, .pair_us = 0}, second{.launch_us = 0, .token_us = 1, .pair_us = 0};
  ExpectTrue("MeasureStepSize", "measured", Is(measuring.Choose(first, folder), 48, 4) && first.asked.size() == 24);
  const StepChoice kept = measuring.Choose(second, folder);
  ExpectTrue("MeasureStepSize", "the next process measures nothing", Is(kept, 48, 4) && !kept.measured && kept.taken_bytes == 0 && second.asked.empty());
  ExpectTrue("MeasureStepSize", "other bounds, the same measurement", Is(measuring.Choose(second, folder, 120), 16, 3) && second.asked.empty());
  ExpectTrue("MeasureStepSize", "a size that was not measured is", Is(measuring.Choose(second, folder, 200'000, {8, 24, 48}), 24, 3) && second.asked.size() == 6);
  Measuring other(Families()[2]);
  Told third{.launch_us = 0, .token_us = 1, .pair_us = 0};
  ExpectTrue("MeasureStepSize", "another model has a measurement of its own", Is(other.Choose(third, folder), 8, 4) && third.asked.size() == 24);
  std::filesystem::path file;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".txt" && (file.empty() || entry.file_size() > std::filesystem::file_size(file))) file = entry.path();
  }
  std::string whole;
  {
    std::ifstream in(file);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  ExpectTrue("MeasureStepSize", "is named after GPU, driver and kernels", file.filename().string().starts_with("steps-emulated-90-driver-0-kernels-3-"));
  std::string minus = whole;
  minus[minus.find(" 108")] = '-';
  bool anew = true;
  for (const std::string& text : {whole.substr(0, whole.size() - 4), std::string("something else\n"), minus}) {
    std::ofstream(file, std::ios::trunc) << text;
    Told again{.launch_us = 0, .token_us = 1, .pair_us = 0};
    anew = anew && Is(measuring.Choose(again, folder), 8, 4) && again.asked.size() == 24;
  }
  ExpectTrue("MeasureStepSize", "a file that is not whole counts for nothing", anew);
  std::filesystem::remove_all(folder);
}

KVTIER_CHECK(step_size_memory) {
  Measuring measuring(Families()[0]);
  const size_t taken = gpu::Info().total_bytes - gpu::Info().free_bytes;
  const auto trial = [&](int64_t tokens) {
    Limits all = kStepLimits;
    all.max_step_tokens = tokens, all.max_step_sequences = 1, all.blocks = 1 + kPrompt / kStepLimits.block_tokens;
    return StepBytes(measuring.model.shape, all, Measuring::options(), gpu::Info().multiprocessors) - CublasLt::kWorkspaceBytes +
           KvBlockBytes(measuring.model.shape, kStepLimits.block_tokens, kF32) * static_cast<size_t>(all.blocks + 1);
  };
  for (const int64_t room : {48, 32, 16, 8}) {
    Told told{.launch_us = 100, .token_us = 1, .pair_us = 0};
    gpu::TellMemory(taken + trial(room));
    const StepChoice choice = measuring.Choose(told);
    // Where only the smallest has room there is nothing to compare.
    const bool right = room == 8 ? Is(choice, 8, 0) && told.asked.empty() : Is(choice, room, static_cast<size_t>(std::ranges::find(kSizes, room) - kSizes) + 1);
    ExpectTrue("MeasureStepSize", "room for a trial of " + std::to_string(room) + " tokens, and for no more", right && gpu::Info().free_bytes == trial(room));
  }
  gpu::TellMemory(0);
}

// The device that hangs stays so until the fault is taken back.
KVTIER_CHECK(step_size_hang) {
  Measuring measuring(Families()[0]);
  CudaOptions options = Measuring::options();
  options.step_deadline_us = 5'000'000;  // the trial before it is in time, however busy the machine is
  StepSizeOptions asked{.sizes = {{8, 10}, {16, 10}}, .stopwatch = [](const Step&) {
                          gpu::Inject(gpu::Fault::kHang);
                          return 1.0;
                        }};
  std::string error;
  try {
    MeasureStepSize(measuring.model.shape, measuring.weights, kStepLimits, options, asked);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  gpu::Inject(gpu::Fault::kNone);
  ExpectTrue("MeasureStepSize", "a trial that hangs ends in an error: " + error, error == "GPU: a step of 16 tokens did not end within 5000 ms; restart the worker");
}

}  // namespace
}  // namespace kvtier::cuda::check
#endif
