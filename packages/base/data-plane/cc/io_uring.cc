// The io_uring backend. One thread owns the ring: it alone submits and reaps, so the ring needs no lock and the kernel may
// skip its own (SINGLE_ISSUER, DEFER_TASKRUN). Others hand it transfers through a queue and an eventfd.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <future>
#include <limits.h>
#include <system_error>
#include <thread>

#include "io_queue.h"

namespace kvtier {
namespace {

// The kernel takes no larger registered buffer.
constexpr uint64_t kRegisteredPieceBytes = uint64_t{1} << 30;

class UringBackend final : public IoBackend {
 public:
  UringBackend(const Arena& arena, unsigned depth, Done done)
      : base_(arena.base()), bytes_(arena.bytes()), depth_(depth), done_(std::move(done)), wakeFd_(eventfd(0, EFD_CLOEXEC)) {
    if (wakeFd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    std::promise<int> ready;
    auto started = ready.get_future();
    try {
      thread_ = std::thread([this, &ready] { Run(ready); });
    } catch (...) {
      close(wakeFd_);
      throw;
    }
    if (const int error = started.get(); error != 0) {
      thread_.join();
      close(wakeFd_);
      throw std::system_error(error, std::generic_category(), "io_uring_setup");
    }
  }

  ~UringBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    Wake();
    thread_.join();
    close(wakeFd_);
  }

  void Push(std::vector<IoTransferPtr> transfers) override {
    bool wake;
    {
      const std::lock_guard lock(mutex_);
      wake = arrived_.empty();
      for (auto& transfer : transfers) arrived_.push_back(std::move(transfer));
    }
    if (wake) Wake();
  }

 private:
  void Wake() const {
    const uint64_t one = 1;
    while (write(wakeFd_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  // The ring belongs to the thread that makes it.
  int Setup() {
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN;
    int error = io_uring_queue_init_params(depth_ + 1, &ring_, &params);
    if (error == -EINVAL) {  // kernels before 6.1
      params = {};
      error = io_uring_queue_init_params(depth_ + 1, &ring_, &params);
    }
    if (error < 0) return -error;
    std::vector<iovec> pieces;
    for (uint64_t from = 0; from < bytes_; from += kRegisteredPieceBytes) {
      pieces.push_back({base_ + from, std::min(kRegisteredPieceBytes, bytes_ - from)});
    }
    // Refused under a small RLIMIT_MEMLOCK: the kernel then pins pages per transfer, which is only a little slower.
    registered_ = io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size())) == 0;
    return 0;
  }

  void Run(std::promise<int>& ready) {
    const int error = Setup();
    ready.set_value(error);  // `ready` is gone after this
    if (error != 0) return;
    std::vector<IoTransferPtr> ended;
    for (bool stopping = false;;) {
      {
        const std::lock_guard lock(mutex_);
        for (auto& transfer : arrived_) waiting_.push_back(std::move(transfer));
        arrived_.clear();
        stopping = stopping_;
      }
      Fill();
      if (stopping && inFlight_ == 0 && waiting_.empty() && ended.empty()) break;
      if (ended.empty()) {
        io_uring_submit_and_wait(&ring_, 1);
      } else {
        // The device works on what was just submitted while this thread verifies what has come in.
        io_uring_submit(&ring_);
        for (auto& transfer : ended) done_(std::move(transfer));
        ended.clear();
        continue;
      }
      io_uring_cqe* cqe;
      unsigned head;
      unsigned count = 0;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++count;
        Reap(*cqe, ended);
      }
      io_uring_cq_advance(&ring_, count);
    }
    io_uring_queue_exit(&ring_);
  }

  void Fill() {
    if (!wakeArmed_) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) return;
      io_uring_prep_read(sqe, wakeFd_, &wakeValue_, sizeof(wakeValue_), 0);
      io_uring_sqe_set_data(sqe, nullptr);
      wakeArmed_ = true;
    }
    while (inFlight_ < depth_ && !waiting_.empty()) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) return;
      IoTransfer* transfer = waiting_.front().release();
      waiting_.pop_front();
      Prepare(sqe, *transfer);
      io_uring_sqe_set_data(sqe, transfer);
      ++inFlight_;
    }
  }

  void Prepare(io_uring_sqe* sqe, IoTransfer& transfer) const {
    const int fd = transfer.file->fd;
    const uint64_t offset = transfer.fileOffset + transfer.doneBytes;
    iovec* pieces = transfer.pieces.data() + transfer.firstPiece;
    const auto count = static_cast<unsigned>(transfer.pieces.size() - transfer.firstPiece);
    const auto* piece = static_cast<const uint8_t*>(pieces->iov_base);
    const uint64_t from = static_cast<uint64_t>(piece - base_);
    const uint64_t index = from / kRegisteredPieceBytes;
    const auto bytes = static_cast<unsigned>(pieces->iov_len);
    const bool inArena = piece >= base_ && piece < base_ + bytes_;
    if (registered_ && count == 1 && inArena && (from + bytes - 1) / kRegisteredPieceBytes == index) {
      if (transfer.write) io_uring_prep_write_fixed(sqe, fd, pieces->iov_base, bytes, offset, static_cast<int>(index));
      else io_uring_prep_read_fixed(sqe, fd, pieces->iov_base, bytes, offset, static_cast<int>(index));
    } else if (transfer.write) {
      io_uring_prep_writev(sqe, fd, pieces, count, offset);
    } else {
      io_uring_prep_readv(sqe, fd, pieces, count, offset);
    }
  }

  void Reap(const io_uring_cqe& cqe, std::vector<IoTransferPtr>& ended) {
    IoTransferPtr transfer(static_cast<IoTransfer*>(io_uring_cqe_get_data(&cqe)));
    if (!transfer) {
      wakeArmed_ = false;
      return;
    }
    --inFlight_;
    if (cqe.res == -EINTR || cqe.res == -EAGAIN) {
      waiting_.push_front(std::move(transfer));
    } else if (cqe.res < 0) {
      transfer->error = -cqe.res;
      ended.push_back(std::move(transfer));
    } else if (cqe.res == 0 || transfer->Advance(static_cast<uint64_t>(cqe.res))) {
      ended.push_back(std::move(transfer));  // end of file, or all of it
    } else {
      waiting_.push_front(std::move(transfer));
    }
  }

  uint8_t* base_;
  uint64_t bytes_;
  unsigned depth_;
  Done done_;
  int wakeFd_;
  io_uring ring_{};
  bool registered_ = false;
  bool wakeArmed_ = false;
  uint64_t wakeValue_ = 0;
  unsigned inFlight_ = 0;
  std::deque<IoTransferPtr> waiting_;
  std::mutex mutex_;
  std::vector<IoTransferPtr> arrived_;  // guarded by mutex_
  bool stopping_ = false;               // guarded by mutex_
  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoBackend> MakeUringBackend(const Arena& arena, unsigned depth, IoBackend::Done done) {
  return std::make_unique<UringBackend>(arena, depth, std::move(done));
}

}  // namespace kvtier
