// The I/O backend for kernels that refuse io_uring (containers' default seccomp profile): preadv and pwritev on threads.
#include <sys/uio.h>

#include <cerrno>
#include <deque>
#include <limits.h>
#include <thread>

#include "io_queue.h"
#include "no_thread.h"

namespace kvtier {
namespace {

class ThreadBackend final : public IoBackend {
 public:
  ThreadBackend(unsigned threads, Done done) : done_(std::move(done)) {
    try {
      for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
    } catch (const std::system_error& error) {
      if (threads_.empty()) throw std::runtime_error(NoThread(error));  // fewer do it, too, more slowly
    }
  }

  ~ThreadBackend() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void Push(std::vector<IoTransferPtr> transfers) override {
    const bool one = transfers.size() == 1;
    {
      const std::lock_guard lock(mutex_);
      for (auto& transfer : transfers) queue_.push_back(std::move(transfer));
    }
    if (one) changed_.notify_one();
    else changed_.notify_all();
  }

 private:
  void Work() {
    for (;;) {
      IoTransferPtr transfer;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;  // stopping, and everything has been taken
        transfer = std::move(queue_.front());
        queue_.pop_front();
      }
      Move(*transfer);
      done_(std::move(transfer));
    }
  }

  static void Move(IoTransfer& transfer) {
    for (;;) {
      const iovec* pieces = transfer.pieces.data() + transfer.firstPiece;
      const int count = static_cast<int>(transfer.pieces.size() - transfer.firstPiece);
      const auto offset = static_cast<off_t>(transfer.fileOffset + transfer.doneBytes);
      const ssize_t moved = transfer.write ? pwritev(transfer.file->fd, pieces, count, offset)
                                           : preadv(transfer.file->fd, pieces, count, offset);
      if (moved < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (moved < 0) transfer.error = errno;
      if (moved <= 0 || transfer.Advance(static_cast<uint64_t>(moved))) return;  // error, end of file, or all of it
    }
  }

  Done done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<IoTransferPtr> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoBackend> MakeThreadBackend(unsigned threads, IoBackend::Done done) {
  return std::make_unique<ThreadBackend>(threads, std::move(done));
}

}  // namespace kvtier
