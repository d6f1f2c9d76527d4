#include "device_copies.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "kernels/kernels.h"

namespace kvtier {
namespace {

constexpr uint64_t kStageBytes = 16 << 20;  // of GPU memory; a payload may be larger
constexpr int64_t kBounceBytes = 4 << 20;   // of pinned memory, for each batch under way
constexpr uint64_t kVectorBytes = 16;
constexpr uint64_t kLeastPayload = 256;    // of the hash kernel
constexpr size_t kChunkBytes = size_t{1} << 30;  // pinned at a time
constexpr uint64_t kMostRows = 1 << 16;

size_t BlocksOfStage(uint64_t blocks, uint64_t payload_bytes) {
  return static_cast<size_t>(std::clamp<uint64_t>(kStageBytes / payload_bytes, 1, blocks));
}

}  // namespace

Mark::Mark(int device, void* stream) : device(device) {
  const gpu::OnDevice on(device);
  event = std::make_unique<gpu::Event>();
  gpu::RecordOn(*event, stream);
}

Mark::~Mark() {
  try {
    const gpu::OnDevice on(device);
    event.reset();
  } catch (const std::exception&) {
    (void)event.release();  // the device is lost, and its events with it
  }
}

DeviceArena::DeviceArena(int device, std::shared_ptr<Arena> arena, std::shared_ptr<DeviceArena> before)
    : device_(device), arena_(std::move(arena)), before_(std::move(before)), host_(std::make_shared<cuda::HostArena>(arena_->base(), arena_->bytes())) {}

DeviceArena::~DeviceArena() {
  try {
    const gpu::OnDevice on(device_);
    host_.reset();
  } catch (const std::exception&) {
    gpu::Abandon();  // nothing can be given back to it
  }
}

std::shared_ptr<cuda::HostArena> DeviceArena::Host() {
  const std::lock_guard lock(mutex_);
  return host_;
}

void DeviceArena::Pin() {
  cuda::PinOptions options;
  options.device = device_;
  options.chunk_bytes = kChunkBytes;
  options.threads = 1;  // beside serving: more would hold up what else works with the address space
  options.wanted = [this] { return wanted_.load(); };
  gpu::Use(device_);
  const auto theirs = before_ ? before_->Host() : nullptr;
  auto pinned = theirs && theirs->pinned() ? std::make_shared<cuda::HostArena>(theirs)
                                           : std::make_shared<cuda::HostArena>(arena_->base(), arena_->bytes(), options);
  const std::lock_guard lock(mutex_);
  if (pinned->pinned()) {
    host_ = std::move(pinned);
    state_ = State::kPinned;
  } else {
    why_ = pinned->refusal();
    state_ = State::kRefused;
  }
}

DeviceArena::State DeviceArena::state(std::string* why) {
  const std::lock_guard lock(mutex_);
  *why = why_;
  return state_;
}

uint64_t DeviceArena::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  return state_ == State::kPinned ? arena_->bytes() : 0;
}

DeviceLayout::DeviceLayout(int device, std::span<const kvtier_part> parts, uint64_t blocks, uint64_t payload_bytes, uint32_t stages,
                           int64_t deadline_us)
    : device_(device), payload_bytes_(payload_bytes), deadline_us_(deadline_us), stage_blocks_(BlocksOfStage(blocks, payload_bytes)) {
  const auto odd = [](uint64_t value) { return value % kVectorBytes != 0; };
  uint64_t at = 0;
  for (const kvtier_part& part : parts) {
    if (odd(part.base) || odd(part.stride) || odd(part.row_bytes) || (part.rows > 1 && odd(part.row_stride))) {
      throw std::runtime_error("places and lengths in a GPU's memory are multiples of 16 bytes");
    }
    auto known = std::ranges::find(classes_, part.row_bytes, &Class::row_bytes);
    if (known == classes_.end()) known = classes_.insert(classes_.end(), Class{part.row_bytes, {}, {}});
    rows_ += part.rows;
    if (rows_ > kMostRows) throw std::runtime_error("a payload of more than 65536 rows in a GPU's memory");
    for (uint64_t row = 0; row < part.rows; ++row, at += part.row_bytes) {
      known->rows.emplace_back(at, part.base + row * part.row_stride);
      known->strides.push_back(part.stride);
    }
  }
  if (payload_bytes < kLeastPayload) throw std::runtime_error("a payload of less than 256 bytes in a GPU's memory");
  gpu::OpenDriver();
  const gpu::OnDevice on(device);
  multiprocessors_ = gpu::Info().multiprocessors;
  memory_ = gpu::Buffer(stages * stage_blocks_ * payload_bytes, "stages of copies");
  for (uint32_t i = 0; i < stages; ++i) {
    const size_t bytes = 2 * 8 * rows_ * stage_blocks_;
    stages_.push_back(std::unique_ptr<Stage>(new Stage{i * stage_blocks_, gpu::PinnedBuffer(bytes, "places of rows"),
                                                    gpu::Buffer(bytes, "places of rows"),
                                                    gpu::Stream(gpu::Stream::Priority::kNormal), gpu::Event(), false}));
    idle_.push_back(stages_.back().get());
  }
  cuda::TransferOptions options;
  options.device = device;
  options.deadline_us = deadline_us;
  options.paths = cuda::PathChoice{};
  options.channels = static_cast<int>(stages);
  options.batches = 2;
  options.batch_bytes = static_cast<int64_t>((stage_blocks_ + 1) / 2 * payload_bytes);
  options.stage_bytes = kBounceBytes;
  options.layered_blocks = 0;
  transfers_ = std::make_unique<cuda::Transfers>(
      cuda::KvBlocks{memory_.data(), static_cast<int64_t>(stages * stage_blocks_), static_cast<int64_t>(payload_bytes)}, options);
}

