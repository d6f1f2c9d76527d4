// Memory to a socket by reference: pages go through a pipe (vmsplice, splice) into the socket's queue, and are copied nowhere on
// this side. Half of what sendfile() costs out of a shared-memory file, where each page is looked up.
//
// The memory may not change until the peer has received it. Who lets go of it earlier must drop what the socket still has to
// send (SO_LINGER of 0 seconds), else others' bytes go out.
#pragma once
#include <sys/types.h>

#include <cstdint>

namespace kvtier {

// What a read or write moved: > 0 bytes; kWait: nothing now; kEnded: the connection is over.
inline constexpr ssize_t kWait = 0;
inline constexpr ssize_t kEnded = -1;

class PagePipe {
 public:
  // From this size on, an object is cheaper to send by reference; below, one copying call for several of them is (between peers, 16 KiB
  // to 256 KiB: 3.3 to 2.0 GB/s, 7.0 to 5.5, 7.5 to 7.2, 7.3 to 7.9).
  static constexpr uint64_t kFromBytes = 128 << 10;

  PagePipe() = default;
  ~PagePipe();
  PagePipe(const PagePipe&) = delete;
  PagePipe& operator=(const PagePipe&) = delete;

  // To be called by a thread that sends: splice() knows no MSG_NOSIGNAL.
  static void BlockPipeSignal();
  // False once this kernel, or this kind of socket, has refused: then bytes are to be copied.
  bool usable() const { return usable_; }
  // Never blocks. What was not moved must be what is sent next. `more`: a few bytes follow at once, in the same segment.
  ssize_t Send(int socket, const uint8_t* at, uint64_t bytes, bool more = false);

 private:
  ssize_t Refused();

  bool usable_ = true;
  bool sized_ = false;
  int ends_[2] = {-1, -1};
  uint64_t waiting_ = 0;  // in the pipe, of what Send was given last
};

}  // namespace kvtier
