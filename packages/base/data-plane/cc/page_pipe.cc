// See page_pipe.h.
#include "page_pipe.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

namespace kvtier {
namespace {

constexpr int kPipeBytes = 256 << 10;

}  // namespace

void PagePipe::BlockPipeSignal() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
}

PagePipe::~PagePipe() {
  for (const int end : ends_) {
    if (end >= 0) close(end);
  }
}

ssize_t PagePipe::Send(int socket, const uint8_t* at, uint64_t bytes, bool more) {
  if (ends_[0] < 0 && pipe2(ends_, O_NONBLOCK | O_CLOEXEC) != 0) return Refused();
  if (waiting_ == 0) {
    if (!sized_) fcntl(ends_[1], F_SETPIPE_SZ, kPipeBytes);  // where it is refused, a smaller one does
    sized_ = true;
    const iovec piece{const_cast<uint8_t*>(at), std::min<uint64_t>(bytes, kPipeBytes)};
    const ssize_t piped = vmsplice(ends_[1], &piece, 1, SPLICE_F_NONBLOCK);
    if (piped <= 0) return Refused();
    waiting_ = static_cast<uint64_t>(piped);
  }
  const unsigned hint = more || bytes > waiting_ ? SPLICE_F_MORE : 0u;
  const ssize_t moved = splice(ends_[0], nullptr, socket, nullptr, waiting_, SPLICE_F_NONBLOCK | hint);
  if (moved > 0) {
    waiting_ -= static_cast<uint64_t>(moved);
    return moved;
  }
  return moved < 0 && (errno == EAGAIN || errno == EINTR) ? kWait : kEnded;
}

ssize_t PagePipe::Refused() {
  usable_ = false;
  return kWait;
}

}  // namespace kvtier
