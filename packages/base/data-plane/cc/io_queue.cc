// Planning of transfers and completion of rows; see io_queue.h.
#include "io_queue.h"

#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "background.h"
#include "object_header.h"

namespace kvtier {

IoFile::~IoFile() { close(fd); }

bool IoTransfer::Advance(uint64_t count) {
  doneBytes += count;
  while (count > 0) {
    iovec& piece = pieces[firstPiece];
    const uint64_t step = std::min<uint64_t>(count, piece.iov_len);
    piece.iov_base = static_cast<uint8_t*>(piece.iov_base) + step;
    piece.iov_len -= step;
    count -= step;
    if (piece.iov_len == 0) firstPiece++;
  }
  return doneBytes == bytes;
}

IoQueue::IoQueue(std::shared_ptr<Arena> arena, IoOptions options, std::function<void()> wake)
    : arena_(std::move(arena)), options_(std::move(options)), wake_(std::move(wake)) {
  const auto done = [this](IoTransferPtr transfer) { Finish(std::move(transfer)); };
  if (options_.backend != "threads") {
    try {
      backend_ = MakeUringBackend(*arena_, options_.depth, done);
      backendName_ = "io_uring";
      return;
    } catch (const std::system_error& error) {
      if (options_.backend == "io_uring") {
        throw std::runtime_error(std::string("SETUP: io_uring is refused by the kernel (") + error.what() +
                                 "); use the backend \"auto\" or \"threads\"");
      }
      reason_ = std::string("io_uring is refused: ") + error.what();
    }
  } else {
    reason_ = "asked for";
  }
  backend_ = MakeThreadBackend(std::min(options_.depth, 16u), done);
  backendName_ = "threads";
}

uint32_t IoQueue::OpenFile(const std::string& path, bool create, uint64_t bytes) {
  const int flags = O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_EXCL : 0);
  const int fd = open(path.c_str(), flags, 0600);
  if (fd < 0) throw std::runtime_error("IO: " + path + ": cannot be opened (" + std::strerror(errno) + ")");
  auto file = std::make_shared<IoFile>(fd);
  if (create) {
    int error;
    do {
      error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0) {
      unlink(path.c_str());
      throw std::runtime_error("IO: " + path + ": no space for " + std::to_string(bytes) + " bytes (" +
                               std::strerror(error) + ")");
    }
  }
  files_[nextFile_] = std::move(file);
  return nextFile_++;
}

std::shared_ptr<IoFile> IoQueue::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) throw SystemFailure("IO: " + path + ": cannot be opened (" + std::strerror(errno) + ")", errno);
  return std::make_shared<IoFile>(fd);
}

uint32_t IoQueue::Adopt(std::shared_ptr<IoFile> file) {
  files_[nextFile_] = std::move(file);
  return nextFile_++;
}

std::shared_ptr<IoFile> IoQueue::CloseFile(uint32_t number) {
  auto node = files_.extract(number);
  return node.empty() ? nullptr : std::move(node.mapped());
}

std::shared_ptr<IoFile> IoQueue::File(uint32_t number) const {
  const auto found = files_.find(number);
  return found == files_.end() ? nullptr : found->second;
}

void IoQueue::Submit(std::vector<std::shared_ptr<IoRow>> rows) {
  if (!backend_) throw std::runtime_error("the I/O queue is closed");
  if (!rows.empty()) backend_->Push(Plan(rows));
}

