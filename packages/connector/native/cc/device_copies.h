// Copies between an engine's memory on a GPU and the arena, over the executor's own channels (packages/engine/cuda/transfer). A
// payload is put together in a stage of GPU memory, so that the bus sees one run of bytes a block and the checksum is of what
// went, or came, over it:
//
//   store   engine's pages ─kernel─▶ stage ─hash─▶ sums
//                                       └──copy──▶ slot of the arena (pinned; else over a buffer)
//   load    slot ─copy─▶ stage ─hash─▶ compared ─kernel, the good ones─▶ engine's pages
//
// What the engine enqueued before is waited for by an event on its stream, which the copying thread polls. That is the engine's own
// time, which may be long: a copy that it keeps waiting is tried again, and is not late.
//
// Invariants: every wait has a deadline. What missed it keeps its stage, and says when the device has done with it; a load whose
// bytes did not come in time has not touched the engine's pages.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "gpu/driver.h"
#include "kvtier.h"
#include "transfer/transfers.h"

namespace kvtier {

// Somewhere in an engine's stream.
struct Mark {
  Mark(int device, void* stream);
  ~Mark();
  const int device;
  std::unique_ptr<gpu::Event> event;
};

// An arena as one device sees it: through a buffer until it is pinned, and for ever where that is refused. Memory is pinned once for all
// devices of a process: the next one takes what the one before it has.
class DeviceArena {
 public:
  // `before`: the arena as another device sees it, whose Pin is called first; null: there is none.
  DeviceArena(int device, std::shared_ptr<Arena> arena, std::shared_ptr<DeviceArena> before);
  ~DeviceArena();

  int device() const { return device_; }
  std::shared_ptr<cuda::HostArena> Host();
  // Pins, which takes a tenth of a second for each GiB; ends early when nobody wants it any more.
  void Pin();
  void Leave() { wanted_ = false; }
  enum class State { kPending, kPinned, kRefused };
  State state(std::string* why);
  uint64_t pinned_bytes();

 private:
  const int device_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<DeviceArena> before_;  // who pinned it also ends that, after all others
  std::atomic<bool> wanted_{true};
  std::mutex mutex_;
  std::shared_ptr<cuda::HostArena> host_;
  State state_ = State::kPending;
  std::string why_;
};

struct DeviceResult {
  bool copied = false;  // loads: `good` says it block by block
  // Set when the device may still touch blocks or slots: true as soon as it does not any more. From one thread at a time.
  std::function<bool()> settled = {};
  bool missed_deadline = false;
  // What hangs reads a slot into our stage, or nothing: the engine's blocks were not touched, and will not be.
  bool blocks_free = false;
  // Its mark has not passed within the deadline: nothing was touched, and it may be tried again.
  bool stands = false;
};

class DeviceLayout {
 public:
  DeviceLayout(int device, std::span<const kvtier_part> parts, uint64_t blocks, uint64_t payload_bytes, uint32_t stages, int64_t deadline_us);
  ~DeviceLayout();

  int device() const { return device_; }
  // Most blocks of one call.
  size_t stage_blocks() const { return stage_blocks_; }
  DeviceResult Load(std::shared_ptr<DeviceArena> arena, std::span<const uint64_t> blocks, std::span<const uint64_t> offsets,
                    std::span<uint64_t> sums, std::span<uint8_t> good, const Mark* after);
  DeviceResult Store(std::shared_ptr<DeviceArena> arena, std::span<const uint64_t> blocks, std::span<const uint64_t> offsets,
                     std::span<uint64_t> sums, const Mark* after);

 private:
  // Rows of equal length, that one kernel moves.
  struct Class {
    uint64_t row_bytes;
    std::vector<std::pair<uint64_t, uint64_t>> rows;  // offset in the payload, address in block 0
    std::vector<uint64_t> strides;
  };
  struct Stage {
    size_t first;  // block of the stage
    gpu::PinnedBuffer places;
    gpu::Buffer device_places;
    gpu::Stream stream;
    gpu::Event done;
    bool hung = false;
  };
  Stage* TakeStage();
  void GiveBack(Stage* stage);
  // Waits for a mark, if there is one; false: not within the deadline. This thread does, and no stream of ours: an engine's process has eight
  // hardware queues as a rule, and what stands in one holds up the engine's streams that share it.
  bool Passed(const Mark* after) const;
  // Enqueues the kernels between the stage's stage and these blocks of the engine; `which`: indexes into `blocks`.
  void Move(Stage& stage, bool to_stage, std::span<const uint64_t> blocks, std::span<const size_t> which);

  const int device_;
  const uint64_t payload_bytes_;
  const int64_t deadline_us_;
  const size_t stage_blocks_;
  std::vector<Class> classes_;
  size_t rows_ = 0;
  int multiprocessors_ = 0;  // all of them, for some microseconds: a few that are kept cost the model more
  gpu::Buffer memory_;  // of all stages
  std::unique_ptr<cuda::Transfers> transfers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<Stage*> idle_;
};

}  // namespace kvtier
