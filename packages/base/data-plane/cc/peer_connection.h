// One data connection, either end, as a state machine without waiting: its loop tells it when the socket can be read or
// written, and it moves what it can.
//
//     kConnecting ──▶ kSecuring (TLS) ──▶ kHello ──▶ kUp ──▶ closed, by Close alone
//
// Nothing that arrives is trusted: lengths and tags are checked against what was asked for before a byte is placed.
#pragma once
#include <chrono>
#include <deque>
#include <unordered_map>
#include <vector>

#include "congestion.h"
#include "peer_loops.h"
#include "xxh3.h"

namespace kvtier {

using PeerClock = std::chrono::steady_clock;

class PeerConnection {
 public:
  PeerConnection(PeerLoops& loops, uint64_t number, int fd, bool server, std::vector<PeerEvent>& events);
  ~PeerConnection();
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  void StartClient(const PeerSession& session, const PeerKey& key);
  void StartServer();
  // The socket is ready. Afterwards: see closed(), wantsWrite(), hasMore().
  void OnReady(bool readable, bool writable);
  void OnTick(PeerClock::time_point now);
  void Fetch(const std::vector<PeerFetch>& fetches);
  void Answer(const std::vector<PeerAnswerRow>& rows);
  // Ends the socket first, then everything that it carried.
  void Close(PeerEnd why);
  // Of a client that has not proved itself: others take its place.
  void CloseStranger() {
    if (!closed() && !wasUp_) Close(PeerEnd::kTooMany);
  }

  int fd() const { return fd_; }
  bool closed() const { return fd_ < 0; }
  bool wantsWrite() const;
  // Bytes wait inside the transport: call OnReady again without epoll.
  bool hasMore() const { return fd_ >= 0 && more_; }
  const PeerSession& session() const { return session_; }
  bool isServer() const { return server_; }
  // It has proved itself.
  bool wasUp() const { return wasUp_; }

 private:
  enum class State { kConnecting, kSecuring, kHello, kUp };
  struct Pending {
    uint64_t slot;
    uint64_t slotBytes;
    PeerClock::time_point deadline;
    std::array<uint8_t, 64> identity;
  };
  // Head bytes, then an object out of the arena (server) or nothing.
  struct Out {
    std::vector<uint8_t> head;
    const uint8_t* body = nullptr;
    uint64_t bodyBytes = 0;
    uint64_t token = 0;
    uint64_t doneBytes = 0;
    uint64_t bytes() const { return head.size() + bodyBytes; }
  };

  void Advance();
  void Read();
  ssize_t FillStash();
  void Parse();
  bool ParseHello();
  bool ParseRequests();
  bool ParseReply();
  void TakeBody(const uint8_t* bytes, uint64_t count);
  void WarmUp(uint64_t offset);
  void EndBody();
  void Write();
  bool GoesByPages(const Out& out) const;
  bool SendBody();
  void Sent(uint64_t bytes);
  void Acknowledge();
  void Send(const void* bytes, size_t count);
  void Up();
  size_t stashed() const { return stashTo_ - stashFrom_; }
  const uint8_t* stash() const { return stash_.data() + stashFrom_; }

  PeerLoops& loops_;
  const uint64_t number_;
  int fd_;
  const bool server_;
  std::vector<PeerEvent>& events_;
  std::unique_ptr<PeerTransport> transport_;
  Congestion congestion_;
  State state_ = State::kConnecting;
  bool more_ = false;
  bool wasUp_ = false;
  const PeerClock::time_point began_ = PeerClock::now();
  PeerClock::time_point lastProgress_ = began_;
  PeerSession session_{};
  PeerKey key_{};
  PeerNonce clientNonce_{};
  PeerNonce serverNonce_{};
  bool answered_ = false;  // server: our answer is out, the proof is awaited
  std::vector<uint8_t> stash_;
  size_t stashFrom_ = 0;
  size_t stashTo_ = 0;
  std::deque<Out> out_;
  uint64_t sentBytes_ = 0;
  // Client: asked and not yet ended, by tag; and the one whose object is arriving.
  std::unordered_map<uint64_t, Pending> pending_;
  uint64_t bodyTag_ = 0;
  uint64_t bodyBytes_ = 0;  // 0: no object is arriving
  uint64_t bodyDone_ = 0;
  uint8_t* bodyAt_ = nullptr;
  uint8_t* nextAt_ = nullptr;  // where the object after it will go, as far as that is known
  uint64_t nextBytes_ = 0;
  XXH3_state_t checksum_;
  uint32_t received_ = 0;  // objects that the server has not been told of
  // Server: tags of what JavaScript has not answered yet, by token.
  std::unordered_map<uint64_t, uint64_t> asked_;
  // Server: tokens of objects that are out; their slots are still the kernel's until the client has them.
  std::deque<uint64_t> unreceived_;
};

}  // namespace kvtier
