#include "transfers.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "kernel_loading.h"

namespace kvtier::cuda {
namespace {

using Outcome = TransferResult::Outcome;
using Clock = std::chrono::steady_clock;

// What the device may still touch when transfers end. Never destroyed: giving it back would wait for ever.
std::vector<std::unique_ptr<CopyChannel>>& AbandonedChannels() {
  static auto& channels = *new std::vector<std::unique_ptr<CopyChannel>>;
  return channels;
}
std::vector<std::shared_ptr<HostArena>>& AbandonedArenas() {
  static auto& arenas = *new std::vector<std::shared_ptr<HostArena>>;
  return arenas;
}

constexpr auto kPollPeriod = std::chrono::milliseconds(5);  // of quarantines, by who waits for one to end
constexpr int64_t kMinHashedBytes = 256;
constexpr int64_t kMaxBatchBlocks = 4096;
constexpr int64_t kMeasuredBytes = 16 << 20;
// Blocks that the copy engine takes beside the model's steps even where a kernel is faster: one that writes over the bus fills the memory's
// queues (decodes beside it took 3 to 12 times as long on an H200), one that reads keeps multiprocessors.
constexpr int64_t kBesideFromBytes = 4 << 10;

std::string Refused(const std::string& what) { return "copies: " + what + "; compute instead and restart the engine worker if this goes on"; }

}  // namespace

Transfers::Transfers(const KvBlocks& kv, const TransferOptions& options) : kv_(kv), options_(options), paths_(options.paths) {
  if (kv.block_bytes < kMinHashedBytes || kv.block_bytes % 16 != 0) {
    throw std::runtime_error("copies: blocks of " + std::to_string(kv.block_bytes) +
                             " bytes; they must be a multiple of 16 and at least 256: use more tokens per block");
  }
  gpu::Use(options.device);
  LoadTransferKernels();
  if (paths_.threshold_bytes == 0) paths_ = gpu::Info().emulated ? PathChoice{} : MeasurePaths(kMeasuredBytes);
  const int64_t most_bytes = kv.block_bytes < paths_.threshold_bytes ? std::max(options.batch_bytes, options.passing_bytes) : options.batch_bytes;
  const int64_t capacity = std::clamp<int64_t>(most_bytes / kv.block_bytes, 1, kMaxBatchBlocks);
  for (Direction direction : {Direction::kExport, Direction::kImport}) {
    auto& hash = hash_[direction == Direction::kExport ? 0 : 1];
    hash = std::make_unique<gpu::Stream>(PriorityOf(direction));
    for (int i = 0; i < options.channels; ++i) {
      IdleChannels(direction).push_back(std::make_unique<CopyChannel>(direction, kv, capacity, options.batches, paths_, hash.get()));
    }
  }
  if (options.layered_blocks > 0) idle_layered_.push_back(std::make_unique<CopyChannel>(Direction::kImport, kv, options.layered_blocks, 1, paths_, nullptr));
}

Transfers::~Transfers() {
  const std::lock_guard lock(mutex_);
  try {
    gpu::Use(options_.device);
    SettleLocked();
  } catch (const std::exception&) {
    gpu::Abandon();  // nothing can be given back to it
  }
  if (!quarantine_.empty()) gpu::Abandon();
  for (auto& [ticket, quarantine] : quarantine_) {
    AbandonedChannels().push_back(std::move(quarantine.channel));
    Arena& arena = arenas_.at(quarantine.arena);
    if (arena.host) AbandonedArenas().push_back(arena.host);
  }
}

Transfers::Registration Transfers::Register(uint8_t* base, size_t bytes, std::function<bool()> wanted) {
  PinOptions pin = options_.pin;
  pin.device = options_.device;
  if (wanted) pin.wanted = std::move(wanted);
  auto host = std::make_unique<HostArena>(base, bytes, pin);
  Registration registration{0, host->pinned(), host->pin_seconds(), host->refusal()};
  const std::lock_guard lock(mutex_);
  registration.arena = next_arena_++;
  arenas_[registration.arena].host = std::move(host);
  return registration;
}

int Transfers::Adopt(std::shared_ptr<HostArena> host) {
  const std::lock_guard lock(mutex_);
  arenas_[next_arena_].host = std::move(host);
  return next_arena_++;
}

bool Transfers::Unregister(int arena) {
  gpu::Use(options_.device);
  const auto deadline = Clock::now() + std::chrono::microseconds(options_.deadline_us);
  std::shared_ptr<HostArena> host;
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = arenas_.find(arena);
      if (found == arenas_.end()) throw std::runtime_error("copies: arena " + std::to_string(arena) + " is not registered");
      SettleLocked();
      if (found->second.users == 0) {
        host = std::move(found->second.host);
        arenas_.erase(found);
        break;
      }
      if (Clock::now() >= deadline) return false;
      changed_.wait_for(lock, kPollPeriod);
    }
  }
  return true;  // unpinned here, outside of the lock
}

