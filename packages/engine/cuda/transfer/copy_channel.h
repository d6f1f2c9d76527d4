// One call's means of transport: a stream of copies, and a ring of batches so that the bus never waits for the CPU. Checksums
// are computed on a stream that all channels of a direction share. Export: beside the copies, as both only read the block.
// Import: a step behind, while the next batch arrives; the CPU starts them when the copies have ended. Where a kernel moves the blocks it
// hashes them as they pass.
//
//   export   copy  | pieces 0 ───────▶ | pieces 1 ───────▶
//            hash  | sums 0 ▶ | sums 1 ▶
//   import   copy  | pieces 0 ───────▶ | pieces 1 ───────▶
//            hash                      | sums 0 ▶          | sums 1 ▶
//
// So no stream waits for another one: what holds up one call (a copy that hangs) holds up neither the other calls nor, where
// streams share a hardware queue, the model's steps.
//
// Invariant: what a batch owns (places, sums, stage) is not touched by the CPU between Issue and the firing of both its events.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "../gpu/gpu.h"
#include "paths.h"

namespace kvtier::cuda {

enum class Direction { kExport, kImport };
gpu::Stream::Priority PriorityOf(Direction direction);

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
  // Asked, not waited for.
  bool Done() const { return copied.Done() && hashed.Done(); }

  int64_t capacity, first = 0, count = 0;  // `count` blocks of the call, from its block `first` on
  gpu::PinnedBuffer places, sums, stage;   // stage: only where the arena is not pinned
  gpu::Buffer device_places, hashed_places;  // for the copies, and for the checksums of an export
  gpu::Buffer rows;                          // of checksums of large blocks
  gpu::Event copied, hashed;
  bool last = false;     // of an import: nothing follows that its checksums could be computed beside
  bool hashing = false;  // StartHash was called since Issue
};

class CopyChannel {
 public:
  // `hash`: the direction's stream of checksums; null: they are computed behind the copies, by all of the GPU.
  CopyChannel(Direction direction, const KvBlocks& kv, int64_t capacity, int batches, const PathChoice& paths, gpu::Stream* hash);

  Direction direction() const { return direction_; }
  std::vector<CopyBatch>& batches() { return batches_; }
  CopyBatch& batch(int64_t index) { return batches_[static_cast<size_t>(index) % batches_.size()]; }
  int64_t capacity() const { return batches_[0].capacity; }

  // Enqueues the batch's copies, whose places are filled in. They start after `after` has fired, if given. `by_kernel`: they are hashed as
  // they pass; else StartHash has to follow.
  void Issue(CopyBatch& batch, const HostSide& host, const gpu::Event* after, bool by_kernel);
  // Enqueues its checksums. Export: what is to be exported is in the pool. Import: `copied` has fired.
  void StartHash(CopyBatch& batch);
  // Import only, copies and checksums: a few layers' slice of all blocks after the other. Whether a kernel moves them.
  bool IssueByLayer(CopyBatch& batch, const HostSide& host, int64_t layers, const gpu::Event* after);
  // Whether pieces of `bytes` at these places go by the kernel. view: of the host's memory, null where kernels do not reach it.
  bool ByKernel(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes) const;
  // False where slices would have to go one by one, too many for a stream to take, and no kernel reaches them: then import whole blocks.
  bool TakesLayers(const CopyBatch& batch, const HostSide& host, int64_t layers) const;
  // Of the last IssueByLayer. Fires when that layer is there, and a few after it.
  const gpu::Event& LayerEvent(int64_t layer) const { return layer_events_[static_cast<size_t>(layer / layers_together_)]; }
  // Whether it is the first one of its event.
  bool BeginsLayers(int64_t layer) const { return layer % layers_together_ == 0; }

 private:
  // Whole blocks by the kernel that hashes them as they pass; their places are on the device.
  void Pass(CopyBatch& batch, const HostSide& host);
  // The same bytes of every block: [skip, skip + bytes).
  void CopyPieces(const CopyBatch& batch, const HostSide& host, int64_t skip, int64_t bytes, bool by_kernel);
  int64_t LayersTogether(int64_t layers) const;
  // Whether the kernels can: from where they see it, in whole vectors.
  static bool Reaches(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes);
  // Whether the slices are few enough for the copy engine, put together.
  bool FewCopies(const CopyBatch& batch, const HostSide& host, int64_t groups) const;

  const Direction direction_;
  const KvBlocks kv_;
  const PathChoice paths_;
  const int64_t max_pitch_bytes_;
  const int multiprocessors_;
  gpu::Stream copy_;
  gpu::Stream* const hash_;
  std::vector<CopyBatch> batches_;
  std::vector<gpu::Event> layer_events_;
  int64_t layers_together_ = 1;
};

}  // namespace kvtier::cuda
