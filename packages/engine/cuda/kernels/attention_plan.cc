#include "attention_plan.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace kvtier::cuda {
namespace {

constexpr int32_t kWorkspaceTiles = 8;   // large ones, per multiprocessor
constexpr int32_t kLargeUnits = 128;     // parts of a large tile times KV heads: about as many blocks as a GPU has multiprocessors

// Parts of a query's keys; a tile with a window touches some more, where its first query's keys begin and its last one's end.
int32_t PartsOfQuery(bool few, int32_t kv_heads) { return few ? kMostParts - 4 : std::clamp(kLargeUnits / kv_heads, 8, kMostParts - 4); }

// Collects items until the workspace is full.
class Rounds {
 public:
  Rounds(AttentionPlan& plan, int32_t kv_heads, int32_t workspace_rows) : plan_(plan), kv_heads_(kv_heads), free_(workspace_rows), all_(workspace_rows) {}

  // A tile, its keys in parts of `keys`.
  void Add(AttentionItem item, int32_t keys, bool large) {
    const int32_t first = item.first, end = item.end, origin = first / keys;
    item.parts = (end - 1) / keys - origin + 1;
    item.place = origin % kMostParts;
    const int32_t needed = item.parts > 1 ? item.parts * item.rows * kv_heads_ : 0;
    if (needed > all_) throw std::logic_error("GPU: attention: a tile's parts exceed the workspace; take AttentionWorkspaceRows");
    if (needed > free_) End();
    item.slot = needed > 0 ? all_ - free_ : 0;
    item.ticket = needed > 0 ? tickets_++ : 0;
    free_ -= needed;
    if (large && item.parts > 1) merges_.push_back(item);
    for (item.part = 0; item.part < item.parts; ++item.part) {
      item.first = std::max(first, (origin + item.part) * keys);
      item.end = std::min(end, (origin + item.part + 1) * keys);
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

int32_t PartKeys(const AttentionBounds& b, bool few, int32_t position) {
  const int32_t seen = b.window == 0 ? position + 1 : std::min(position + 1, b.window), parts = PartsOfQuery(few, b.kv_heads);
  int32_t keys = few ? b.few_keys : b.large_keys;
  while (seen > int64_t{keys} * parts) keys *= 2;
  return keys;
}

int32_t AttentionWorkspaceRows(int64_t heads, int multiprocessors) {
  const int64_t tile = AttentionTileRows(0), parts = std::max<int64_t>(kLargeUnits, 8 * heads) + 4 * heads;
  return static_cast<int32_t>(std::max({kWorkspaceTiles * multiprocessors * tile, tile * parts, heads * kFewRows * kMostParts}));
}

int64_t AttentionMostItems(const AttentionBounds& b, int64_t rows, int64_t sequences, int64_t max_tokens) {
  // A sequence's last tile is not full, nor is one where parts begin to be longer.
  const int64_t short_tiles = 2 + std::bit_width(static_cast<uint64_t>(max_tokens / std::min(b.few_keys, b.large_keys)));
  const int64_t tiles = rows * (b.heads / b.kv_heads) / kFewRows + sequences * short_tiles;
  const int64_t parts = std::min<int64_t>(kMostParts, max_tokens / std::min(b.few_keys, b.large_keys) + 4);
  return tiles * (parts + 1);  // and each tile's merging
}

AttentionPlan PlanAttention(const AttentionBounds& b, std::span<const int32_t> computed, std::span<const int32_t> queries) {
  AttentionPlan plan;
  Rounds rounds(plan, b.kv_heads, b.workspace_rows > 0 ? b.workspace_rows : AttentionWorkspaceRows(b.heads, b.multiprocessors));
  const int32_t group = b.heads / b.kv_heads;
  for (size_t s = 0; s < queries.size(); ++s) {
    const bool few = IsFew(b, queries[s]);
    const int32_t rows = queries[s] * group, tile_rows = few ? kFewRows : AttentionTileRows(b.head_dim);
    for (int32_t first_row = 0, here = 0; first_row < rows; first_row += here) {
      here = std::min(tile_rows, rows - first_row);
      const int32_t low = computed[s] + first_row / group, keys = PartKeys(b, few, low);
      int32_t high = computed[s] + (first_row + here - 1) / group;
      if (PartKeys(b, few, high) != keys) {
        while (PartKeys(b, few, high) != keys) --high;
        here = (high + 1 - computed[s]) * group - first_row;
      }
      const int32_t first = b.window == 0 ? 0 : std::max(0, low - b.window + 1);
      rounds.Add({static_cast<int32_t>(s), first_row, first, high + 1, static_cast<int16_t>(here), 0, 1, 0, 0, 0}, keys, !few);
    }
  }
  rounds.End();
  return plan;
}

}  // namespace kvtier::cuda
