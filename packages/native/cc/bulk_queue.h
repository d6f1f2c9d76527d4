// The values of one server that no connection has taken yet, and what has become of those that one has. Of the loop's thread.
// Invariant: a group is told of once, when its last value has ended.
#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bulk_engine.h"

namespace kvtier {

struct BulkValue {
  struct Group {
    BulkGroup what;
    size_t open;  // values that have not ended
    std::vector<BulkResult> results;
    std::vector<std::string> errors;
  };
  std::shared_ptr<Group> group;
  size_t index;            // in it
  uint64_t sentBytes = 0;  // asked for, or put on its way
  unsigned open = 0;       // pieces that are not answered
  BulkResult result = BulkResult::kOk;
  std::string text;
  bool begun = false;

  bool isGet() const { return group->what.isGet; }
  const BulkMove& move() const { return group->what.moves[index]; }
  bool allSent() const { return begun && (sentBytes == move().bytes || result != BulkResult::kOk); }
};

class BulkQueue {
 public:
  BulkQueue(const BulkServer& server, std::vector<BulkEvent>& events) : server_(server), events_(events) {}

  const BulkServer& server() const { return server_; }
  void Add(BulkGroup group);
  // What `connection` is to move next: somebody waits for what is read, so it goes before what is written. One connection reads at
  // a time: a server that answers on several does more between two of its looks at other clients, and gains nothing.
  std::optional<BulkValue> Next(const void* connection);
  // Of a value that Next gave.
  void End(const BulkValue& value, BulkResult result);
  // What waits and belongs to this group is lost.
  void Drop(uint64_t tag);
  // A piece has been read; `more` are on their way.
  void Arrived(uint64_t bytes, bool more);
  // True: values wait for a connection that has fallen silent, and from now on another one reads.
  bool ChangeReader();
  bool waitsForReader() const { return reader_ != nullptr && !gets_.empty(); }
  // About how much to ask for at once: what a server gives in 75 us, so that others wait for no longer, 1 to 4 times
  // server().pieceBytes. Larger pieces are cheaper for it: 128 KiB cost a fast one a third more than 512 KiB.
  uint64_t pieceBytes() const { return pieceBytes_; }

 private:
  void Ended(const BulkValue& value, BulkResult result);

  const BulkServer server_;
  std::vector<BulkEvent>& events_;
  std::deque<BulkValue> gets_;
  std::deque<BulkValue> sets_;
  const void* reader_ = nullptr;
  size_t reading_ = 0;  // values that were taken and have not ended
  std::chrono::steady_clock::time_point lastProgress_;
  uint64_t pieceBytes_ = server_.pieceBytes;
  // Since pieceBytes_ was last set: what arrived while more was on its way, and how long that took.
  uint64_t arrivedBytes_ = 0;
  std::chrono::steady_clock::duration arriving_{};
  std::optional<std::chrono::steady_clock::time_point> lastArrival_;
};

}  // namespace kvtier
