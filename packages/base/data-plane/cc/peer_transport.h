// The bytes of one data connection: plain TCP, or TLS 1.3 over it with the session's key as pre-shared key (RFC 8446, 2.2),
// so that certificates are looked at in one place only, on the control connection.
//
// Invariant: never blocks. A transport belongs to one loop's thread.
#pragma once
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

#include "page_pipe.h"
#include "peer_auth.h"

namespace kvtier {

class PeerTransport {
 public:
  virtual ~PeerTransport() = default;
  // 1: ready for bytes; kWait; kEnded.
  virtual ssize_t Handshake() = 0;
  virtual ssize_t Read(const iovec* pieces, int count) = 0;
  // `more`: other bytes follow at once, so that the kernel may wait for them before it fills a segment.
  virtual ssize_t Write(const iovec* pieces, int count, bool more) = 0;
  // Whether SendPages may be used in place of Write.
  virtual bool SendsPages() const { return false; }
  // See page_pipe.h.
  virtual ssize_t SendPages(const uint8_t*, uint64_t) { return kEnded; }
  // Bytes that were read off the socket and wait inside: epoll will not tell of them.
  virtual bool HasBuffered() const { return false; }
  // Handshake, write or Flush can go on only when the socket takes bytes.
  virtual bool WantsWrite() const { return false; }
  // Sends what was written and kept, as far as the socket takes it. False: the connection is over.
  virtual bool Flush() { return true; }
};

// What TLS connections of one loops share. The key of a connection is found by session, on the server's side in `sessions`.
class PeerTls {
 public:
  // Throws std::runtime_error("SETUP: ...").
  explicit PeerTls(const PeerSessions* sessions);
  ~PeerTls();
  PeerTls(const PeerTls&) = delete;
  PeerTls& operator=(const PeerTls&) = delete;
  std::unique_ptr<PeerTransport> Server(int fd);
  std::unique_ptr<PeerTransport> Client(int fd, const PeerSession& session, const PeerKey& key);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
};

std::unique_ptr<PeerTransport> PlainTransport(int fd);

}  // namespace kvtier
