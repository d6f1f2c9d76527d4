// What the checks of transfers share: a pool with known content, an arena with slots, transfers between them.
#pragma once
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../../base/data-plane/cc/xxh3.h"
#include "../transfer/transfers.h"
#include "check.h"

namespace kvtier::cuda::check {

using Outcome = TransferResult::Outcome;
using Bytes = std::vector<uint8_t>;

inline Bytes RandomBytes(uint64_t seed, int64_t count) {
  const std::vector<int32_t> words = RandomInts(seed, (count + 3) / 4, INT32_MIN, INT32_MAX);
  Bytes bytes(static_cast<size_t>(count));
  memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

inline uint64_t HashOf(const uint8_t* data, int64_t bytes) { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

// Page-aligned host memory that is not pinned, as a mapped arena is.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("no memory");
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  const size_t bytes_;
};

// A pool of `blocks` blocks with random content, and an arena with room for `slots` objects of them.
struct World {
  World(int64_t blocks, int64_t block_bytes, int64_t slots, TransferOptions options = {})
      : block_bytes(block_bytes),
        slot_bytes((block_bytes + 256 + 4095) / 4096 * 4096),
        content(RandomBytes(7, blocks * block_bytes)),
        pool(content),
        arena(static_cast<size_t>(slots * slot_bytes)),
        transfers({pool.data(), blocks, block_bytes}, Batched(options, block_bytes)),
        id(transfers.Register(arena.data(), arena.bytes()).arena) {}
  ~World() {
    if (registered) transfers.Unregister(id);
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Batches of five blocks: every call needs several.
  static TransferOptions Batched(TransferOptions options, int64_t block_bytes) {
    options.batch_bytes = options.passing_bytes = 5 * block_bytes;
    return options;
  }
  int64_t Slot(int64_t index) const { return index * slot_bytes + 256; }
  bool SlotHolds(int64_t offset, int32_t block) const {
    return memcmp(arena.data() + offset, content.data() + block * block_bytes, static_cast<size_t>(block_bytes)) == 0;
  }
  uint64_t Sum(int32_t block) const { return HashOf(content.data() + block * block_bytes, block_bytes); }

  const int64_t block_bytes, slot_bytes;
  const Bytes content;
  DeviceArray<uint8_t> pool;
  Mapping arena;
  Transfers transfers;
  int id;
  bool registered = true;  // false: leave the arena as it is
};

// Blocks below the threshold by kernels, as where nothing else runs.
inline TransferOptions Options(int64_t threshold_bytes) {
  TransferOptions options;
  options.paths = {threshold_bytes, 2};
  options.alone = [] { return true; };
  options.batch_blocks = 5;
  options.layered_blocks = 64;
  options.deadline_us = 60'000'000;
  return options;
}

// Holds a stream back until it is opened: what waits for `event` meanwhile misses its deadline.
class Gate {
 public:
  Gate() {
    stream_.Host([this] {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return open_; });
    });
    event.Record(stream_);
  }
  ~Gate() {
    Open();
    Finish(stream_);  // which uses the mutex
  }
  void Open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }
  gpu::Event event;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  gpu::Stream stream_;
};

constexpr int64_t kShortUs = 100'000;

inline TransferOptions ShortDeadline(int64_t threshold_bytes) {
  TransferOptions options = Options(threshold_bytes);
  options.deadline_us = kShortUs;
  return options;
}

}  // namespace kvtier::cuda::check
