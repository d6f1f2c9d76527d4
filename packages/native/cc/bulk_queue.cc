// See bulk_queue.h.
#include "bulk_queue.h"

#include <utility>

namespace kvtier {

void BulkQueue::Add(BulkGroup what) {
  const size_t count = what.moves.size();
  auto& list = what.isGet ? gets_ : sets_;
  const auto group = std::make_shared<BulkValue::Group>();
  group->what = std::move(what);
  group->open = count;
  group->results.resize(count);
  group->errors.resize(count);
  for (size_t i = 0; i < count; ++i) {
    list.push_back({});
    list.back().group = group;
    list.back().index = i;
  }
}

std::optional<BulkValue> BulkQueue::Next() {
  auto& list = gets_.empty() ? sets_ : gets_;
  if (list.empty()) return {};
  std::optional<BulkValue> next(std::move(list.front()));
  list.pop_front();
  return next;
}

void BulkQueue::End(const BulkValue& value, BulkResult result) {
  BulkValue::Group& group = *value.group;
  group.results[value.index] = result;
  if (result == BulkResult::kError) group.errors[value.index] = value.text + "\n";
  if (--group.open > 0) return;
  std::string errors;
  for (const std::string& line : group.errors) errors += line;
  events_.push_back(
      {BulkEventKind::kMoved, static_cast<double>(group.what.tag), std::move(group.results), std::move(errors)});
}

void BulkQueue::Drop(uint64_t tag) {
  for (auto* list : {&gets_, &sets_}) {
    std::deque<BulkValue> kept;
    for (BulkValue& value : *list) {
      if (value.group->what.tag == tag) End(value, BulkResult::kLost);
      else kept.push_back(std::move(value));
    }
    list->swap(kept);
  }
}

}  // namespace kvtier