TransferResult Transfers::Export(int arena, std::span<const int32_t> block_ids, std::span<const int64_t> offsets,
                                      std::span<uint64_t> sums, const gpu::Event* after) {
  const auto deliver = [&](int64_t first, std::span<const uint64_t> computed) {
    std::ranges::copy(computed, sums.begin() + first);
    exported_blocks_ += computed.size();
  };
  return Move({Direction::kExport, arena, block_ids, offsets, after}, deliver);
}

TransferResult Transfers::Import(int arena, std::span<const int32_t> block_ids, std::span<const int64_t> offsets,
                                      std::span<const uint64_t> sums, std::span<uint8_t> good, const gpu::Event* after) {
  std::ranges::fill(good, uint8_t{0});
  const auto deliver = [&](int64_t first, std::span<const uint64_t> computed) {
    for (size_t i = 0; i < computed.size(); ++i) {
      const auto at = static_cast<size_t>(first) + i;
      good[at] = computed[i] == sums[at] ? 1 : 0;
      bad_blocks_ += good[at] == 0 ? 1 : 0;
    }
    imported_blocks_ += computed.size();
  };
  return Move({Direction::kImport, arena, block_ids, offsets, after}, deliver);
}

TransferResult Transfers::Move(const Call& call, const Deliver& deliver) {
  gpu::Use(options_.device);
  CheckArguments(call);
  TransferResult result;
  if (call.block_ids.empty()) return result;
  auto& idle = IdleChannels(call.direction);
  Hold hold = Begin(call, idle, result);
  if (!hold.channel) return result;
  int64_t issued = 0;
  const auto seclude = [&](bool for_ever) {
    const auto first = static_cast<size_t>(result.blocks), count = static_cast<size_t>(issued) - first;
    Seclude(std::move(hold), call.block_ids.subspan(first, count), call.offsets.subspan(first, count), for_ever, result);
  };
  try {
    Run(hold, call, deliver, result, issued);
  } catch (...) {
    // Copies that no event follows may be under way: nobody will ever know when they end.
    if (issued > 0) {
      seclude(true);
    } else {
      End(std::move(hold), idle);
    }
    throw;
  }
  if (result.outcome == Outcome::kTimedOut) {
    seclude(false);
  } else {
    End(std::move(hold), idle);
  }
  return result;
}

// Keeps the channel's ring full, and takes batches off it in order.
void Transfers::Run(Hold& hold, const Call& call, const Deliver& deliver, TransferResult& result, int64_t& issued) {
  CopyChannel& channel = *hold.channel;
  const HostArena& arena = *hold.host;
  const bool is_export = call.direction == Direction::kExport;
  const auto total = static_cast<int64_t>(call.block_ids.size());
  int64_t per_batch = channel.capacity();
  const int64_t by_engine = std::clamp<int64_t>(options_.batch_bytes / kv_.block_bytes, 1, std::min(per_batch, options_.batch_blocks));
  if (!arena.pinned()) {
    per_batch = std::clamp<int64_t>(options_.stage_bytes / kv_.block_bytes, 1, per_batch);
    try {
      for (CopyBatch& batch : channel.batches()) ReserveStage(batch);
    } catch (const std::exception&) {
      // Nothing was begun, and the next call may have the memory.
      result.outcome = Outcome::kRefused;
      result.error = Refused("no memory to stage an arena that is not pinned");
      return;
    }
  }
  const auto by_kernel = [&] {
    if (kv_.block_bytes >= kBesideFromBytes && (!options_.alone || !options_.alone())) return false;
    return arena.pinned() ? channel.ByKernel(arena.view(), call.offsets, kv_.block_bytes) : kv_.block_bytes < paths_.threshold_bytes;
  };

  for (int64_t next = 0, oldest = 0; result.blocks < total;) {
    if (issued < total && next - oldest < static_cast<int64_t>(channel.batches().size())) {
      CopyBatch& batch = channel.batch(next);
      const bool passing = by_kernel();
      // One operation for all its pieces, or one for each.
      Fill(batch, call, issued, std::min({passing ? per_batch : by_engine, per_batch, total - issued}));
      HostSide host{arena.base(), arena.view(), arena.chunk_bytes()};
      if (!arena.pinned()) {
        host = Stage(batch);
        if (!is_export) CopyStage(batch, call, arena);
      }
      if (passing) kernel_blocks_ += static_cast<uint64_t>(batch.count);
      issued += batch.count;  // before: what is half enqueued when something throws is in flight, too
      channel.Issue(batch, host, next == 0 ? call.after : nullptr, passing);
      if (is_export && !passing && (call.after == nullptr || call.after->Done())) channel.StartHash(batch);
      ++next;
      continue;
    }
    CopyBatch& batch = channel.batch(oldest++);
    if (!Await(channel, batch, call)) {
      result.outcome = Outcome::kTimedOut;
      return;
    }
    if (is_export && !arena.pinned()) CopyStage(batch, call, arena);
    deliver(batch.first, {batch.sums.data<uint64_t>(), static_cast<size_t>(batch.count)});
    result.blocks += batch.count;
  }
}

