// Asynchronous O_DIRECT I/O between files and the arena.
//
//     rows (JavaScript) ──plan──▶ transfers ──▶ backend: io_uring | threads ──▶ rows done ──verify──▶ completions
//
// A row is one object in one slot; a transfer is one system I/O. Rows that continue each other in the file are one run,
// and a run is cut into even transfers of about `ioBytes`: I/O size does not depend on block size. Invariants: a row completes
// exactly once, after all of its transfers; a file stays open until its last transfer has ended.
// The shape follows RocksDB's and ScyllaDB's I/O queues: one owner of the ring, a bounded depth, the rest waits in order.
#pragma once
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"

namespace kvtier {

enum class IoKind : uint8_t { kRead = 0, kWrite = 1, kReadVerified = 2 };

// A file descriptor with shared ownership.
struct IoFile {
  int fd;
  explicit IoFile(int number) : fd(number) {}
  IoFile(const IoFile&) = delete;
  IoFile& operator=(const IoFile&) = delete;
  ~IoFile();
};

// Bytes that are written in place of an object's first page.
using FirstPage = std::unique_ptr<uint8_t, void (*)(void*)>;

// What one submitted row asks for. Offsets and bytes are multiples of 4096, checked by the binding.
struct IoRow {
  double tag = 0;
  IoKind kind = IoKind::kRead;
  std::shared_ptr<IoFile> file;
  uint64_t fileOffset = 0;
  uint64_t arenaOffset = 0;
  uint64_t bytes = 0;
  // For kReadVerified: namespace digest, then hash zero padded.
  std::array<uint8_t, 64> identity{};
  // For writes: may be null.
  FirstPage firstPage{nullptr, std::free};
  // Written by the backend's thread(s) as parts end.
  std::atomic<uint32_t> openParts{0};
  std::atomic<uint64_t> movedBytes{0};
  std::atomic<int> error{0};
};

struct IoPart {
  std::shared_ptr<IoRow> row;
  uint64_t bytes;
};

// One system I/O: a piece of a run. `pieces` are shortened as it advances.
struct IoTransfer {
  bool write = false;
  std::shared_ptr<IoFile> file;
  uint64_t fileOffset = 0;
  uint64_t bytes = 0;
  uint64_t doneBytes = 0;
  int error = 0;
  std::vector<iovec> pieces;
  size_t firstPiece = 0;
  std::vector<IoPart> parts;

  // Account `count` bytes; true when there is nothing left to move.
  bool Advance(uint64_t count);
};
using IoTransferPtr = std::unique_ptr<IoTransfer>;

struct IoCompletion {
  double tag;
  double result;  // bytes moved, or a negative errno
};

// Moves transfers; calls `done` once for each from a thread of its own. The destructor waits for all of them.
class IoBackend {
 public:
  using Done = std::function<void(IoTransferPtr)>;
  virtual ~IoBackend() = default;
  virtual void Push(std::vector<IoTransferPtr> transfers) = 0;
};
// Both throw std::system_error when the kernel refuses them.
std::unique_ptr<IoBackend> MakeUringBackend(const Arena& arena, unsigned depth, IoBackend::Done done);
std::unique_ptr<IoBackend> MakeThreadBackend(unsigned threads, IoBackend::Done done);

struct IoOptions {
  std::string backend;  // "auto" | "io_uring" | "threads"
  unsigned depth;
  uint64_t ioBytes;
};

class IoQueue {
 public:
  // `wake` is called from a backend's thread whenever completions begin to wait; never twice without a Take between.
  IoQueue(std::shared_ptr<Arena> arena, IoOptions options, std::function<void()> wake);
  ~IoQueue() { Close(); }

  const std::string& backend() const { return backendName_; }
  const std::string& reason() const { return reason_; }
  const Arena& arena() const { return *arena_; }

  // Throws std::runtime_error("IO: ...").
  uint32_t OpenFile(const std::string& path, bool create, uint64_t bytes);
  // The two halves of it, for who opens elsewhere: the first on any thread. Throws SystemFailure.
  static std::shared_ptr<IoFile> Open(const std::string& path);
  uint32_t Adopt(std::shared_ptr<IoFile> file);
  // Null when there is no such file; it is closed with its last user.
  std::shared_ptr<IoFile> CloseFile(uint32_t number);
  std::shared_ptr<IoFile> File(uint32_t number) const;

  void Submit(std::vector<std::shared_ptr<IoRow>> rows);
  std::vector<IoCompletion> Take();
  // Tests only; see ioFault in binding.ts.
  void Fault(unsigned kinds, int error, bool hold);
  // Waits for everything in flight and closes all files. Callable from any thread when no other uses the queue any more.
  void Close();

 private:
  std::vector<IoTransferPtr> Plan(const std::vector<std::shared_ptr<IoRow>>& rows) const;
  void Finish(IoTransferPtr transfer);
  void End(IoTransferPtr transfer);
  // Also puts the sequence of an object that was read to 0: it is the disk's own.
  double ResultOf(const IoRow& row) const;

  std::shared_ptr<Arena> arena_;
  IoOptions options_;
  std::function<void()> wake_;
  std::string backendName_;
  std::string reason_;
  std::unordered_map<uint32_t, std::shared_ptr<IoFile>> files_;  // JavaScript thread only
  uint32_t nextFile_ = 1;
  std::mutex mutex_;
  std::vector<IoCompletion> completed_;
  std::atomic<unsigned> faultKinds_{0};  // bit 0 reads, bit 1 writes
  std::atomic<int> faultError_{0};
  bool holding_ = false;             // guarded by mutex_
  std::vector<IoTransferPtr> held_;  // guarded by mutex_
  std::unique_ptr<IoBackend> backend_;  // last: its destructor still delivers
};

}  // namespace kvtier
