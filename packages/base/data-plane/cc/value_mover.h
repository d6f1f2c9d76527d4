// The Redis data plane: values straight between arena slots and connections to servers, on a thread of its own.
//
//     JavaScript ──Connect──▶ connection ──login──▶ kReady          GETRANGE, SET ... XX: pieces of a value, a few at a time
//        ▲ kMoved              │ kDown       ▲
//        └──────────── a server's queue ─────┘  ◀──Move                              server ──▶ arena slot, checksum while it is hot in cache
//
// JavaScript decides what moves where and for how long; here bytes are moved, and an object that has arrived is verified.
// Values come in groups: JavaScript is woken once for a group, which on a busy machine costs as much as moving half a megabyte.
// Those of a server wait in one queue: any connection to it takes the next to be written when it has room, and one, as long as it is
// not silent, takes what is read (value_queue.h). Invariants: a slot is touched only between Move and its kMoved, or until Shut has returned; every Move gets
// one kMoved, in no order; values whose connection ends are lost; nothing that a server sends makes a buffer grow. Large values are
// sent by reference (page_pipe.h): the server's +OK says that their bytes were received, and a connection that ends with values in
// flight is reset, so that what the kernel still has of them goes nowhere.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"

namespace kvtier {

// The same numbers in packages/store/tiers/src/redis/native-pool.ts.
enum class ValueEventKind : int {
  kReady = 0,  // connection
  kDown = 1,   // connection; text: why
  kMoved = 2,  // tag; results: a MoveResult for each value; text: the server's error lines, of those that are kError
};
enum class MoveResult : int {
  kOk = 0,
  kNone = 1,    // no such key
  kLength = 2,  // not as long as it should be
  kFault = 3,   // arrived, and is not the object that it should be
  kError = 4,   // the server says no
  kLost = 5,    // no answer: its connection has ended, or its time was over
  kForeign = 6, // arrived, and is sound, but of a newer program: IsForeign of object_header.h
};

struct ValueEvent {
  ValueEventKind kind;
  double number;
  std::vector<MoveResult> results;
  std::string text;
};

// A value: `bytes` at `slot`, in keys `keys`0, `keys`1 ... of `partBytes` each. Zero bytes ask for key 0, which is 'none'.
struct ValueMove {
  std::string keys;
  uint64_t slot;
  uint64_t bytes;
  uint64_t partBytes;
  std::array<uint8_t, 64> identity;  // get: namespace digest and hash that the object must have
};

// Values that go one way and are told of together.
struct ValueGroup {
  uint64_t tag;
  bool isGet;
  std::vector<ValueMove> moves;
};

// How all connections to a server are used.
struct ValueServer {
  std::string login;      // sent first
  unsigned loginReplies;  // +OK's that it is answered with
  unsigned depth;         // commands in flight
  uint64_t pieceBytes;    // of one GETRANGE, at first
};

class ValueLoop;

class ValueMover {
 public:
  // `wake` is called from the loop's thread whenever events begin to wait; never twice without a Take between.
  ValueMover(std::shared_ptr<Arena> arena, std::function<void()> wake);
  ~ValueMover();

  // A number for a server: a queue, and no connection yet.
  uint64_t Open(const ValueServer& server);
  // The number of a connection that will be kReady or kDown. `host`: an address literal, or the path of a Unix socket. Throws
  // std::runtime_error when it is neither.
  uint64_t Connect(uint64_t server, const std::string& host, uint16_t port);
  void Move(uint64_t server, ValueGroup group);
  // Whether others use that server, too: what is read comes in smaller pieces then. At first they do.
  void Share(uint64_t server, bool is_shared);
  // Time is over for what is left of a group: what waits is lost, and so are the connections that carry some of it (kDown).
  void Expire(uint64_t server, uint64_t tag);
  // Its socket is closed when this returns; what it carried is lost; there will be no kDown.
  void Disconnect(uint64_t connection);
  // The end of a server: nothing moves any more when this returns. What has not ended, has now, and no event says so.
  void Shut(uint64_t server);
  std::vector<ValueEvent> Take();
  // Ends every connection, then the thread.
  void Close();

  Arena& arena() { return *arena_; }
  void Emit(std::vector<ValueEvent>&& events);

 private:
  // Done by the loop when this returns.
  void Do(std::function<void()> work);

  std::shared_ptr<Arena> arena_;
  std::function<void()> wake_;
  uint64_t nextNumber_ = 1;
  std::mutex mutex_;
  std::vector<ValueEvent> events_;
  std::unique_ptr<ValueLoop> loop_;
};

}  // namespace kvtier
