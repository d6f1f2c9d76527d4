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
constexpr size_t kFirstPieces = 32;
// Layers that come together: four at least, for larger pieces and a fourth of the operations, and as many as make pieces of this size: smaller
// ones take the bus longer than waiting for more layers costs.
constexpr int64_t kLayersTogether = 4, kLeastSliceBytes = 16 << 10;
// Thread blocks that compute checksums, of each multiprocessor: one of each is done sooner than a few of all, and takes no more of the GPU from
// the model; when somebody waits for them, as many as run at the same time.
constexpr int kHashBlocksEach = 4;
constexpr int64_t kApartFromBytes = 256 << 10;  // of a block: one thread block would hash it for longer than the model's kernels take
constexpr int kPassingBlocks = 16;              // thread blocks that move and hash: twice what fills a PCIe 5 bus

}  // namespace

gpu::Stream::Priority PriorityOf(Direction direction) {
  // A request waits for an import; nobody waits for an export.
  return direction == Direction::kImport ? gpu::Stream::Priority::kHigh : gpu::Stream::Priority::kLow;
}

CopyBatch::CopyBatch(int64_t capacity)
    : capacity(capacity),
      places(static_cast<size_t>(2 * 8 * capacity), "copies: places of blocks"),
      sums(static_cast<size_t>(8 * capacity), "copies: checksums"),
      device_places(places.bytes(), "copies: places of blocks"),
      hashed_places(static_cast<size_t>(8 * capacity), "copies: places of blocks") {}

CopyChannel::CopyChannel(Direction direction, const KvBlocks& kv, int64_t capacity, int batches, const PathChoice& paths, gpu::Stream* hash)
    : direction_(direction),
      kv_(kv),
      paths_(paths),
      max_pitch_bytes_(static_cast<int64_t>(gpu::Info().max_pitch_bytes)),
      multiprocessors_(gpu::Info().multiprocessors),
      copy_(PriorityOf(direction)),
      hash_(hash) {
  for (int i = 0; i < batches; ++i) batches_.emplace_back(capacity);
  if (hash == nullptr || kv.block_bytes < kApartFromBytes) return;
  for (CopyBatch& batch : batches_) batch.rows = gpu::Buffer(static_cast<size_t>(HashRowsBytes(capacity, kv.block_bytes)), "copies: sums of checksums");
}

bool CopyChannel::ByKernel(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes) const {
  return bytes < paths_.threshold_bytes && Reaches(view, host_offsets, bytes);
}

bool CopyChannel::Reaches(const uint8_t* view, std::span<const int64_t> host_offsets, int64_t bytes) {
  if (view == nullptr || bytes % kVectorBytes != 0) return false;
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
  std::vector<gpu::Stream::Piece> singles;
  for (const Run& run : PlanRuns(pool, slots, bytes, {host.chunk_bytes, kMergeBelowBytes, max_pitch_bytes_})) {
    uint8_t *block = kv_.pool + run.pool_offset, *slot = host.base + run.host_offset;
    const auto row = static_cast<size_t>(run.bytes), rows = static_cast<size_t>(run.rows);
    if (run.rows == 1) {
      if (to_host) {
        singles.push_back({slot, block, row});
      } else {
        singles.push_back({block, slot, row});
      }
      continue;
    }
    const auto pool_stride = static_cast<size_t>(run.pool_stride), host_stride = static_cast<size_t>(run.host_stride);
    if (to_host) {
      copy_.Copy2D(slot, host_stride, block, pool_stride, row, rows);
    } else {
      copy_.Copy2D(block, pool_stride, slot, host_stride, row, rows);
    }
  }
  // The bus begins with the first ones while the others are being enqueued.
  const std::span<const gpu::Stream::Piece> all(singles);
  const size_t first = std::min(kFirstPieces, all.size());
  copy_.CopyPieces(all.first(first));
  if (first < all.size()) copy_.CopyPieces(all.subspan(first));
}

