// KV blocks between GPU memory and a cache node's arena, at the bus's speed, beside the model's steps. Callers are threads that
// may wait: each call returns when its copies have ended, or have missed their deadline. Any number of calls may run at the
// same time, on registered arenas; a few of them per direction are on the bus, the others wait their turn.
//
//   call ─▶ channel (a stream) ─▶ batches: copy | hash ─▶ events ─▶ checksums compared or handed out
//               │ deadline passes
//               ▼
//           quarantine: the channel, the blocks and the slots, until the events fire
//
// Checksums are computed by the GPU: of the source before anybody can change it (export), of what arrived (import). The CPU reads no
// payload, except where an arena could not be pinned.
//
// Invariants:
// * A call's blocks and slots are touched by nobody's copies after it has returned, unless it returned kTimedOut: then they
//   are in quarantine until `Settled(ticket)`; no other call may name them, and the caller must neither reuse the blocks nor
//   give the slots back before that.
// * No lock is held while waiting for the device or copying.
// * Every wait has a deadline.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "host_arena.h"
#include "copy_channel.h"

namespace kvtier::cuda {

struct TransferOptions {
  int device = 0;
  // For each batch; one takes a millisecond or two on a bus that works.
  int64_t deadline_us = 5'000'000;
  // Which path for which size; measured at start when threshold_bytes is 0 (not on the emulator).
  PathChoice paths = {0, 8};
  // Whether the GPU has nothing else to do: then blocks below the threshold go by kernels. Empty: never.
  std::function<bool()> alone;
  int channels = 2;    // calls per direction on the bus at the same time
  int batches = 3;  // per channel, in flight
  int64_t batch_bytes = 32 << 20;
  int64_t passing_bytes = 64 << 20;  // of a batch that a kernel moves: between two of them the bus waits for some microseconds
  int64_t batch_blocks = 256;     // by the copy engine: a stream takes about a thousand operations before it makes its caller wait
  int64_t layered_blocks = 8192;  // most blocks of one import by layers; 0: there are none
  int64_t stage_bytes = 8 << 20;  // per batch, where an arena is not pinned
  PinOptions pin;
};

struct TransferResult {
  enum class Outcome {
    kDone,
    kTimedOut,  // the device has not answered; blocks and slots are in quarantine under `ticket`
    kRefused,   // nothing was started: something named is in quarantine, every channel is, or memory to stage it lacks
  };
  Outcome outcome = Outcome::kDone;
  int64_t blocks = 0;  // leading blocks of the call whose checksum or verdict was delivered
  uint64_t ticket = 0;
  std::string error;  // one line: what, where, how to mend
};

struct TransferCounts {
  uint64_t exported_blocks, imported_blocks, bad_blocks, timeouts, quarantined_blocks;
  uint64_t kernel_blocks;  // that were sent by a kernel and not by the copy engine
};

class LayeredImport;

class Transfers {
 public:
  // `pool`: device memory, 16-aligned; block_bytes > 240 and a multiple of 16. Throws std::runtime_error.
  Transfers(const KvBlocks& kv, const TransferOptions& options);
  // After all calls have returned. What still hangs is left to the end of the process.
  ~Transfers();

  struct Registration {
    int arena;
    bool pinned;
    double seconds;
    std::string refusal;  // why it is not pinned
  };
  // The arena's memory, page-aligned; it must stay mapped until Unregister. `wanted`: as in PinOptions, of this arena.
  Registration Register(uint8_t* base, size_t bytes, std::function<bool()> wanted = {});
  // One that others use, too: of several pools of one device.
  int Adopt(std::shared_ptr<HostArena> host);
  // After the calls that use it have returned. False when copies from or to it still hang after the deadline: it must stay
  // mapped then, for ever.
  bool Unregister(int arena);

  // offsets: of payloads in the arena, bytes. sums[i]: XXH3-64 of block i as it lay in GPU memory. `after`: the copies start
  // when this event has fired. Throws what the device reports (the process must end) and on arguments out of bounds.
  TransferResult Export(int arena, std::span<const int32_t> block_ids, std::span<const int64_t> offsets, std::span<uint64_t> sums,
                        const gpu::Event* after = nullptr);
  // good[i]: 1 when what arrived in block i has the checksum sums[i], else 0: the block's content is undefined then.
  TransferResult Import(int arena, std::span<const int32_t> block_ids, std::span<const int64_t> offsets,
                        std::span<const uint64_t> sums, std::span<uint8_t> good, const gpu::Event* after = nullptr);
  // Starts an import that brings layer 0 of all blocks first; block_bytes is a multiple of layers. Returns as soon as it is
  // enqueued; where layers cannot be had apart, when all is there.
  std::unique_ptr<LayeredImport> ImportByLayer(int arena, std::span<const int32_t> block_ids, std::span<const int64_t> offsets,
                                               std::span<const uint64_t> sums, int64_t layers, const gpu::Event* after = nullptr);