DeviceLayout::~DeviceLayout() {
  try {
    const gpu::OnDevice on(device_);
    if (std::ranges::any_of(stages_, [](const auto& stage) { return stage->hung && !stage->done.Done(); })) gpu::Abandon();
    transfers_.reset();
    stages_.clear();
    memory_ = gpu::Buffer();
  } catch (const std::exception&) {
    gpu::Abandon();
  }
}

DeviceLayout::Stage* DeviceLayout::TakeStage() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::microseconds(deadline_us_), [&] { return !idle_.empty(); });
  if (idle_.empty()) return nullptr;
  Stage* stage = idle_.back();
  idle_.pop_back();
  return stage;
}

void DeviceLayout::GiveBack(Stage* stage) {
  const std::lock_guard lock(mutex_);
  stage->hung = false;
  idle_.push_back(stage);
  changed_.notify_all();
}

bool DeviceLayout::Passed(const Mark* after) const { return after == nullptr || after->event->Wait(deadline_us_); }

void DeviceLayout::Move(Stage& stage, bool to_stage, std::span<const uint64_t> blocks, std::span<const size_t> which) {
  // Targets of all classes, then sources; from the first row of the stage and of the engine, which kernels add to.
  auto* places = stage.places.data<int64_t>();
  const size_t half = rows_ * which.size();
  int64_t *stage_places = to_stage ? places : places + half, *engine_places = to_stage ? places + half : places;
  auto* const staged = memory_.data() + stage.first * payload_bytes_;
  auto* const engine = reinterpret_cast<uint8_t*>(classes_[0].rows[0].second);
  size_t at = 0;
  for (const Class& one : classes_) {
    for (const size_t i : which) {
      for (size_t row = 0; row < one.rows.size(); ++row, ++at) {
        stage_places[at] = static_cast<int64_t>(i * payload_bytes_ + one.rows[row].first);
        engine_places[at] = static_cast<int64_t>(one.rows[row].second + blocks[i] * one.strides[row] - reinterpret_cast<uint64_t>(engine));
      }
    }
  }
  stage.stream.Copy(stage.device_places.data(), places, 2 * half * sizeof(int64_t));
  const auto* device_places = stage.device_places.data<int64_t>();
  at = 0;
  for (const Class& one : classes_) {
    const auto count = static_cast<int64_t>(which.size() * one.rows.size());
    cuda::ScatterPieces(stage.stream, to_stage ? staged : engine, to_stage ? engine : staged, device_places + at, device_places + half + at, count,
                        static_cast<int64_t>(one.row_bytes), multiprocessors_);
    at += static_cast<size_t>(count);
  }
  stage.done.Record(stage.stream);
}

namespace {

// The call's arena in these transfers, as long as the call lasts; what hangs keeps it.
class Adopted {
 public:
  Adopted(cuda::Transfers& transfers, DeviceArena& arena) : transfers_(transfers), number(transfers.Adopt(arena.Host())) {}
  ~Adopted() {
    try {
      if (!kept) transfers_.Unregister(number);
    } catch (const std::exception&) {
      // The device is lost: whoever uses it next is told.
    }
  }
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;

