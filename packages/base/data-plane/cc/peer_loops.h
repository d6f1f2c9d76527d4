// The peer data plane: objects straight out of one node's arena into another's, over TCP connections ("streams").
//
//     JavaScript ──Fetch──▶ connection ──requests──▶ peer's connection ──kRequest──▶ JavaScript (finds, pins, loads)
//        ▲ kFetched              ◀──── reply + object ────        ◀──Answer── slots      ▲ kSent: the slot is its own again
//
// A few loops, each a thread with an epoll; a connection lives in one of them and is touched by no other thread.
// Invariants: a slot given to Fetch is written only until its kFetched event, and one that ends without a whole verified
// object is reported after its connection was closed, or after all its bytes went by; every fetch gets exactly one kFetched,
// every answer with a slot exactly one kSent; nothing that a peer sends makes more than a bounded buffer grow.
// Loops with mailboxes: after Seastar's shards.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "peer_auth.h"
#include "peer_transport.h"

namespace kvtier {

// Rows of 4 numbers for JavaScript. The same numbers in packages/store/tiers/src/peer/peer-loops.ts.
enum class PeerEventKind : int {
  kFetched = 0,   // tag, PeerResult
  kRequest = 1,   // token, connection, slotBytes; its identity beside
  kSent = 2,      // token, 1 when the peer has received all of it
  kUp = 3,        // connection that we opened
  kDown = 4,      // connection that we opened, PeerEnd
  kRefused = 5,   // connection that a peer opened, PeerEnd: only when it broke the rules
};
enum class PeerResult : int { kReady = 0, kMissing = 1, kFailed = 2, kCorrupt = 3 };
enum class PeerEnd : int { kEnded = 0, kUnauthenticated = 1, kProtocol = 2, kTimeLimit = 3, kTooMany = 4 };

struct PeerEvent {
  PeerEventKind kind;
  double a = 0;
  double b = 0;
  double c = 0;
  std::array<uint8_t, 64> identity{};
};

struct PeerFetch {
  uint64_t tag;
  uint64_t slot;
  uint64_t slotBytes;
  uint64_t limitMs;  // from now on
  std::array<uint8_t, 64> identity;
};
struct PeerAnswerRow {
  uint64_t token;
  PeerStatus status;
  uint64_t slot;
  uint64_t objectBytes;
};

struct PeerOptions {
  unsigned threads;
  bool tls;
  unsigned maxConnections;  // that peers may open
  unsigned maxStrangers;    // besides, those that have not proved themselves yet; who comes beyond takes the oldest one's place
  uint64_t stallMs;         // handshakes, half a frame, bytes that nobody takes
};

class PeerLoop;

class PeerLoops {
 public:
  // `wake` is called from a loop's thread whenever events begin to wait; never twice without a Take between.
  PeerLoops(std::shared_ptr<Arena> arena, PeerOptions options, std::function<void()> wake);
  ~PeerLoops();

  // Address literals only. Returns the port. Throws std::runtime_error("IO: ...").
  uint16_t Listen(const std::string& host, uint16_t port);
  PeerSessions& sessions() { return sessions_; }
  // End the connections of a session; what they carried fails.
  void Revoke(const PeerSession& session);
  // The number of a connection that will be kUp or kDown. Throws std::runtime_error when the address is none.
  uint64_t Connect(const std::string& host, uint16_t port, const PeerSession& session, const PeerKey& key);
  void Disconnect(uint64_t connection);
  void Fetch(uint64_t connection, std::vector<PeerFetch> fetches);
  void Answer(uint64_t connection, std::vector<PeerAnswerRow> rows);
  std::vector<PeerEvent> Take();
  // Ends every connection, then the threads. Their last events are there to Take.
  void Close();

  Arena& arena() { return *arena_; }
  const PeerOptions& options() const { return options_; }
  PeerTls* tls() { return tls_.get(); }
  PeerLoop& LoopOf(uint64_t connection) { return *loops_[connection % loops_.size()]; }
  uint64_t NextNumber() { return nextNumber_++; }
  void Emit(std::vector<PeerEvent>&& events);
  // Connections that were accepted, and those of them that proved themselves.
  std::atomic<unsigned> accepted{0};
  std::atomic<unsigned> proven{0};

 private:
  std::shared_ptr<Arena> arena_;
  PeerOptions options_;
  std::function<void()> wake_;
  PeerSessions sessions_;
  std::unique_ptr<PeerTls> tls_;
  std::atomic<uint64_t> nextNumber_{16};  // smaller ones name what is no connection
  std::mutex mutex_;
  std::vector<PeerEvent> events_;
  std::vector<std::unique_ptr<PeerLoop>> loops_;
};

}  // namespace kvtier