// Until both of the batch's events have fired; what is not hashed yet is, as soon as it can be. False past the deadline.
bool Transfers::Await(CopyChannel& channel, CopyBatch& batch, const Call& call) const {
  const auto deadline = Clock::now() + std::chrono::microseconds(options_.deadline_us);
  const auto wait = [&](const gpu::Event& event) {
    return event.Wait(std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count()));
  };
  if (!batch.hashing) {
    if (!wait(call.direction == Direction::kExport ? *call.after : batch.copied)) return false;
    channel.StartHash(batch);
  }
  return wait(batch.hashed) && wait(batch.copied);
}

void Transfers::Fill(CopyBatch& batch, const Call& call, int64_t first, int64_t count) const {
  batch.first = first;
  batch.count = count;
  batch.last = call.direction == Direction::kImport && first + count == static_cast<int64_t>(call.block_ids.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(first + i), to = static_cast<size_t>(i);
    batch.pool_offsets()[to] = call.block_ids[at] * kv_.block_bytes;
    batch.host_offsets()[to] = call.offsets[at];
  }
}

// Before anything is enqueued: it may not fit.
void Transfers::ReserveStage(CopyBatch& batch) const {
  const auto bytes = static_cast<size_t>(std::max(options_.stage_bytes, kv_.block_bytes));
  if (batch.stage.bytes() == 0) batch.stage = gpu::PinnedBuffer(bytes, "copies: staging of an arena that is not pinned");
}

// From now on the batch's places are in its stage; the arena's are in the call.
HostSide Transfers::Stage(CopyBatch& batch) const {
  for (int64_t i = 0; i < batch.count; ++i) batch.host_offsets()[static_cast<size_t>(i)] = i * kv_.block_bytes;
  auto* data = batch.stage.data();
  return {data, static_cast<uint8_t*>(gpu::DeviceView(data)), static_cast<int64_t>(batch.stage.bytes())};
}

void Transfers::CopyStage(const CopyBatch& batch, const Call& call, const HostArena& arena) const {
  const auto bytes = static_cast<size_t>(kv_.block_bytes);
  for (int64_t i = 0; i < batch.count; ++i) {
    uint8_t* slot = arena.base() + call.offsets[static_cast<size_t>(batch.first + i)];
    uint8_t* staged = batch.stage.data() + static_cast<size_t>(i) * bytes;
    if (call.direction == Direction::kExport) {
      memcpy(slot, staged, bytes);
    } else {
      memcpy(staged, slot, bytes);
    }
  }
}

void Transfers::CheckArguments(const Call& call) const {
  if (call.block_ids.size() != call.offsets.size()) throw std::runtime_error("copies: as many offsets as blocks are needed");
  for (const int32_t id : call.block_ids) {
    if (id < 0 || id >= kv_.blocks) throw std::runtime_error("copies: block " + std::to_string(id) + " is not in the pool");
  }
}

