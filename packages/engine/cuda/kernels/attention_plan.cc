#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>

namespace kvtier::cuda {
namespace {

constexpr int32_t kKeyTile = 64;                     // what large tiles take at a time
constexpr int32_t kBlocksEach = 4;                   // per multiprocessor that one sequence's large tiles are cut into: two waves
constexpr int32_t kWorkspaceTiles = 8;               // per multiprocessor

int32_t DivideUp(int32_t a, int32_t b) { return (a + b - 1) / b; }

// A tile's keys in parts of `keys`, counted from `origin`.
struct Cut {
  int32_t origin, keys, parts;
};

Cut CutFew(int32_t first, int32_t end, int32_t keys) {
  while ((end - 1) / keys - first / keys >= kMostParts) keys *= 2;
  return {first / keys * keys, keys, (end - 1) / keys - first / keys + 1};
}

Cut CutLarge(int32_t first, int32_t end, int32_t least_keys, int32_t wanted) {
  const int32_t origin = first / kKeyTile * kKeyTile;
  const int32_t even = DivideUp(DivideUp(end - origin, std::clamp(wanted, 1, kMostParts)), kKeyTile) * kKeyTile;
  const int32_t keys = std::max(even, least_keys);
  return {origin, keys, DivideUp(end - origin, keys)};
}

// Collects items until the workspace is full.
class Rounds {
 public:
  Rounds(AttentionPlan& plan, int32_t kv_heads, int32_t workspace_rows) : plan_(plan), kv_heads_(kv_heads), free_(workspace_rows), all_(workspace_rows) {}

  void Add(AttentionItem item, const Cut& cut, int32_t rows, bool large) {
    const int32_t needed = cut.parts > 1 ? cut.parts * rows * kv_heads_ : 0;
    if (needed > all_) throw std::logic_error("GPU: attention: a tile's parts exceed the workspace; take AttentionWorkspaceRows");
    if (needed > free_) End();
    const int32_t first = item.first, end = item.end;
    item.slot = needed > 0 ? all_ - free_ : 0;
    item.ticket = needed > 0 ? tickets_++ : 0;
    item.parts = cut.parts;
    free_ -= needed;
    if (large && cut.parts > 1) merges_.push_back(item);
    for (item.part = 0; item.part < cut.parts; ++item.part) {
      item.first = std::max(first, cut.origin + item.part * cut.keys);
      item.end = std::min(end, cut.origin + (item.part + 1) * cut.keys);
      (large ? tiles_ : few_).push_back(item);
    }
  }

  void End() {
    if (few_.empty() && tiles_.empty()) return;
    AttentionRound round;
    const auto put = [&](std::vector<AttentionItem>& items, int32_t& at, int32_t& count, bool longest_first) {
      if (longest_first) std::ranges::stable_sort(items, std::ranges::greater(), [](const AttentionItem& item) { return item.end - item.first; });
      at = static_cast<int32_t>(plan_.items.size());
      count = static_cast<int32_t>(items.size());
      plan_.items.insert(plan_.items.end(), items.begin(), items.end());
      items.clear();
    };
    put(few_, round.few_at, round.few, true);
    put(tiles_, round.tiles_at, round.tiles, true);
    put(merges_, round.merges_at, round.merges, false);
    plan_.rounds.push_back(round);
    free_ = all_;
    tickets_ = 0;
  }

 private:
  AttentionPlan& plan_;
  const int32_t kv_heads_;
  int32_t free_, tickets_ = 0;
  const int32_t all_;
  std::vector<AttentionItem> few_, tiles_, merges_;
};

bool IsFew(const AttentionBounds& b, int32_t queries) {
  return b.few_rows > 0 && queries <= std::max(1, b.few_rows / (b.heads / b.kv_heads));
}

}  // namespace

int32_t AttentionWorkspaceRows(int64_t heads, int multiprocessors) {
  return static_cast<int32_t>(std::max<int64_t>(int64_t{kWorkspaceTiles} * multiprocessors * AttentionTileRows(0), heads * kFewRows * kMostParts));
}

int64_t AttentionMostItems(const AttentionBounds& b, int64_t rows, int64_t sequences, int64_t max_tokens) {
  const int64_t tiles = rows * (b.heads / b.kv_heads) / kFewRows + sequences;
  const int64_t parts = std::min<int64_t>(kMostParts, max_tokens / std::min(b.few_keys, b.least_keys) + 1);
  return tiles * (parts + 1);  // and each tile's merging
}

AttentionPlan PlanAttention(const AttentionBounds& b, std::span<const int32_t> computed, std::span<const int32_t> queries) {
  AttentionPlan plan;
  Rounds rounds(plan, b.kv_heads, b.workspace_rows > 0 ? b.workspace_rows : AttentionWorkspaceRows(b.heads, b.multiprocessors));
  const int32_t group = b.heads / b.kv_heads;
  for (size_t s = 0; s < queries.size(); ++s) {
    const bool few = IsFew(b, queries[s]);
    const int32_t rows = queries[s] * group, tile_rows = few ? kFewRows : AttentionTileRows(b.head_dim);
    const int32_t wanted = kBlocksEach * b.multiprocessors / (DivideUp(rows, tile_rows) * b.kv_heads);
    for (int32_t first_row = 0; first_row < rows; first_row += tile_rows) {
      const int32_t here = std::min(tile_rows, rows - first_row);
      const int32_t low = computed[s] + first_row / group, end = computed[s] + (first_row + here - 1) / group + 1;
      const int32_t first = b.window == 0 ? 0 : std::max(0, low - b.window + 1);
      const Cut cut = few ? CutFew(first, end, b.few_keys) : CutLarge(first, end, b.least_keys, wanted);
      rounds.Add({static_cast<int32_t>(s), first_row, first, end, 0, 1, 0, 0}, cut, here, !few);
    }
  }
  rounds.End();
  return plan;
}

}  // namespace kvtier::cuda
