#include <algorithm>
#include <stdexcept>
#include <string>

#include "step.h"

namespace kvtier {
namespace {

void Require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("step: " + message);
}

// A step writes to no block that comes in under it: the blocks lie in the table before the first new token's, each once.
void CheckImport(const Step& step, const Shape& shape, const Limits& limits) {
  const auto sequences = static_cast<int64_t>(step.query_tokens.size());
  const int64_t sequence = step.import_sequence;
  Require(sequence < sequences, "import: there is no sequence " + std::to_string(sequence));
  std::vector<int32_t> computed;
  for (int64_t group = 0; group < shape.groups; ++group) {
    const auto row = step.block_tables.begin() + (group * sequences + sequence) * step.block_table_stride;
    computed.insert(computed.end(), row, row + step.computed_tokens[static_cast<size_t>(sequence)] / limits.block_tokens);
  }
  std::ranges::sort(computed);
  auto blocks = step.import_blocks;
  std::ranges::sort(blocks);
  Require(std::ranges::adjacent_find(blocks) == blocks.end() && std::ranges::includes(computed, blocks),
          "import: its blocks are not blocks of computed tokens of sequence " + std::to_string(sequence) + ", each once");
}

}  // namespace

void CheckStep(const Step& step, const Shape& shape, const Limits& limits) {
  const size_t sequences = step.query_tokens.size();
  Require(sequences >= 1 && static_cast<int64_t>(sequences) <= limits.max_step_sequences,
          std::to_string(sequences) + " sequences, allowed are 1 to " + std::to_string(limits.max_step_sequences));
  Require(step.computed_tokens.size() == sequences && step.sample.size() == sequences &&
              step.sampling.size() == sequences,
          "arrays of different lengths");
  const auto groups = static_cast<size_t>(shape.groups);
  Require(step.block_table_stride >= 1 &&
              step.block_tables.size() == groups * sequences * static_cast<size_t>(step.block_table_stride),
          "blockTables is not groups x sequences x blockTableStride");
  int64_t rows = 0;
  for (size_t i = 0; i < sequences; ++i) {
    const int64_t queries = step.query_tokens[i], computed = step.computed_tokens[i];
    const std::string name = "sequence " + std::to_string(i) + ": ";
    Require(queries >= 1 && computed >= 0, name + "queryTokens must be at least 1, computedTokens at least 0");
    Require(queries + computed <= shape.max_tokens, name + "longer than the model's " + std::to_string(shape.max_tokens) + " tokens");
    const int64_t blocks = (queries + computed + limits.block_tokens - 1) / limits.block_tokens;
    Require(blocks <= step.block_table_stride, name + "its block table is too short for its tokens");
    for (size_t group = 0; group < groups; ++group) {
      const int64_t window = shape.group_windows[group];
      const int32_t* table = step.block_tables.data() + (group * sequences + i) * static_cast<size_t>(step.block_table_stride);
      // Blocks that the first query's window does not reach may be null; reading them is harmless, their keys are masked.
      const int64_t seen = window == 0 ? 0 : std::max<int64_t>(0, computed - window + 1) / limits.block_tokens;
      for (int64_t b = 0; b < blocks; ++b) {
        const int32_t id = table[b];
        Require(id >= (b < seen ? 0 : 1) && id < limits.blocks, name + "block id " + std::to_string(id) + " is not in the pool");
      }
    }
    Require(step.sampling[i].temperature >= 0 && step.sampling[i].top_k >= 0 && step.sampling[i].top_p > 0 &&
                step.sampling[i].top_p <= 1,
            name + "temperature >= 0, topK >= 0 and 0 < topP <= 1 must hold");
    rows += queries;
  }
  Require(rows == static_cast<int64_t>(step.token_ids.size()), "tokenIds is not sum(queryTokens) long");
  Require(rows <= limits.max_step_tokens, std::to_string(rows) + " tokens, allowed are " + std::to_string(limits.max_step_tokens));
  for (const int32_t id : step.token_ids) {
    Require(id >= 0 && id < shape.vocab, "token id " + std::to_string(id) + " is not in the vocabulary");
  }
  if (step.import_sequence >= 0) CheckImport(step, shape, limits);
}

void SettleImport(const Step& step, bool whole, StepResult& result) {
  if (!whole) result.token_ids[static_cast<size_t>(step.import_sequence)] = -1;
}

}  // namespace kvtier
