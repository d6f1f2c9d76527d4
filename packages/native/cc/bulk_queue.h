// The values of one server that no connection has taken yet, and what has become of those that one has. Of the loop's thread.
// Invariant: a group is told of once, when its last value has ended.
#pragma once
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
  // What to move next: somebody waits for what is read, so it goes before what is written.
  std::optional<BulkValue> Next();
  void End(const BulkValue& value, BulkResult result);
  // What waits and belongs to this group is lost.
  void Drop(uint64_t tag);

 private:
  const BulkServer server_;
  std::vector<BulkEvent>& events_;
  std::deque<BulkValue> gets_;
  std::deque<BulkValue> sets_;
};

}  // namespace kvtier
