// See value_queue.h.
#include "value_queue.h"

#include <utility>

namespace kvtier {
namespace {

constexpr auto kSilence = std::chrono::milliseconds(50);

}  // namespace

void ValueQueue::Add(ValueGroup what) {
  const size_t count = what.moves.size();
  auto& list = what.isGet ? gets_ : sets_;
  const auto group = std::make_shared<MovedValue::Group>();
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

std::optional<MovedValue> ValueQueue::Next(const void* connection) {
  const bool reads = !gets_.empty() && (reader_ == nullptr || reader_ == connection);
  auto& list = reads ? gets_ : sets_;
  if (list.empty()) return {};
  if (reads) {
    if (reader_ == nullptr) lastProgress_ = std::chrono::steady_clock::now();
    reader_ = connection;
    ++reading_;
  }
  std::optional<MovedValue> next(std::move(list.front()));
  list.pop_front();
  return next;
}

void ValueQueue::End(const MovedValue& value, MoveResult result) {
  if (value.isGet() && --reading_ == 0) reader_ = nullptr;
  Ended(value, result);
}

void ValueQueue::Ended(const MovedValue& value, MoveResult result) {
  MovedValue::Group& group = *value.group;
  group.results[value.index] = result;
  if (result == MoveResult::kError) group.errors[value.index] = value.text + "\n";
  if (--group.open > 0) return;
  std::string errors;
  for (const std::string& line : group.errors) errors += line;
  events_.push_back(
      {ValueEventKind::kMoved, static_cast<double>(group.what.tag), std::move(group.results), std::move(errors)});
}

void ValueQueue::Drop(uint64_t tag) {
  for (auto* list : {&gets_, &sets_}) {
    std::deque<MovedValue> kept;
    for (MovedValue& value : *list) {
      if (value.group->what.tag == tag) Ended(value, MoveResult::kLost);
      else kept.push_back(std::move(value));
    }
    list->swap(kept);
  }
}

bool ValueQueue::ChangeReader() {
  if (!waitsForReader() || std::chrono::steady_clock::now() - lastProgress_ < kSilence) return false;
  reader_ = nullptr;
  return true;
}

void ValueQueue::Arrived(uint64_t bytes, bool more) {
  const auto now = lastProgress_ = std::chrono::steady_clock::now();
  if (lastArrival_) size_.Arrived(bytes, std::chrono::duration<double, std::micro>(now - *lastArrival_).count());
  lastArrival_ = more ? std::optional(now) : std::nullopt;
}

}  // namespace kvtier