  // True once nothing of that quarantine is touched by the device any more: blocks and slots may be used again.
  bool Settled(uint64_t ticket);
  std::vector<int32_t> QuarantinedBlocks();
  TransferCounts Counts() const;
  const PathChoice& paths() const { return paths_; }

 private:
  friend class LayeredImport;
  struct Arena {
    std::shared_ptr<HostArena> host;
    int users = 0;  // calls and quarantines
  };
  struct Quarantine {
    std::unique_ptr<CopyChannel> channel;
    int arena;
    std::vector<int32_t> block_ids;
    std::vector<int64_t> offsets;
    bool for_ever;  // no event tells when the device has done with it
  };
  // A call's hold on its channel and arena. `channel` empty: refused.
  struct Hold {
    std::unique_ptr<CopyChannel> channel;
    int arena = 0;
    HostArena* host = nullptr;
  };
  struct Call {
    Direction direction;
    int arena;
    std::span<const int32_t> block_ids;
    std::span<const int64_t> offsets;
    const gpu::Event* after;
  };
  using Deliver = std::function<void(int64_t first, std::span<const uint64_t> sums)>;

  std::vector<std::unique_ptr<CopyChannel>>& IdleChannels(Direction direction) { return idle_[direction == Direction::kExport ? 0 : 1]; }
  void CheckArguments(const Call& call) const;
  Hold Begin(const Call& call, std::vector<std::unique_ptr<CopyChannel>>& idle, TransferResult& result);
  void End(Hold hold, std::vector<std::unique_ptr<CopyChannel>>& idle);
  void Seclude(Hold hold, std::span<const int32_t> block_ids, std::span<const int64_t> offsets, bool for_ever, TransferResult& result);
  void SettleLocked();
  bool IsQuarantinedLocked(const Call& call) const;
  TransferResult Move(const Call& call, const Deliver& deliver);
  void Run(Hold& hold, const Call& call, const Deliver& deliver, TransferResult& result, int64_t& issued);
  bool Await(CopyChannel& channel, CopyBatch& batch, const Call& call) const;
  void Fill(CopyBatch& batch, const Call& call, int64_t first, int64_t count) const;
  void ReserveStage(CopyBatch& batch) const;
  HostSide Stage(CopyBatch& batch) const;
  void CopyStage(const CopyBatch& batch, const Call& call, const HostArena& arena) const;

  const KvBlocks kv_;
  const TransferOptions options_;
  PathChoice paths_;
  std::unique_ptr<gpu::Stream> hash_[2];  // by direction, for all its channels
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Arena> arenas_;
  int next_arena_ = 1;
  std::vector<std::unique_ptr<CopyChannel>> idle_[2], idle_layered_;
  std::map<uint64_t, Quarantine> quarantine_;
  uint64_t next_ticket_ = 1;
  std::atomic<uint64_t> exported_blocks_{0}, imported_blocks_{0}, bad_blocks_{0}, timeouts_{0}, quarantined_blocks_{0}, kernel_blocks_{0};
};

// An import under way. One thread at a time.
class LayeredImport {
 public:
  ~LayeredImport();  // finishes
  LayeredImport(const LayeredImport&) = delete;
  LayeredImport& operator=(const LayeredImport&) = delete;

  // What is enqueued on `stream` from now on runs after layer `layer` of all blocks is there; called for each layer in order. The checksums are not known
  // yet: what is computed from the blocks counts only if Finish finds them good.
  void BeforeLayer(int64_t layer, gpu::Stream& stream);
  // Waits for the end, and says of each block whether it is good. The result stays the same when called again.
  const TransferResult& Finish();
  const std::vector<uint8_t>& good() const { return good_; }

 private:
  friend class Transfers;
  explicit LayeredImport(Transfers& transfers) : transfers_(transfers) {}

  Transfers& transfers_;
  Transfers::Hold hold_;  // no channel: over
  std::vector<int32_t> block_ids_;
  std::vector<int64_t> offsets_;
  std::vector<uint64_t> sums_;
  std::vector<uint8_t> good_;
  TransferResult result_;
};

}  // namespace kvtier::cuda