void CopyChannel::StartHash(CopyBatch& batch) {
  const bool beside = direction_ == Direction::kExport;  // the copies' places may not be there yet
  if (beside) hash_->Copy(batch.hashed_places.data(), batch.places.data(), static_cast<size_t>(batch.count) * sizeof(int64_t));
  const int64_t* places = beside ? batch.hashed_places.data<int64_t>() : batch.device_pool_offsets();
  auto* sums = static_cast<uint64_t*>(gpu::DeviceView(batch.sums.data()));
  const int grid = hash_ == nullptr || batch.last ? kHashBlocksEach * multiprocessors_ : multiprocessors_;
  gpu::Stream& stream = hash_ == nullptr ? copy_ : *hash_;
  if (batch.rows.bytes() > 0) {
    HashBlocksApart(stream, sums, kv_.pool, places, batch.count, kv_.block_bytes, batch.rows.data<uint64_t>(), multiprocessors_);
  } else {
    HashBlocks(stream, sums, kv_.pool, places, batch.count, kv_.block_bytes, grid);
  }
  batch.hashed.Record(stream);
  batch.hashing = true;
}

void CopyChannel::Issue(CopyBatch& batch, const HostSide& host, const gpu::Event* after, bool by_kernel) {
  batch.hashing = false;
  if (after != nullptr) copy_.Wait(*after);
  if (by_kernel || direction_ == Direction::kImport) copy_.Copy(batch.device_places.data(), batch.places.data(), batch.places.bytes());
  if (by_kernel) return Pass(batch, host);
  CopyPieces(batch, host, 0, kv_.block_bytes, false);
  batch.copied.Record(copy_);
}

void CopyChannel::Pass(CopyBatch& batch, const HostSide& host) {
  auto* sums = static_cast<uint64_t*>(gpu::DeviceView(batch.sums.data()));
  const bool to_host = direction_ == Direction::kExport;
  const auto move = to_host ? ExportBlocks : ImportBlocks;
  uint8_t *target = to_host ? host.view : kv_.pool, *source = to_host ? kv_.pool : host.view;
  move(copy_, sums, target, source, batch.device_pool_offsets(), batch.device_host_offsets(), batch.count, kv_.block_bytes, kPassingBlocks);
  batch.copied.Record(copy_);
  batch.hashed.Record(copy_);
  batch.hashing = true;
}

int64_t CopyChannel::LayersTogether(int64_t layers) const {
  const int64_t layer_bytes = kv_.block_bytes / layers;
  return std::min(layers, std::max(kLayersTogether, (kLeastSliceBytes + layer_bytes - 1) / layer_bytes));
}

bool CopyChannel::TakesLayers(const CopyBatch& batch, const HostSide& host, int64_t layers) const {
  const int64_t together = LayersTogether(layers), groups = (layers + together - 1) / together;
  return Reaches(host.view, batch.host_offsets(), kv_.block_bytes / layers) || FewCopies(batch, host, groups);
}

bool CopyChannel::FewCopies(const CopyBatch& batch, const HostSide& host, int64_t groups) const {
  const auto runs =
      PlanRuns(batch.pool_offsets(), batch.host_offsets(), kv_.block_bytes, {host.chunk_bytes, kv_.block_bytes + 1, max_pitch_bytes_});
  return groups * static_cast<int64_t>(runs.size()) <= kMaxLayeredCopies;
}

bool CopyChannel::IssueByLayer(CopyBatch& batch, const HostSide& host, int64_t layers, const gpu::Event* after) {
  batch.hashing = false;
  const int64_t layer_bytes = kv_.block_bytes / layers;
  layers_together_ = LayersTogether(layers);
  const int64_t groups = (layers + layers_together_ - 1) / layers_together_;
  while (static_cast<int64_t>(layer_events_.size()) < groups) layer_events_.emplace_back();
  if (after != nullptr) copy_.Wait(*after);
  copy_.Copy(batch.device_places.data(), batch.places.data(), batch.places.bytes());
  if (groups == 1 && ByKernel(host.view, batch.host_offsets(), kv_.block_bytes)) {
    Pass(batch, host);
    layer_events_[0].Record(copy_);
    return true;
  }
  // Blocks that lie in no order are too many copies: the step waits for them and for nothing else, so a kernel may take what it needs.
  const bool reached = Reaches(host.view, batch.host_offsets(), layer_bytes);
  const bool by_kernel = reached && (layer_bytes * layers_together_ < paths_.threshold_bytes || !FewCopies(batch, host, groups));
  for (int64_t first = 0; first < layers; first += layers_together_) {
    const int64_t bytes = std::min(layers_together_, layers - first) * layer_bytes;
    CopyPieces(batch, host, first * layer_bytes, bytes, by_kernel);
    layer_events_[static_cast<size_t>(first / layers_together_)].Record(copy_);
  }
  batch.copied.Record(copy_);
  StartHash(batch);
  return by_kernel;
}

}  // namespace kvtier::cuda
