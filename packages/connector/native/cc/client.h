// What is behind kvtier.h: arenas, layouts, and jobs in pieces of whole blocks on two sets of threads.
//
// What a GPU does not end within its deadline is put aside (`hung_`): its job ends when the device says so, and until nothing hangs
// no other copy of that device is begun. A piece that stands behind the engine's own step is put aside, too, but is not late: it has
// touched nothing, holds up no other copy, and is begun again when the step has ended. After kStepDeadlines it is late.
//
// Invariant: whatever a thread touches outside the lock (arena, layout, its blocks of a job) is kept by the job, and a job is kept
// by the threads that run its pieces; nothing of it is freed before the last piece has ended.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arena.h"
#include "copy_code.h"
#include "device_copies.h"
#include "kvtier.h"

namespace kvtier {

struct Failure : std::runtime_error {
  Failure(int32_t status, const std::string& what) : std::runtime_error(what), status(status) {}
  int32_t status;
};

// So long from now, at most an hour.
std::chrono::steady_clock::time_point After(int64_t wait_us);

// An arena, and the lock that says so.
struct MappedArena {
  std::shared_ptr<Arena> arena;
  int lock_fd = -1;
  // Under the client's lock.
  std::map<int, std::shared_ptr<DeviceArena>> devices;
  std::shared_ptr<DeviceArena> newest;  // of them
  // Unmaps before the lock ends. What a driver may still have pinned keeps both for ever: of memory that comes to lie there nothing could
  // be pinned any more.
  ~MappedArena();
};

struct Layout {
  std::vector<kvtier_part> parts;
  uint64_t blocks = 0;
  uint64_t payload_bytes = 0;
  size_t runs = 0;  // of one block
  std::unique_ptr<DeviceLayout> device;  // null: the CPU's memory
};

constexpr auto kAskPeriod = std::chrono::milliseconds(5);  // of what hangs, and of arenas that are left
constexpr int kStepDeadlines = 12;  // a step of the engine, of a long prompt on a large model, may take so many deadlines of a copy

enum class JobKind { kLoad, kStore, kCheck };

struct Job {
  JobKind kind = JobKind::kLoad;
  std::shared_ptr<MappedArena> mapped;
  std::shared_ptr<const Layout> layout;  // null: a check
  uint64_t payload_bytes = 0;
  std::vector<uint64_t> blocks, offsets, sums;
  std::vector<uint8_t> good;
  std::shared_ptr<DeviceArena> device_arena;  // of a layout of a GPU
  std::shared_ptr<const Mark> after;
  size_t piece_blocks = 1;
  // Under the client's lock.
  size_t next = 0;     // the first block that no thread has begun
  std::vector<std::pair<size_t, size_t>> again;  // pieces before it that are to be begun again
  size_t running = 0;  // pieces, those that are put aside among them
  std::chrono::steady_clock::time_point stands_until{};  // set when a piece of it is first put aside behind the engine's step
  bool abandoned = false;
  bool ended = false;
};

class Client {
 public:
  explicit Client(const kvtier_options& options);
  // May wait for a GPU: for the thread that pins, which may stand in a call that it holds up, and in what frees its memory.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  int64_t Map(const std::string& path, uint64_t bytes, uint64_t id, uint64_t lock_byte);
  bool Unmap(int64_t arena);
  // device: below 0 the CPU.
  int64_t AddLayout(std::span<const kvtier_part> parts, uint64_t blocks, int device);
  int64_t AddMark(int device, void* stream);
  void ForgetMark(int64_t mark);
  // Its state; 2: `why` it is refused.
  int Pinning(int64_t arena, int device, std::string* why);
  void Reach(int device, void* host, uint64_t address, size_t bytes, bool write);
  uint64_t PayloadBytes(int64_t layout);
  void ForgetLayout(int64_t number);

  // `layout` 0 of a check, whose payloads have `payload_bytes`.
  int64_t Begin(JobKind kind, int64_t arena, int64_t layout, uint64_t payload_bytes, std::span<const uint64_t> blocks,
                std::span<const uint64_t> offsets, std::span<const uint64_t> sums, int64_t after);
  bool Wait(int64_t job, int64_t wait_us);
  void Take(int64_t job, uint64_t* sums, uint8_t* good, size_t count);
  bool Abandon(int64_t job);
  kvtier_counts Counts();

  // False: copies still ran then, and this object must stay for ever.
  bool Close(std::chrono::steady_clock::time_point until);

 private:
  struct Lane {
    std::deque<std::pair<int64_t, std::shared_ptr<Job>>> queue;
    std::condition_variable ready;
    std::vector<std::thread> threads;
  };
  void Start(Lane& lane, const char* name, uint32_t threads, uint32_t niceness);
  void Work(Lane& lane);
  void RunPiece(Job& job, size_t first, size_t end, std::vector<CopyPiece>& pieces);
  // True: the piece has ended. False: it hangs, and was put aside.
  bool RunDevicePiece(int64_t number, const std::shared_ptr<Job>& job, size_t first, size_t end);
  void PieceEndedLocked(int64_t number, Job& job);
  // A piece that was put aside is to be begun.
  void PutBackLocked(int64_t number, const std::shared_ptr<Job>& job, std::pair<size_t, size_t> piece);
  // What is put aside, of one device or of all (-1): what hangs, or what stands behind a step.
  size_t AsideLocked(bool stands, int device) const;
  Lane& LaneOf(const Job& job) { return job.kind == JobKind::kStore ? stores_ : loads_; }
  // Asks what hangs, without the lock.
  void SettleHung(std::unique_lock<std::mutex>& lock);
  // Sees to it that the arena is pinned for the device.
  void PinLocked(MappedArena& mapped, int device);
  // False: the system has no thread for it.
  bool StartPinnerLocked();
  void PinAll();
  void EndLocked(int64_t number, Job& job);
  std::shared_ptr<Job> FindLocked(int64_t job);

  const kvtier_options options_;
  const CopyCode copy_ = ChooseCopyCode().copy;
  std::mutex mutex_;
  std::condition_variable ended_;
  Lane loads_, stores_;
  std::map<int64_t, std::shared_ptr<MappedArena>> arenas_;
  std::vector<std::weak_ptr<MappedArena>> leaving_;  // unmapped as soon as their jobs have ended
  std::map<int64_t, std::shared_ptr<const Layout>> layouts_;
  std::map<int64_t, std::shared_ptr<Job>> jobs_;
  std::map<int64_t, std::shared_ptr<const Mark>> marks_;
  struct Hung {
    int64_t number;
    std::shared_ptr<Job> job;  // null: a few bytes that were looked at
    int device;
    std::function<bool()> settled;
    bool holds;  // its job has not ended
    std::optional<std::pair<size_t, size_t>> piece = {};  // of what stands behind a step
  };
  std::vector<Hung> hung_;
  std::vector<std::pair<int, bool>> asking_;  // device of those that were taken out to be asked, and whether they stand behind a step
  // Pinning, unpinning, unmapping and freeing a GPU's memory, which take their time: one thread, when there is first something for it.
  std::thread pinner_;
  std::condition_variable pins_;
  std::deque<std::shared_ptr<DeviceArena>> to_pin_;
  std::deque<std::shared_ptr<MappedArena>> retired_;  // that are pinned or have jobs: unmapped when the last job is forgotten
  std::deque<std::shared_ptr<const Layout>> forgotten_;  // of GPUs: freed when the last job is forgotten
  kvtier_counts counts_{};
  int64_t next_number_ = 1;
  uint32_t working_ = 0;  // threads: those of copies, and those that wait for a job
  bool closing_ = false;
};

}  // namespace kvtier
