// One call's means of transport: two streams, and a ring of batches so that the bus never waits for the CPU. A batch's copies
// and its checksums run beside each other (export: both only read the block) or a step apart (import: a batch is hashed while
// the next one arrives):
//
//   export   copy  | places | pieces 0 ───────▶ | places | pieces 1 ───────▶
//            hash           | sums 0 ▶                   | sums 1 ▶               done = both
//   import   copy  | places | pieces 0 ───────▶ | places | pieces 1 ───────▶
//            hash                               | sums 0 ▶                 | sums 1 ▶   done = sums
//
// Invariant: what a batch owns (places, sums, stage) is not touched by the CPU between Issue and the firing of `done`.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "../gpu/gpu.h"
#include "paths.h"

namespace kvtier::cuda {

enum class Direction { kExport, kImport };

struct KvBlocks {
  uint8_t* pool;  // device
  int64_t blocks, block_bytes;
};

// Host memory that copies go to or come from: an arena, or a batch's own stage.
struct HostSide {
  uint8_t* base;
  uint8_t* view;  // null: kernels do not reach it
  int64_t chunk_bytes;
};

struct CopyBatch {
  // capacity: blocks.
  explicit CopyBatch(int64_t capacity);
  std::span<int64_t> pool_offsets() const { return {places.data<int64_t>(), static_cast<size_t>(count)}; }
  std::span<int64_t> host_offsets() const { return {places.data<int64_t>() + capacity, static_cast<size_t>(count)}; }
  const int64_t* device_pool_offsets() const { return device_places.data<int64_t>(); }
  const int64_t* device_host_offsets() const { return device_places.data<int64_t>() + capacity; }

  int64_t capacity, first = 0, count = 0;  // `count` blocks of the call, from its block `first` on
  gpu::PinnedBuffer places, sums, stage;   // stage: only where the arena is not pinned
  gpu::Buffer device_places;
  gpu::Event middle, done;
};

class CopyChannel {
 public:
  CopyChannel(Direction direction, const KvBlocks& kv, int64_t capacity, int batches, const PathChoice& paths);

  Direction direction() const { return direction_; }
  std::vector<CopyBatch>& batches() { return batches_; }
  CopyBatch& batch(int64_t index) { return batches_[static_cast<size_t>(index) % batches_.size()]; }
  int64_t capacity() const { return batches_[0].capacity; }

  // Enqueues the batch, whose places are filled in. Starts after `after` has fired, if given.
  void Issue(CopyBatch& batch, const HostSide& host, const gpu::Event* after);
  // Import only: one layer's slice of all blocks after the other; layer_events[l] fires when layer l is there.
  void IssueByLayer(CopyBatch& batch, const HostSide& host, int64_t layers, const gpu::Event* after);
  // Whether pieces of `bytes` at these places go by the kernel. view: of the host's memory, null where kernels do not reach it.
  bool ByKernel(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes) const;
  // False where slices would have to go one by one, too many for a stream to take: then import whole blocks.
  bool TakesLayers(const CopyBatch& batch, const HostSide& host, int64_t layers) const;
  std::vector<gpu::Event>& layer_events() { return layer_events_; }

 private:
  // The same bytes of every block: [skip, skip + bytes).
  void CopyPieces(const CopyBatch& batch, const HostSide& host, int64_t skip, int64_t bytes, bool by_kernel);
  void Hash(const CopyBatch& batch);

  const Direction direction_;
  const KvBlocks kv_;
  const PathChoice paths_;
  gpu::Stream copy_, hash_;
  std::vector<CopyBatch> batches_;
  std::vector<gpu::Event> layer_events_;
};

}  // namespace kvtier::cuda
