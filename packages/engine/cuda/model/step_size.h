// How many tokens a step computes at most, by measurement: of the sizes that memory allows, the largest that is still faster per token and
// holds up nobody for longer than is allowed. Measured is a prompt, computed in steps of each size: its first step and its last one, whose
// mean is the mean of all, since a step's time grows evenly with what was computed before it.
//
// Invariants: sizes that are too slow end the search, larger ones are not run; a measurement is kept for this GPU, driver, model and these
// kernels (kept_file.h), what is chosen is not: bounds may change; where the device has no room for the trial, smaller sizes are tried.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transformer.h"

namespace kvtier::cuda {

// A candidate, and the blocks that the KV pool has beside the buffers of such a step.
struct StepSize {
  int64_t tokens, blocks;
};

struct StepTime {
  int64_t tokens;
  double first_us, last_us;  // of the prompt's steps
  double PerToken() const { return (first_us + last_us) / 2 / static_cast<double>(tokens); }
};

struct StepBounds {
  double least_gain = 0.05;       // per token, over the largest smaller size that was worth it
  double longest_us = 200'000;    // of any step: what decodes beside it wait for
};

// The place of what is chosen; `times`: ascending by size, at least one.
size_t ChooseStepSize(std::span<const StepTime> times, const StepBounds& bounds);

struct StepSizeOptions {
  std::vector<StepSize> sizes = {};  // ascending; one or none: nothing is measured
  StepBounds bounds = {};
  std::string folder = {};           // where measurements are kept; empty: nowhere
  // Microseconds of a step, which is not run then; empty: as long as it took. For tests.
  std::function<double(const Step&)> stopwatch = {};
};

struct StepChoice {
  Limits limits;                     // as given, with the size and the blocks that were chosen
  std::vector<StepTime> times = {};  // what it was chosen by; empty: by nothing
  int64_t prompt = 0;             // tokens
  bool measured = false;          // now; else it was kept
  double measuring_us = 0;
  // Of the trial: device memory that its buffers were reckoned to take, and that was taken when it had run.
  int64_t reckoned_bytes = 0, taken_bytes = 0;
};

StepChoice MeasureStepSize(const Shape& shape, const std::shared_ptr<const DeviceWeights>& weights, const Limits& limits,
                           const CudaOptions& options, const StepSizeOptions& sizes);

}  // namespace kvtier::cuda
