// One connection to a Redis server that moves values and nothing else: a minimal RESP2 writer and reader, as a state machine
// without waiting.
//
//     SET   arena          ─┐ (by reference where large)  "$N\r\n" ─▶ stash (128 bytes)
//           "..XX\r\n"     ─┼─ one sendmsg   GETRANGE      N bytes ─▶ arena      ┐ one readv
//           next "*4..$N\r\n" ─┘                     "\r\n$N\r\n" ─▶ stash      ┘
//
// Values are taken from the server's queue one after the other, and answered so; pieces of the next follow those of the last without a pause. What is not
// understood ends the connection: there is no resynchronising.
//
// A part is announced (its SET up to the length) behind the part before, and its bytes follow when that one was answered: a server
// that finds bytes of a value behind its announcement in one read moves them in memory once more (readQueryFromClient reads as
// much as the last value had, processMultibulkBuffer then aligns it), which costs it as much as a sixth of its time.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "value_queue.h"
#include "congestion.h"
#include "page_pipe.h"
#include "xxh3.h"

namespace kvtier {

class ValueConnection {
 public:
  ValueConnection(Arena& arena, uint64_t number, int fd, std::shared_ptr<ValueQueue> queue, std::vector<ValueEvent>& events);
  ~ValueConnection() { End(); }
  ValueConnection(const ValueConnection&) = delete;
  ValueConnection& operator=(const ValueConnection&) = delete;

  // The socket is ready. Afterwards: see closed() and wantsWrite().
  void OnReady(bool readable, bool writable);
  // There is more in the queue.
  void Serve();
  void Close(const std::string& why);
  // What it carries is lost; nothing is touched any more.
  void End();

  const ValueQueue& queue() const { return *queue_; }
  bool Carries(uint64_t tag) const;
  int fd() const { return fd_; }
  bool closed() const { return fd_ < 0; }
  bool wantsWrite() const { return connecting_ || !out_.empty(); }

 private:
  struct Piece {
    uint64_t at;  // in the object
    uint64_t bytes;
  };
  struct Out {
    std::string head;
    const uint8_t* body = nullptr;  // of a SET, and its tail
    uint64_t bodyBytes = 0;
    uint64_t doneBytes = 0;  // of all three
    uint64_t bytes() const;
  };

  void Connected();
  void Pump();
  void SendPiece(MovedValue& value);
  void Write();
  bool GoesByPages(const Out& out) const;
  bool SendBody();
  void Sent(uint64_t bytes);
  void Read();
  void Parse();
  bool ParseLine(const char* line, size_t count);
  void BeginBody(uint64_t bytes);
  void Filled(uint64_t bytes);
  void EndPiece(MoveResult result, std::string text = {});
  void EndValues();
  MoveResult Verified(const MovedValue& value);

  Arena& arena_;
  const uint64_t number_;
  int fd_;
  const std::shared_ptr<ValueQueue> queue_;
  const ValueServer& server_;  // the queue's
  std::vector<ValueEvent>& events_;
  bool connecting_ = true;
  Congestion congestion_;
  unsigned logins_ = 0;     // replies still to come
  std::deque<MovedValue> values_;  // the first is being answered
  size_t sending_ = 0;        // index of the value whose pieces are sent next
  std::deque<Piece> pieces_;  // sent and not answered
  std::deque<Out> out_;
  PagePipe pages_;
  // Bytes of a part that is announced, the last of pieces_. Nothing else is sent before them.
  std::optional<Out> held_;
  std::array<char, 128> stash_;
  size_t stashed_ = 0;
  std::string line_;  // protocol text without its end yet
  // The value that is arriving.
  uint8_t* bodyAt_ = nullptr;  // null: to be dropped
  uint64_t bodyLeft_ = 0;
  unsigned tailLeft_ = 0;  // of "\r\n" behind it
  MoveResult bodyIs_ = MoveResult::kOk;
  XXH3_state_t checksum_;
};

}  // namespace kvtier
