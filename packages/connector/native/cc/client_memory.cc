// What jobs work on: arenas that are mapped, and layouts of an engine's memory.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "client.h"
#include "lock_byte.h"

namespace kvtier {
namespace {

constexpr uint64_t kMostParts = 1 << 16;
constexpr uint64_t kMostBytes = uint64_t{1} << 40;  // of one payload

// Descriptors that hold a lock. Locks are of open files, which a child that was forked shares: without exec it would hold them for as long as
// it lives, and the node would wait for an engine that is gone. The child has no arena (see Arena), so it needs no lock.
struct HeldLocks {
  std::mutex mutex;
  std::set<int*> fds;

  static HeldLocks& All() {
    static HeldLocks* all = [] {
      auto* made = new HeldLocks;  // never destroyed: a thread may fork until the process is gone
      pthread_atfork([] { All().mutex.lock(); }, [] { All().mutex.unlock(); }, [] { All().EndInChild(); });
      return made;
    }();
    return *all;
  }

  void EndInChild() {
    for (int* fd : fds) close(std::exchange(*fd, -1));
    fds.clear();
    mutex.unlock();
  }
};

}  // namespace

MappedArena::~MappedArena() {
  const bool pinned = std::ranges::any_of(devices, [](const auto& one) { return one.second->pinned_bytes() > 0; });
  devices.clear();
  newest.reset();
  const bool kept = pinned && gpu::Abandoned();
  if (kept) (void)new std::shared_ptr<Arena>(arena);
  arena.reset();
  if (lock_fd < 0) return;
  HeldLocks& held = HeldLocks::All();
  const std::lock_guard lock(held.mutex);
  held.fds.erase(&lock_fd);
  if (kept) {
    held.fds.insert(new int(lock_fd));  // a child that is forked ends it all the same
  } else {
    close(lock_fd);
  }
}

int64_t Client::Map(const std::string& path, uint64_t bytes, uint64_t id, uint64_t lock_byte) {
  auto mapped = std::make_shared<MappedArena>();
  if (lock_byte != 0) {
    HeldLocks& held = HeldLocks::All();
    const std::lock_guard lock(held.mutex);  // no fork in between
    mapped->lock_fd = open((path + ".lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (mapped->lock_fd < 0 || !HoldByte(mapped->lock_fd, lock_byte)) {
      throw Failure(KVTIER_SETUP, "SETUP: " + path + ".lock: byte " + std::to_string(lock_byte) + " cannot be held (" +
                                      std::strerror(errno) + "); share the arena's whole folder");
    }
    held.fds.insert(&mapped->lock_fd);
  }
  try {
    mapped->arena = Arena::Open(path, bytes, id);
  } catch (const std::runtime_error& error) {
    const bool foreign = std::string(error.what()).starts_with("PROTOCOL");
    throw Failure(foreign ? KVTIER_PROTOCOL : KVTIER_SETUP, error.what());
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [number, layout] : layouts_) {
    if (layout->device) PinLocked(*mapped, layout->device->device());
  }
  arenas_[next_number_] = std::move(mapped);
  return next_number_++;
}

bool Client::Unmap(int64_t number) {
  std::weak_ptr<MappedArena> left;
  {
    // What this reference unmaps, if nobody else has it, takes its time: after the lock, which every poll of a copy takes.
    std::shared_ptr<MappedArena> mapped;
    const std::lock_guard lock(mutex_);
    const auto found = arenas_.find(number);
    if (found == arenas_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no arena " + std::to_string(number) + " is mapped");
    mapped = std::move(found->second);
    arenas_.erase(found);
    for (const auto& [device, arena] : mapped->devices) arena->Leave();
    std::erase_if(to_pin_, [&](const auto& waits) { return std::ranges::any_of(mapped->devices, [&](const auto& one) { return one.second == waits; }); });
    // Whoever forgets its last job may be an engine's loop.
    if ((!mapped->devices.empty() || mapped.use_count() > 1) && StartPinnerLocked()) {
      retired_.push_back(mapped);
      pins_.notify_all();
    }
    left = mapped;
    if (mapped.use_count() > 1) leaving_.push_back(left);
  }
  return left.expired();
}

int64_t Client::AddLayout(std::span<const kvtier_part> parts, uint64_t blocks, int device) {
  auto layout = std::make_shared<Layout>();
  layout->parts.assign(parts.begin(), parts.end());
  layout->blocks = blocks;
  if (parts.empty() || parts.size() > kMostParts || blocks == 0) {
    throw Failure(KVTIER_CONFIG, "CONFIG: a layout has 1 to 65536 parts and at least one block");
  }
  for (const kvtier_part& part : parts) {
    const auto beyond = [](uint64_t count, uint64_t step, uint64_t most) { return step != 0 && count > most / step; };
    if (part.base == 0 || part.rows == 0 || part.row_bytes == 0 || beyond(part.rows, part.row_bytes, kMostBytes) ||
        beyond(part.rows, part.row_stride, UINT64_MAX / 4) || beyond(blocks, part.stride, UINT64_MAX / 4) ||
        part.base > UINT64_MAX / 4) {
      throw Failure(KVTIER_CONFIG, "CONFIG: a part of a layout has no place, no bytes, or reaches beyond all memory");
    }
    layout->payload_bytes += part.rows * part.row_bytes;
    layout->runs += part.rows;
    if (layout->payload_bytes > kMostBytes || layout->runs > kMostParts * 64) {
      throw Failure(KVTIER_CONFIG, "CONFIG: a payload of more than 2^40 bytes or 2^22 runs");
    }
  }
  if (device >= 0) {
    try {
      layout->device = std::make_unique<DeviceLayout>(device, layout->parts, blocks, layout->payload_bytes,
                                                      options_.load_threads + options_.store_threads,
                                                      int64_t{1000} * options_.device_deadline_ms);
    } catch (const std::runtime_error& error) {
      throw Failure(KVTIER_SETUP, std::string("SETUP: ") + error.what());
    }
  }
  const std::lock_guard lock(mutex_);
  if (device >= 0) {
    for (const auto& [number, mapped] : arenas_) PinLocked(*mapped, device);
  }
  layouts_[next_number_] = std::move(layout);
  return next_number_++;
}

uint64_t Client::PayloadBytes(int64_t layout) {
  const std::lock_guard lock(mutex_);
  const auto found = layouts_.find(layout);
  return found == layouts_.end() ? 0 : found->second->payload_bytes;
}

void Client::ForgetLayout(int64_t number) {
  std::shared_ptr<const Layout> layout;  // a CPU's ends outside of the lock
  const std::lock_guard lock(mutex_);
  const auto found = layouts_.find(number);
  if (found == layouts_.end()) throw Failure(KVTIER_UNKNOWN, "CONFIG: no layout " + std::to_string(number));
  layout = std::move(found->second);
  layouts_.erase(found);
  if (layout->device == nullptr) return;
  // To free a GPU's memory waits for all that runs there: neither the caller does, nor who forgets its last job. Without a thread for it
  // it is freed when the client is closed.
  forgotten_.push_back(std::move(layout));
  if (StartPinnerLocked()) pins_.notify_all();
}

kvtier_counts Client::Counts() {
  const std::lock_guard lock(mutex_);
  std::erase_if(leaving_, [](const std::weak_ptr<MappedArena>& arena) { return arena.expired(); });
  kvtier_counts counts = counts_;
  counts.arenas = arenas_.size() + leaving_.size();
  counts.layouts = layouts_.size();
  counts.jobs = jobs_.size();
  counts.hung = AsideLocked(false, -1);
  counts.standing = AsideLocked(true, -1);
  for (const auto& [number, mapped] : arenas_) {
    std::string why;
    for (const auto& [device, arena] : mapped->devices) {
      counts.pinned_bytes += arena->pinned_bytes();
      counts.pins_refused += arena->state(&why) == DeviceArena::State::kRefused ? 1 : 0;
    }
  }
  counts.quarantined = static_cast<uint64_t>(std::ranges::count_if(jobs_, [](const auto& entry) { return entry.second->abandoned; }));
  return counts;
}

}  // namespace kvtier
