// The values of one server that no connection has taken yet, and what has become of those that one has. Of the loop's thread.
// Invariant: a group is told of once, when its last value has ended.
#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "piece_size.h"
#include "value_mover.h"

namespace kvtier {

struct MovedValue {
  struct Group {
    ValueGroup what;
    size_t open;  // values that have not ended
    std::vector<MoveResult> results;
    std::vector<std::string> errors;
  };
  std::shared_ptr<Group> group;
  size_t index;            // in it
  uint64_t sentBytes = 0;  // asked for, or put on its way
  unsigned open = 0;       // pieces that are not answered
  MoveResult result = MoveResult::kOk;
  std::string text;
  bool begun = false;

  bool isGet() const { return group->what.isGet; }
  const ValueMove& move() const { return group->what.moves[index]; }
  bool allSent() const { return begun && (sentBytes == move().bytes || result != MoveResult::kOk); }
};

class ValueQueue {
 public:
  ValueQueue(const ValueServer& server, std::vector<ValueEvent>& events) : server_(server), events_(events) {}

  const ValueServer& server() const { return server_; }
  void Add(ValueGroup group);
  // What `connection` is to move next: somebody waits for what is read, so it goes before what is written. One connection reads at
  // a time: a server that answers on several does more between two of its looks at other clients, and gains nothing.
  std::optional<MovedValue> Next(const void* connection);
  // Of a value that Next gave.
  void End(const MovedValue& value, MoveResult result);
  // What waits and belongs to this group is lost.
  void Drop(uint64_t tag);
  // A piece has been read; `more` are on their way.
  void Arrived(uint64_t bytes, bool more);
  // Whether others use this server, too: at first they do.
  void Share(bool is_shared) { size_.Share(is_shared); }
  // True: values wait for a connection that has fallen silent, and from now on another one reads.
  bool ChangeReader();
  bool waitsForReader() const { return reader_ != nullptr && !gets_.empty(); }
  // About how much to ask for at once.
  uint64_t pieceBytes() const { return size_.bytes(); }

 private:
  void Ended(const MovedValue& value, MoveResult result);

  const ValueServer server_;
  std::vector<ValueEvent>& events_;
  std::deque<MovedValue> gets_;
  std::deque<MovedValue> sets_;
  const void* reader_ = nullptr;
  size_t reading_ = 0;  // values that were taken and have not ended
  std::chrono::steady_clock::time_point lastProgress_;
  PieceSize size_{server_.pieceBytes};
  // While more is on its way.
  std::optional<std::chrono::steady_clock::time_point> lastArrival_;
};

}  // namespace kvtier
