// The client's part of copies of a GPU's memory: pieces that may hang, marks, and the thread that pins.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "client.h"

namespace kvtier {
namespace {

constexpr size_t kMostMarks = 4096;

// The first that nobody else keeps is taken out; null: there is none.
template <class Kept>
std::shared_ptr<Kept> TakeUnused(std::deque<std::shared_ptr<Kept>>& all) {
  const auto unused = std::ranges::find_if(all, [](const auto& one) { return one.use_count() == 1; });
  if (unused == all.end()) return nullptr;
  auto taken = std::move(*unused);
  all.erase(unused);
  return taken;
}

// A few bytes on their way from or to a device.
struct Look {
  Look(int device, size_t bytes) : device(device), buffer(std::make_unique<gpu::PinnedBuffer>(bytes, "a look at a layout")) {}
  ~Look() {
    try {
      const gpu::OnDevice on(device);
      stream.reset();
      buffer.reset();
    } catch (const std::exception&) {
      // The device is lost, and what it has of this with it.
      (void)stream.release();
      (void)buffer.release();
    }
  }
  const int device;
  std::unique_ptr<gpu::PinnedBuffer> buffer;
  std::unique_ptr<gpu::Stream> stream = std::make_unique<gpu::Stream>();
};

}  // namespace

bool Client::RunDevicePiece(int64_t number, const std::shared_ptr<Job>& job, size_t first, size_t end) {
  const int device = job->device_arena->device();
  const size_t count = end - first;
  const auto passed = [device, mark = job->after] {
    gpu::Use(device);
    return mark->event->Done();
  };
  bool others_stand;
  {
    const std::lock_guard lock(mutex_);
    // One deadline is paid for a device that stands still, and not one a piece.
    if (AsideLocked(false, device) > 0 || job->abandoned) {
      counts_.late_blocks += job->abandoned ? 0 : count;
      return true;
    }
    others_stand = job->after != nullptr && AsideLocked(true, device) > 0;
  }
  const auto part = [&](auto& all) { return std::span(all).subspan(first, count); };
  DeviceResult result;
  try {
    const bool bounced = !job->device_arena->Host()->pinned();
    DeviceLayout& layout = *job->layout->device;
    if (others_stand && !passed()) {
      result = {.stands = true};  // nor one for a step
    } else if (job->kind == JobKind::kLoad) {
      result = layout.Load(job->device_arena, part(job->blocks), part(job->offsets), part(job->sums), part(job->good), job->after.get());
    } else {
      result = layout.Store(job->device_arena, part(job->blocks), part(job->offsets), part(job->sums), job->after.get());
    }
    if (bounced && result.copied) {
      const std::lock_guard lock(mutex_);
      counts_.bounced_bytes += count * job->payload_bytes;
    }
  } catch (const std::exception&) {
    // The device is lost to this process; what it still does is not known, so nothing of it is given back.
    std::ranges::fill(part(job->good), uint8_t{KVTIER_MISSED});
    result = {.settled = [] { return false; }, .missed_deadline = true};
  }
  if (result.copied && job->kind == JobKind::kStore) std::ranges::fill(part(job->good), uint8_t{KVTIER_GOOD});
  const std::lock_guard lock(mutex_);
  if (result.missed_deadline) counts_.late_blocks += count;
  if (result.stands) {
    const auto most = kStepDeadlines * std::chrono::milliseconds(options_.device_deadline_ms);
    if (job->stands_until == decltype(job->stands_until){}) job->stands_until = std::chrono::steady_clock::now() + most;
    hung_.push_back({number, job, device, passed, true, std::pair(first, end)});
  } else if (result.settled) {
    hung_.push_back({number, job, device, std::move(result.settled), !result.blocks_free});
  } else {
    return true;
  }
  loads_.ready.notify_all();
  stores_.ready.notify_all();
  return result.blocks_free;
}

size_t Client::AsideLocked(bool stands, int device) const {
  const auto wanted = [&](const std::pair<int, bool>& one) { return one.second == stands && (device < 0 || one.first == device); };
  const auto of = [](const Hung& one) { return std::pair(one.device, one.piece.has_value()); };
  return static_cast<size_t>(std::ranges::count_if(asking_, wanted) + std::ranges::count_if(hung_, wanted, of));
}

void Client::SettleHung(std::unique_lock<std::mutex>& lock) {
  if (!asking_.empty()) return;
  std::vector<Hung> asked;
  asked.swap(hung_);
  std::vector<bool> unwanted;
  for (const Hung& one : asked) {
    asking_.emplace_back(one.device, one.piece.has_value());
    unwanted.push_back(one.piece && one.job->abandoned);
  }
  lock.unlock();
  std::vector<Hung> over, left;
  for (size_t i = 0; i < asked.size(); ++i) {
    Hung& one = asked[i];
    bool settled = unwanted[i];
    try {
      settled = settled || one.settled();
    } catch (const std::exception&) {
      // The device is lost: it hangs for ever.
    }
    (settled ? over : left).push_back(std::move(one));
  }
  lock.lock();
  asking_.clear();
  for (Hung& one : left) {
    if (!one.piece || std::chrono::steady_clock::now() < one.job->stands_until) continue;
    // From now on as what hangs: the device is asked for nothing until it answers.
    counts_.late_blocks += one.piece->second - one.piece->first;
    one.piece.reset();
    one.holds = false;
    PieceEndedLocked(one.number, *one.job);
  }
  std::ranges::move(left, std::back_inserter(hung_));
  for (Hung& one : over) {
    if (one.piece) {
      PutBackLocked(one.number, one.job, *one.piece);
    } else if (one.holds) {
      PieceEndedLocked(one.number, *one.job);
    }
  }
  lock.unlock();
  over.clear();  // may unmap an arena
  lock.lock();
}

void Client::PinLocked(MappedArena& mapped, int device) {
  if (mapped.devices.contains(device)) return;
  if (!StartPinnerLocked()) throw Failure(KVTIER_SETUP, "SETUP: no thread to pin the arena; raise the limit of processes");
  auto arena = std::make_shared<DeviceArena>(device, mapped.arena, mapped.newest);
  mapped.devices[device] = mapped.newest = arena;
  to_pin_.push_back(std::move(arena));
  pins_.notify_all();
}

bool Client::StartPinnerLocked() {
  if (pinner_.joinable() || closing_) return true;
  try {
    pinner_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "kvtier-pin");
      PinAll();
    });
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void Client::PinAll() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (!to_pin_.empty()) {
      std::shared_ptr<DeviceArena> arena = std::move(to_pin_.front());
      to_pin_.pop_front();
      lock.unlock();
      try {
        arena->Pin();
      } catch (const std::exception&) {
        // The device is lost: copies say so.
      }
      arena.reset();
      lock.lock();
      continue;
    }
    auto mapped = TakeUnused(retired_);
    auto layout = mapped ? nullptr : TakeUnused(forgotten_);
    if (mapped || layout) {
      lock.unlock();
      mapped.reset();  // unpins, and unmaps
      layout.reset();
      lock.lock();
      continue;
    }
    if (retired_.empty() && forgotten_.empty()) {
      pins_.wait(lock);
    } else {
      pins_.wait_for(lock, kAskPeriod);
    }
  }
}