std::vector<IoTransferPtr> IoQueue::Plan(const std::vector<std::shared_ptr<IoRow>>& rows) const {
  std::vector<IoTransferPtr> transfers;
  for (size_t first = 0; first < rows.size();) {
    // A run: rows of one kind and file, each beginning where the one before it ends.
    size_t last = first + 1;
    uint64_t runBytes = rows[first]->bytes;
    for (; last < rows.size(); ++last) {
      const IoRow &before = *rows[last - 1], &row = *rows[last];
      const bool sameWay = (row.kind == IoKind::kWrite) == (before.kind == IoKind::kWrite);
      if (!sameWay || row.file != before.file || row.fileOffset != before.fileOffset + before.bytes) break;
      runBytes += row.bytes;
    }
    const uint64_t count = std::max<uint64_t>(1, (runBytes + options_.ioBytes / 2) / options_.ioBytes);
    const uint64_t share = (runBytes / kSlotAlignment + count - 1) / count * kSlotAlignment;
    IoTransferPtr transfer;
    for (size_t i = first; i < last; ++i) {
      IoRow& row = *rows[i];
      for (uint64_t from = 0; from < row.bytes;) {
        if (transfer && (transfer->bytes == share || transfer->pieces.size() == IOV_MAX)) {
          transfers.push_back(std::move(transfer));
        }
        if (!transfer) {
          transfer = std::make_unique<IoTransfer>();
          transfer->write = row.kind == IoKind::kWrite;
          transfer->file = row.file;
          transfer->fileOffset = row.fileOffset + from;
        }
        const bool isFirst = row.firstPage && from < kSlotAlignment;
        const uint64_t end = isFirst ? kSlotAlignment : row.bytes;
        const uint64_t bytes = std::min(end - from, share - transfer->bytes);
        uint8_t* data = (isFirst ? row.firstPage.get() : arena_->base() + row.arenaOffset) + from;
        auto& pieces = transfer->pieces;
        if (!pieces.empty() && static_cast<uint8_t*>(pieces.back().iov_base) + pieces.back().iov_len == data) {
          pieces.back().iov_len += bytes;
        } else {
          pieces.push_back({data, bytes});
        }
        if (!transfer->parts.empty() && transfer->parts.back().row == rows[i]) {
          transfer->parts.back().bytes += bytes;
        } else {
          transfer->parts.push_back({rows[i], bytes});
          row.openParts.fetch_add(1, std::memory_order_relaxed);
        }
        transfer->bytes += bytes;
        from += bytes;
      }
    }
    transfers.push_back(std::move(transfer));
    first = last;
  }
  return transfers;
}

double IoQueue::ResultOf(const IoRow& row) const {
  if (const int error = row.error.load(); error != 0) return -error;
  const uint64_t moved = row.movedBytes.load();
  if (row.kind != IoKind::kReadVerified || moved < row.bytes) return static_cast<double>(moved);
  ObjectHeader header;
  uint8_t* object = arena_->base() + row.arenaOffset;
  const HeaderFault fault = VerifyObject(object, row.bytes, row.identity.data(), row.identity.data() + 32, &header);
  if (IsForeign(fault)) return -EPROTONOSUPPORT;
  if (fault != HeaderFault::kNone || SlotBytesFor(header.payloadBytes) != row.bytes) return -EBADMSG;
  if (header.sequence != 0) {
    header.sequence = 0;
    header.headerChecksum = HeaderChecksum(header);
    std::memcpy(object, &header, sizeof(header));
  }
  return static_cast<double>(moved);
}

void IoQueue::Fault(unsigned kinds, int error, bool hold) {
  faultError_.store(error);
  faultKinds_.store(kinds);
  std::vector<IoTransferPtr> released;
  {
    const std::lock_guard lock(mutex_);
    holding_ = hold;
    if (!hold) released.swap(held_);
  }
  for (auto& transfer : released) End(std::move(transfer));
}

void IoQueue::Finish(IoTransferPtr transfer) {
  if (const unsigned kinds = faultKinds_.load(); kinds != 0 && (kinds & (transfer->write ? 2u : 1u)) != 0) {
    if (faultError_.load() != 0) {
      transfer->error = faultError_.load();
      transfer->doneBytes = 0;
    }
    const std::lock_guard lock(mutex_);
    if (holding_) {
      held_.push_back(std::move(transfer));
      return;
    }
  }
  End(std::move(transfer));
}

void IoQueue::End(IoTransferPtr transfer) {
  std::vector<IoCompletion> ended;
  uint64_t done = transfer->doneBytes;
  for (const IoPart& part : transfer->parts) {
    const uint64_t moved = std::min(done, part.bytes);
    done -= moved;
    part.row->movedBytes.fetch_add(moved);
    if (moved < part.bytes && transfer->error != 0) part.row->error.store(transfer->error);
    if (part.row->openParts.fetch_sub(1) == 1) ended.push_back({part.row->tag, ResultOf(*part.row)});
  }
  if (ended.empty()) return;
  bool first;
  {
    const std::lock_guard lock(mutex_);
    first = completed_.empty();
    completed_.insert(completed_.end(), ended.begin(), ended.end());
  }
  if (first) wake_();
}

std::vector<IoCompletion> IoQueue::Take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(completed_, {});
}

void IoQueue::Close() {
  backend_.reset();
  files_.clear();
}

}  // namespace kvtier