Transfers::Hold Transfers::Begin(const Call& call, std::vector<std::unique_ptr<CopyChannel>>& idle, TransferResult& result) {
  const auto deadline = Clock::now() + std::chrono::microseconds(options_.deadline_us);
  std::unique_lock lock(mutex_);
  const auto found = arenas_.find(call.arena);
  if (found == arenas_.end()) throw std::runtime_error("copies: arena " + std::to_string(call.arena) + " is not registered");
  HostArena& host = *found->second.host;
  for (const int64_t offset : call.offsets) {
    const auto last = static_cast<int64_t>(host.bytes()) - kv_.block_bytes;
    if (offset < 0 || offset > last) throw std::runtime_error("copies: offset " + std::to_string(offset) + " is not in the arena");
  }
  for (;;) {
    SettleLocked();
    if (IsQuarantinedLocked(call)) {
      result.outcome = Outcome::kRefused;
      result.error = Refused("a block or slot is still in a copy that missed its deadline");
      return {};
    }
    if (!idle.empty()) break;
    if (Clock::now() >= deadline) {
      result.outcome = Outcome::kRefused;
      result.error = Refused("no channel became free within " + std::to_string(options_.deadline_us / 1000) + " ms");
      return {};
    }
    changed_.wait_for(lock, kPollPeriod);
  }
  Hold hold{std::move(idle.back()), call.arena, &host};
  idle.pop_back();
  ++found->second.users;
  return hold;
}

void Transfers::End(Hold hold, std::vector<std::unique_ptr<CopyChannel>>& idle) {
  const std::lock_guard lock(mutex_);
  idle.push_back(std::move(hold.channel));
  --arenas_.at(hold.arena).users;
  changed_.notify_all();
}

void Transfers::Seclude(Hold hold, std::span<const int32_t> block_ids, std::span<const int64_t> offsets, bool for_ever,
                             TransferResult& result) {
  ++timeouts_;
  quarantined_blocks_ += block_ids.size();
  const std::lock_guard lock(mutex_);
  result.ticket = next_ticket_++;
  result.error = "copies: the device has not ended a copy within " + std::to_string(options_.deadline_us / 1000) + " ms; " +
                 std::to_string(block_ids.size()) + " blocks are in quarantine: compute instead, restart the engine worker if this goes on";
  quarantine_[result.ticket] = {
      std::move(hold.channel), hold.arena, {block_ids.begin(), block_ids.end()}, {offsets.begin(), offsets.end()}, for_ever};
}

// Events are asked, not waited for.
void Transfers::SettleLocked() {
  for (auto at = quarantine_.begin(); at != quarantine_.end();) {
    Quarantine& quarantine = at->second;
    const auto& batches = quarantine.channel->batches();
    if (quarantine.for_ever || !std::ranges::all_of(batches, [](const CopyBatch& batch) { return batch.Done(); })) {
      ++at;
      continue;
    }
    const bool layered = batches.size() == 1 && batches[0].capacity == options_.layered_blocks;
    (layered ? idle_layered_ : IdleChannels(quarantine.channel->direction())).push_back(std::move(quarantine.channel));
    --arenas_.at(quarantine.arena).users;
    at = quarantine_.erase(at);
    changed_.notify_all();
  }
}

bool Transfers::IsQuarantinedLocked(const Call& call) const {
  for (const auto& [ticket, quarantine] : quarantine_) {
    for (const int32_t id : quarantine.block_ids) {
      if (std::ranges::find(call.block_ids, id) != call.block_ids.end()) return true;
    }
    if (quarantine.arena != call.arena) continue;
    for (const int64_t held : quarantine.offsets) {
      const auto overlaps = [&](int64_t offset) { return offset < held + kv_.block_bytes && held < offset + kv_.block_bytes; };
      if (std::ranges::any_of(call.offsets, overlaps)) return true;
    }
  }
  return false;
}

bool Transfers::Settled(uint64_t ticket) {
  gpu::Use(options_.device);
  const std::lock_guard lock(mutex_);
  SettleLocked();
  return !quarantine_.contains(ticket);
}

std::vector<int32_t> Transfers::QuarantinedBlocks() {
  gpu::Use(options_.device);
  const std::lock_guard lock(mutex_);
  SettleLocked();
  std::vector<int32_t> ids;
  for (const auto& [ticket, quarantine] : quarantine_) ids.insert(ids.end(), quarantine.block_ids.begin(), quarantine.block_ids.end());
  return ids;
}

TransferCounts Transfers::Counts() const {
  return {exported_blocks_, imported_blocks_, bad_blocks_, timeouts_, quarantined_blocks_, kernel_blocks_};
}

}  // namespace kvtier::cuda
