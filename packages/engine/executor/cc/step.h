// One step as every backend takes it: a copy of the caller's arrays (packages/engine/executor/src/executor.ts), its bounds, its
// result. CheckStep comes first: a checked step cannot touch foreign memory, on the CPU or on a GPU.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"
#include "sampling.h"

namespace kvtier {

struct Step {
  std::vector<int32_t> token_ids, query_tokens, computed_tokens, block_tables;
  int64_t block_table_stride;
  std::vector<uint8_t> sample;
  std::vector<Sampling> sampling;
  bool want_logits;
  // Blocks of this sequence that come in from an arena under the step; none: -1.
  int32_t import_sequence = -1;
  std::vector<int32_t> import_blocks = {};
};

struct StepResult {
  // -1: not drawn, or that sequence's logits are no finite numbers; the others' draws count all the same.
  std::vector<int32_t> token_ids;
  std::vector<float> logits;
  double elapsed_us = 0;
};

struct Limits {
  int64_t block_tokens, blocks, threads, max_step_tokens, max_step_sequences;
};

// Throws std::invalid_argument naming the first thing that is wrong.
void CheckStep(const Step& step, const Shape& shape, const Limits& limits);

// Behind a step with an import: nothing that was computed over blocks that are not all good is given out.
void SettleImport(const Step& step, bool whole, StepResult& result);

}  // namespace kvtier
