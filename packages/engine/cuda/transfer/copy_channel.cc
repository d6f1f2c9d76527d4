#include "copy_channel.h"

#include <algorithm>

#include "../kernels/kernels.h"
#include "copy_plan.h"

namespace kvtier::cuda {
namespace {

constexpr int64_t kMergeBelowBytes = 1 << 20;  // a copy of its own costs nothing beside a megabyte
constexpr int64_t kVectorBytes = 16;           // of the kernels
// A stream takes about a thousand operations before it makes its caller wait, without a deadline.
constexpr int64_t kMaxLayeredCopies = 512;

gpu::Stream::Priority PriorityOf(Direction direction) {
  // A request waits for an import; nobody waits for an export.
  return direction == Direction::kImport ? gpu::Stream::Priority::kHigh : gpu::Stream::Priority::kLow;
}

}  // namespace

CopyBatch::CopyBatch(int64_t capacity)
    : capacity(capacity),
      places(static_cast<size_t>(2 * 8 * capacity), "copies: places of blocks"),
      sums(static_cast<size_t>(8 * capacity), "copies: checksums"),
      device_places(places.bytes(), "copies: places of blocks") {}

CopyChannel::CopyChannel(Direction direction, const KvBlocks& kv, int64_t capacity, int batches, const PathChoice& paths)
    : direction_(direction), kv_(kv), paths_(paths), copy_(PriorityOf(direction)), hash_(PriorityOf(direction)) {
  for (int i = 0; i < batches; ++i) batches_.emplace_back(capacity);
}

bool CopyChannel::ByKernel(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes) const {
  if (bytes >= paths_.threshold_bytes || view == nullptr || bytes % kVectorBytes != 0) return false;
  return std::ranges::all_of(host_offsets, [](int64_t offset) { return offset % kVectorBytes == 0; });
}

void CopyChannel::CopyPieces(const CopyBatch& batch, const HostSide& host, int64_t skip, int64_t bytes, bool by_kernel) {
  const bool to_host = direction_ == Direction::kExport;
  if (by_kernel) {
    const int64_t *pool_offsets = batch.device_pool_offsets(), *host_offsets = batch.device_host_offsets();
    if (to_host) {
      GatherPieces(copy_, host.view + skip, kv_.pool + skip, pool_offsets, host_offsets, batch.count, bytes, paths_.multiprocessors);
    } else {
      ScatterPieces(copy_, kv_.pool + skip, host.view + skip, pool_offsets, host_offsets, batch.count, bytes, paths_.multiprocessors);
    }
    return;
  }
  std::vector<int64_t> pool(batch.pool_offsets().begin(), batch.pool_offsets().end());
  std::vector<int64_t> slots(batch.host_offsets().begin(), batch.host_offsets().end());
  for (int64_t& offset : pool) offset += skip;
  for (int64_t& offset : slots) offset += skip;
  for (const Run& run : PlanRuns(pool, slots, bytes, host.chunk_bytes, kMergeBelowBytes)) {
    uint8_t *block = kv_.pool + run.pool_offset, *slot = host.base + run.host_offset;
    const auto row = static_cast<size_t>(run.bytes), rows = static_cast<size_t>(run.rows);
    if (run.rows == 1) {
      copy_.Copy(to_host ? slot : block, to_host ? block : slot, row);
      continue;
    }
    const auto pool_stride = static_cast<size_t>(run.pool_stride), host_stride = static_cast<size_t>(run.host_stride);
    if (to_host) {
      copy_.Copy2D(slot, host_stride, block, pool_stride, row, rows);
    } else {
      copy_.Copy2D(block, pool_stride, slot, host_stride, row, rows);
    }
  }
}

void CopyChannel::Hash(const CopyBatch& batch) {
  auto* sums = static_cast<uint64_t*>(gpu::DeviceView(batch.sums.data()));
  HashBlocks(hash_, sums, kv_.pool, batch.device_pool_offsets(), batch.count, kv_.block_bytes);
}

void CopyChannel::Issue(CopyBatch& batch, const HostSide& host, const gpu::Event* after) {
  if (after != nullptr) copy_.Wait(*after);
  copy_.Copy(batch.device_places.data(), batch.places.data(), batch.places.bytes());
  const bool by_kernel = ByKernel(host.view, batch.host_offsets(), kv_.block_bytes);
  if (direction_ == Direction::kExport) {
    batch.middle.Record(copy_);
    hash_.Wait(batch.middle);
    Hash(batch);
    CopyPieces(batch, host, 0, kv_.block_bytes, by_kernel);
    batch.middle.Record(hash_);
    copy_.Wait(batch.middle);
    batch.done.Record(copy_);
  } else {
    CopyPieces(batch, host, 0, kv_.block_bytes, by_kernel);
    batch.middle.Record(copy_);
    hash_.Wait(batch.middle);
    Hash(batch);
    batch.done.Record(hash_);
  }
}

bool CopyChannel::TakesLayers(const CopyBatch& batch, const HostSide& host, int64_t layers) const {
  const int64_t bytes = kv_.block_bytes / layers;
  if (ByKernel(host.view, batch.host_offsets(), bytes)) return true;
  const auto runs = PlanRuns(batch.pool_offsets(), batch.host_offsets(), kv_.block_bytes, host.chunk_bytes, kv_.block_bytes + 1);
  return layers * static_cast<int64_t>(runs.size()) <= kMaxLayeredCopies;
}

void CopyChannel::IssueByLayer(CopyBatch& batch, const HostSide& host, int64_t layers, const gpu::Event* after) {
  const int64_t bytes = kv_.block_bytes / layers;
  while (static_cast<int64_t>(layer_events_.size()) < layers) layer_events_.emplace_back();
  if (after != nullptr) copy_.Wait(*after);
  copy_.Copy(batch.device_places.data(), batch.places.data(), batch.places.bytes());
  const bool by_kernel = ByKernel(host.view, batch.host_offsets(), bytes);
  for (int64_t layer = 0; layer < layers; ++layer) {
    CopyPieces(batch, host, layer * bytes, bytes, by_kernel);
    layer_events_[static_cast<size_t>(layer)].Record(copy_);
  }
  hash_.Wait(layer_events_[static_cast<size_t>(layers - 1)]);
  Hash(batch);
  batch.done.Record(hash_);
}

}  // namespace kvtier::cuda
