// The client's part of copies of a GPU's memory: pieces that may hang, marks, and the thread that pins.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "client.h"

namespace kvtier {
namespace {

constexpr size_t kMostMarks = 4096;

}  // namespace

bool Client::RunDevicePiece(int64_t number, const std::shared_ptr<Job>& job, size_t first, size_t end) {
  const int device = job->device_arena->device();
  const size_t count = end - first;
  {
    const std::lock_guard lock(mutex_);
    // One deadline is paid for a device that stands still, and not one a piece.
    const bool stands = std::ranges::count(asking_, device) > 0 || std::ranges::count(hung_, device, &Hung::device) > 0;
    if (stands || job->abandoned) {
      counts_.late_blocks += job->abandoned ? 0 : count;
      return true;
    }
  }
  const auto part = [&](auto& all) { return std::span(all).subspan(first, count); };
  DeviceResult result;
  try {
    const bool bounced = !job->device_arena->Host()->pinned();
    DeviceLayout& layout = *job->layout->device;
    result = job->kind == JobKind::kLoad
                 ? layout.Load(job->device_arena, part(job->blocks), part(job->offsets), part(job->sums), part(job->good), job->after.get())
                 : layout.Store(job->device_arena, part(job->blocks), part(job->offsets), part(job->sums), job->after.get());
    if (bounced && result.copied) {
      const std::lock_guard lock(mutex_);
      counts_.bounced_bytes += count * job->payload_bytes;
    }
  } catch (const std::exception&) {
    // The device is lost to this process; what it still does is not known, so nothing of it is given back.
    std::ranges::fill(part(job->good), uint8_t{0});
    result = {.settled = [] { return false; }, .missed_deadline = true};
  }
  if (result.copied && job->kind == JobKind::kStore) std::ranges::fill(part(job->good), uint8_t{1});
  const std::lock_guard lock(mutex_);
  if (result.missed_deadline) counts_.late_blocks += count;
  if (!result.settled) return true;
  hung_.push_back({number, job, device, std::move(result.settled), !result.blocks_free});
  loads_.ready.notify_all();
  stores_.ready.notify_all();
  return result.blocks_free;
}

void Client::SettleHung(std::unique_lock<std::mutex>& lock) {
  if (!asking_.empty()) return;
  std::vector<Hung> asked;
  asked.swap(hung_);
  for (const Hung& one : asked) asking_.push_back(one.device);
  lock.unlock();
  std::vector<Hung> over, left;
  for (Hung& one : asked) {
    bool settled = false;
    try {
      settled = one.settled();
    } catch (const std::exception&) {
      // The device is lost: it hangs for ever.
    }
    (settled ? over : left).push_back(std::move(one));
  }
  lock.lock();
  asking_.clear();
  std::ranges::move(left, std::back_inserter(hung_));
  for (Hung& one : over) {
    if (one.holds) PieceEndedLocked(one.number, *one.job);
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
  ++working_;
  try {
    pinner_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "kvtier-pin");
      PinAll();
    });
  } catch (const std::exception&) {
    --working_;
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
    const auto free = std::ranges::find_if(retired_, [](const auto& mapped) { return mapped.use_count() == 1; });
    if (free != retired_.end()) {
      std::shared_ptr<MappedArena> mapped = std::move(*free);
      retired_.erase(free);
      lock.unlock();
      mapped.reset();  // unpins, and unmaps
      lock.lock();
      continue;
    }
    if (retired_.empty()) {
      pins_.wait(lock);
    } else {
      pins_.wait_for(lock, kAskPeriod);
    }
  }
  --working_;
  ended_.notify_all();
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
    gpu::PinnedBuffer buffer(bytes, "a look at a layout");
    gpu::Stream stream;
    auto* const place = reinterpret_cast<uint8_t*>(address);
    if (write) memcpy(buffer.data(), host, bytes);
    stream.Copy(write ? place : buffer.data(), write ? buffer.data() : place, bytes);
    if (!stream.Synchronize(int64_t{1000} * options_.device_deadline_ms)) {
      gpu::Abandon();
      throw std::runtime_error("GPU: device " + std::to_string(device) + " has not ended a small copy; restart the engine");
    }
    if (!write) memcpy(host, buffer.data(), bytes);
  } catch (const std::runtime_error& error) {
    throw Failure(KVTIER_SETUP, std::string("SETUP: ") + error.what());
  }
}

}  // namespace kvtier
