// The 8B Llama with an arena and transfers between both: the engine's native half, for benches of prompts whose blocks come and go.
#pragma once
#include <algorithm>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "bench_arena.h"
#include "bench_model.h"

namespace kvtier::cuda::bench {

inline constexpr int64_t kPrompt = Scaled(10'000) / kBlockTokens * kBlockTokens, kPromptBlocks = kPrompt / kBlockTokens;
inline constexpr int64_t kHeld = kPromptBlocks - 1;  // the last block is computed again: its last token is asked for
inline constexpr int64_t kSlotHeader = 4096;

// A model, an arena with a slot for each block of a prompt, and transfers between them. The prompt's blocks are 1 to kPromptBlocks.
class Engine {
 public:
  explicit Engine(int64_t step_tokens, int64_t blocks = kPromptBlocks + 64, int64_t sequences = 1, const CudaOptions& options = {})
      : model({.block_tokens = kBlockTokens, .blocks = blocks, .threads = 1, .max_step_tokens = std::max(step_tokens, kBlockTokens), .max_step_sequences = sequences}, options),
        slot_bytes(static_cast<int64_t>(model.block_bytes()) + kSlotHeader),
        arena(static_cast<size_t>(slot_bytes * kPromptBlocks)),
        transfers({model.pool(), blocks, static_cast<int64_t>(model.block_bytes())}, {}),
        id(Registered(transfers.Register(arena.data(), arena.bytes()))),
        ids(static_cast<size_t>(kHeld)),
        sums(static_cast<size_t>(kHeld)),
        good(static_cast<size_t>(kHeld)),
        step_tokens_(step_tokens) {
    std::iota(ids.begin(), ids.end(), 1);
    for (int64_t i = 0; i < kHeld; ++i) offsets.push_back(i * slot_bytes + kSlotHeader);
  }
  ~Engine() { transfers.Unregister(id); }

  // The prompt's tokens from `computed` on, in steps; the token that follows it.
  int32_t Compute(int64_t prompt, int64_t computed, const CudaTransformer::BeforeLayer& before_layer = {}) {
    for (;;) {
      const int64_t queries = std::min(step_tokens_, kPrompt - computed);
      const bool last = computed + queries == kPrompt;
      const StepResult result = model.Run(MakeStep({{prompt, computed, queries, 1, last}}), before_layer);
      if (last) return result.token_ids[0];
      computed += queries;
    }
  }
  void Export() { Require(transfers.Export(id, ids, offsets, sums)); }
  void Import(int64_t first, int64_t count) {
    const auto part = [&](auto& all) { return std::span(all).subspan(static_cast<size_t>(first), static_cast<size_t>(count)); };
    Require(transfers.Import(id, part(ids), part(offsets), part(sums), part(good)));
    for (const uint8_t one : part(good)) {
      if (one == 0) throw std::runtime_error("a block arrived wrong");
    }
  }
  // Its first step begins while layers still come.
  int32_t WarmByLayer(int64_t prompt) {
    const auto import = transfers.ImportByLayer(id, ids, offsets, sums, kLayers);
    const int32_t token = Compute(prompt, kHeld * kBlockTokens, [&](int64_t layer, gpu::Stream& stream) { import->BeforeLayer(layer, stream); });
    Require(import->Finish());
    RequireGood(import->good());
    return token;
  }
  // Its slots lie in no order from now on, as in a system that has run for a while.
  void Shuffle() {
    for (size_t i = offsets.size() - 1; i > 0; --i) std::swap(offsets[i], offsets[(i * 2654435761u) % (i + 1)]);
  }
  // What the GPU holds of the prompt is gone.
  void Forget() {
    gpu::Stream stream;
    stream.Set(model.block(1), 0, static_cast<size_t>(kPromptBlocks) * model.block_bytes());
    Finish(stream);
  }

  Model8B model;
  const int64_t slot_bytes;
  Shared arena;
  Transfers transfers;
  const int id;
  std::vector<int32_t> ids;
  std::vector<int64_t> offsets;
  std::vector<uint64_t> sums;
  std::vector<uint8_t> good;

 private:
  const int64_t step_tokens_;
};

}  // namespace kvtier::cuda::bench
