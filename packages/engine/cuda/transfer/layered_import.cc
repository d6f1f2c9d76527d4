// Import in the order in which the model needs it: the first layers of all blocks, then the next ones, so that the step starts when the first
// ones are there instead of the last. The price: nothing is verified before all has arrived. A step that ran on it is thrown
// away when a block turns out bad, so that nobody ever sees its tokens.
#include <algorithm>
#include <stdexcept>

#include "transfers.h"

namespace kvtier::cuda {

using Outcome = TransferResult::Outcome;

std::unique_ptr<LayeredImport> Transfers::ImportByLayer(int arena, std::span<const int32_t> block_ids,
                                                             std::span<const int64_t> offsets, std::span<const uint64_t> sums,
                                                             int64_t layers, const gpu::Event* after) {
  gpu::Use(options_.device);
  const Call call{Direction::kImport, arena, block_ids, offsets, after};
  CheckArguments(call);
  if (layers < 1 || kv_.block_bytes % layers != 0) throw std::runtime_error("copies: a block is not a whole number of layers");
  std::unique_ptr<LayeredImport> import(new LayeredImport(*this));
  import->good_.assign(block_ids.size(), 0);
  if (block_ids.empty()) return import;
  const auto whole = [&] { import->result_ = Import(arena, block_ids, offsets, sums, import->good_, after); };
  if (static_cast<int64_t>(block_ids.size()) > options_.layered_blocks) {
    whole();
    return import;
  }
  import->hold_ = Begin(call, idle_layered_, import->result_);
  if (!import->hold_.channel) return import;
  CopyChannel& channel = *import->hold_.channel;
  HostArena& host_arena = *import->hold_.host;
  CopyBatch& batch = channel.batch(0);
  Fill(batch, call, 0, static_cast<int64_t>(block_ids.size()));
  const HostSide host{host_arena.base(), host_arena.view(), host_arena.chunk_bytes()};
  if (!host_arena.pinned() || !channel.TakesLayers(batch, host, layers)) {
    End(std::move(import->hold_), idle_layered_);
    whole();
    return import;
  }
  import->block_ids_.assign(block_ids.begin(), block_ids.end());
  import->offsets_.assign(offsets.begin(), offsets.end());
  import->sums_.assign(sums.begin(), sums.end());
  try {
    if (channel.IssueByLayer(batch, host, layers, after)) kernel_blocks_ += block_ids.size();
  } catch (...) {
    Seclude(std::move(import->hold_), block_ids, offsets, true, import->result_);
    throw;
  }
  return import;
}

void LayeredImport::BeforeLayer(int64_t layer, gpu::Stream& stream) {
  if (hold_.channel && hold_.channel->BeginsLayers(layer)) stream.Wait(hold_.channel->LayerEvent(layer));
}

const TransferResult& LayeredImport::Finish() {
  if (!hold_.channel) return result_;
  gpu::Use(transfers_.options_.device);
  CopyBatch& batch = hold_.channel->batch(0);
  bool done = false;
  try {
    done = batch.hashed.Wait(transfers_.options_.deadline_us);  // behind the copies
  } catch (...) {
    transfers_.Seclude(std::move(hold_), block_ids_, offsets_, true, result_);
    result_.outcome = Outcome::kTimedOut;
    throw;
  }
  if (!done) {
    transfers_.Seclude(std::move(hold_), block_ids_, offsets_, false, result_);
    result_.outcome = Outcome::kTimedOut;
    return result_;
  }
  const uint64_t* computed = batch.sums.data<uint64_t>();
  for (size_t i = 0; i < good_.size(); ++i) good_[i] = computed[i] == sums_[i] ? 1 : 0;
  transfers_.imported_blocks_ += good_.size();
  transfers_.bad_blocks_ += static_cast<uint64_t>(std::ranges::count(good_, uint8_t{0}));
  result_.blocks = static_cast<int64_t>(good_.size());
  transfers_.End(std::move(hold_), transfers_.idle_layered_);
  return result_;
}

LayeredImport::~LayeredImport() {
  try {
    Finish();
  } catch (const std::exception&) {
    // The device is lost: whoever uses it next is told.
  }
}

}  // namespace kvtier::cuda