int64_t Client::AddMark(int device, void* stream) {
  std::shared_ptr<const Mark> mark;
  try {
    mark = std::make_shared<const Mark>(device, stream);
  } catch (const std::runtime_error& error) {
    throw Failure(KVTIER_SETUP, std::string("SETUP: ") + error.what());
  }
  const std::lock_guard lock(mutex_);
  if (marks_.size() >= kMostMarks) throw Failure(KVTIER_BUSY, "BUSY: 4096 marks are known; forget them when their jobs have begun");
  marks_[next_number_] = std::move(mark);
  return next_number_++;
}

void Client::ForgetMark(int64_t number) {
  std::shared_ptr<const Mark> mark;  // ends outside of the lock
  const std::lock_guard lock(mutex_);
  const auto found = marks_.find(number);
  if (found == marks_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no mark " + std::to_string(number));
  mark = std::move(found->second);
  marks_.erase(found);
}

int Client::Pinning(int64_t number, int device, std::string* why) {
  const std::lock_guard lock(mutex_);
  const auto mapped = arenas_.find(number);
  if (mapped == arenas_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no arena " + std::to_string(number) + " is mapped");
  const auto arena = mapped->second->devices.find(device);
  if (arena == mapped->second->devices.end()) return 0;
  switch (arena->second->state(why)) {
    case DeviceArena::State::kPinned: return 1;
    case DeviceArena::State::kRefused: return 2;
    default: return 0;
  }
}

void Client::Reach(int device, void* host, uint64_t address, size_t bytes, bool write) {
  try {
    const gpu::OnDevice on(device);
    const auto look = std::make_shared<Look>(device, bytes);
    uint8_t *const place = reinterpret_cast<uint8_t*>(address), *const buffer = look->buffer->data();
    if (write) memcpy(buffer, host, bytes);
    look->stream->Copy(write ? place : buffer, write ? buffer : place, bytes);
    if (!look->stream->Synchronize(int64_t{1000} * options_.device_deadline_ms)) {
      // Put aside like any copy that hangs. The device is not given up for it: arenas would stay pinned after they are unmapped.
      const auto settled = [device, look] {
        gpu::Use(device);
        return look->stream->Synchronize(0);
      };
      const std::lock_guard lock(mutex_);
      hung_.push_back({0, nullptr, device, settled, false});
      loads_.ready.notify_all();
      stores_.ready.notify_all();
      throw std::runtime_error("GPU: device " + std::to_string(device) + " has not ended a small copy; restart the engine");
    }
    if (!write) memcpy(host, buffer, bytes);
  } catch (const std::runtime_error& error) {
    throw Failure(KVTIER_SETUP, std::string("SETUP: ") + error.what());
  }
}

}  // namespace kvtier