 private:
  cuda::Transfers& transfers_;

 public:
  const int number;
  bool kept = false;
};

std::vector<int32_t> StageBlocks(size_t first, size_t count) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), static_cast<int32_t>(first));
  return ids;
}

std::vector<int64_t> Signed(std::span<const uint64_t> offsets) { return {offsets.begin(), offsets.end()}; }

}  // namespace

DeviceResult DeviceLayout::Load(std::shared_ptr<DeviceArena> arena, std::span<const uint64_t> blocks, std::span<const uint64_t> offsets,
                                std::span<uint64_t> sums, std::span<uint8_t> good, const Mark* after) {
  gpu::Use(device_);
  Stage* stage = TakeStage();
  if (stage == nullptr) return {.missed_deadline = true};
  Adopted adopted(*transfers_, *arena);
  const auto ids = StageBlocks(stage->first, blocks.size());
  const cuda::TransferResult result = transfers_->Import(adopted.number, ids, Signed(offsets), sums, good);
  if (result.outcome != cuda::TransferResult::Outcome::kDone) {
    // What hangs reads a slot into the stage: the engine's blocks are free, the stage is not.
    std::ranges::fill(good, uint8_t{KVTIER_MISSED});
    if (result.outcome == cuda::TransferResult::Outcome::kRefused) {
      GiveBack(stage);
      return {.missed_deadline = true};
    }
    adopted.kept = true;
    stage->hung = true;
    return {false,
            [this, stage, arena, ticket = result.ticket, number = adopted.number] {
              gpu::Use(device_);
              if (!transfers_->Settled(ticket)) return false;
              transfers_->Unregister(number);
              GiveBack(stage);
              return true;
            },
            true, true};
  }
  std::vector<size_t> which;
  for (size_t i = 0; i < good.size(); ++i) {
    if (good[i] == KVTIER_GOOD) which.push_back(i);
  }
  if (!which.empty()) {
    if (!Passed(after)) {
      std::ranges::fill(good, uint8_t{KVTIER_MISSED});
      GiveBack(stage);
      return {.stands = true};
    }
    stage->hung = true;
    Move(*stage, false, blocks, which);
    if (!stage->done.Wait(deadline_us_)) {
      std::ranges::fill(good, uint8_t{KVTIER_MISSED});
      return {false,
              [this, stage] {
                gpu::Use(device_);
                if (!stage->done.Done()) return false;
                GiveBack(stage);
                return true;
              },
              true};
    }
  }
  GiveBack(stage);
  return {.copied = true};
}

DeviceResult DeviceLayout::Store(std::shared_ptr<DeviceArena> arena, std::span<const uint64_t> blocks, std::span<const uint64_t> offsets,
                                 std::span<uint64_t> sums, const Mark* after) {
  gpu::Use(device_);
  if (!Passed(after)) return {.stands = true};
  Stage* stage = TakeStage();
  if (stage == nullptr) return {.missed_deadline = true};
  Adopted adopted(*transfers_, *arena);
  std::vector<size_t> which(blocks.size());
  std::iota(which.begin(), which.end(), size_t{0});
  stage->hung = true;
  Move(*stage, true, blocks, which);
  const auto ids = StageBlocks(stage->first, blocks.size());
  const auto hangs = [this, stage, arena](uint64_t ticket, int number) -> DeviceResult {
    return {false,
            [this, stage, arena, ticket, number] {
              gpu::Use(device_);
              if (!stage->done.Done() || (ticket != 0 && !transfers_->Settled(ticket))) return false;
              if (ticket != 0) transfers_->Unregister(number);
              GiveBack(stage);
              return true;
            },
            true};
  };
  // Not enqueued behind the pages' event: a channel that waits for a GPU that stands still would be lost to others.
  if (!stage->done.Wait(deadline_us_)) return hangs(0, 0);
  const cuda::TransferResult result = transfers_->Export(adopted.number, ids, Signed(offsets), sums);
  if (result.outcome == cuda::TransferResult::Outcome::kTimedOut) {
    adopted.kept = true;
    return hangs(result.ticket, adopted.number);
  }
  GiveBack(stage);
  if (result.outcome == cuda::TransferResult::Outcome::kRefused) return {.missed_deadline = true};
  return {.copied = true};
}

}  // namespace kvtier
