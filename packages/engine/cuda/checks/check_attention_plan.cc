// PlanAttention: what its list promises to the kernels, and that a sequence's part of it is what it is alone.
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "../kernels/attention_plan.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

// A sequence's items by tile and part: {first row, first key, end, part, parts, rows, place}.
using Keys = std::vector<std::array<int32_t, 7>>;
Keys KeysOf(const AttentionPlan& plan, int32_t sequence) {
  Keys keys;
  for (const AttentionRound& round : plan.rounds) {
    for (int32_t i = round.few_at; i < round.tiles_at + round.tiles; ++i) {
      const AttentionItem& item = plan.items[static_cast<size_t>(i)];
      if (item.sequence == sequence) keys.push_back({item.first_row, item.first, item.end, item.part, item.parts, item.rows, item.place});
    }
  }
  std::ranges::sort(keys, {}, [](const auto& of) { return std::pair(of[0], of[3]); });
  return keys;
}

bool IsFew(const AttentionBounds& b, int32_t queries) {
  return b.few_rows > 0 && queries <= std::max(1, b.few_rows / (b.heads / b.kv_heads));
}

bool Covers(const AttentionBounds& b, const AttentionPlan& plan, const std::vector<int32_t>& computed, const std::vector<int32_t>& queries) {
  const int32_t group = b.heads / b.kv_heads;
  for (size_t s = 0; s < queries.size(); ++s) {
    int32_t next_row = 0, part = 0, parts = 1, at = 0;
    const bool few = IsFew(b, queries[s]);
    for (const auto& [first_row, first, end, this_part, these_parts, rows, place] : KeysOf(plan, static_cast<int32_t>(s))) {
      const int32_t low = computed[s] + first_row / group, keys = PartKeys(b, few, low);
      if (this_part == 0) {
        if (part != parts % parts || first_row != next_row || first != (b.window == 0 ? 0 : std::max(0, low - b.window + 1))) return false;
        if (rows < 1 || rows > (few ? kFewRows : AttentionTileRows(b.head_dim))) return false;
        next_row += rows;
        parts = these_parts;
      } else if (this_part != part || these_parts != parts || first != at || first % keys != 0) {
        return false;
      }
      // Every query of the tile is cut alike, and each part lies between two of the cuts, in the place that these have.
      if (PartKeys(b, few, computed[s] + (first_row + rows - 1) / group) != keys || first / keys != (end - 1) / keys) return false;
      if (end <= first || parts > kMostParts || (place + this_part) % kMostParts != first / keys % kMostParts) return false;
      at = end;
      part = (this_part + 1) % parts;
      if (part == 0 && end != computed[s] + (next_row - 1) / group + 1) return false;
    }
    if (part != 0 || next_row != queries[s] * group) return false;
  }
  return true;
}

bool Fits(const AttentionBounds& b, const AttentionPlan& plan) {
  const int32_t rows = b.workspace_rows > 0 ? b.workspace_rows : AttentionWorkspaceRows(b.heads, b.multiprocessors);
  for (const AttentionRound& round : plan.rounds) {
    std::vector<std::array<int32_t, 2>> taken;
    std::vector<int32_t> tickets;
    int32_t merges = 0;
    const auto look = [&](int32_t at, int32_t count, int32_t tile_rows) {
      for (int32_t i = at; i < at + count; ++i) {
        const AttentionItem& item = plan.items[static_cast<size_t>(i)];
        if (item.parts == 1 || item.part != 0) continue;
        taken.push_back({item.slot, item.slot + item.parts * item.rows * b.kv_heads});
        tickets.push_back(item.ticket);
        merges += tile_rows == kFewRows ? 0 : 1;
      }
    };
    look(round.few_at, round.few, kFewRows);
    look(round.tiles_at, round.tiles, AttentionTileRows(b.head_dim));
    std::ranges::sort(taken);
    std::ranges::sort(tickets);
    for (size_t i = 0; i < taken.size(); ++i) {
      if (taken[i][0] < (i == 0 ? 0 : taken[i - 1][1]) || taken[i][1] > rows || tickets[i] != static_cast<int32_t>(i)) return false;
    }
    if (merges != round.merges || static_cast<int64_t>(tickets.size()) * b.kv_heads > rows / 2) return false;
  }
  return true;
}

}  // namespace

// What a plan promises, for shapes and bounds drawn at random: every key that a row sees lies in one part of its tile, parts follow one
// another and begin where the position says, no two tiles share room in a round, and a sequence's cut is what it is alone.
KVTIER_CHECK(attention_plans) {
  bool covers = true, fits = true, alone_too = true, counted = true;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto draw = RandomInts(seed, 40, 0, 1 << 20);
    size_t used = 0;
    const auto below = [&](int32_t bound) { return draw[used++] % bound; };
    const int32_t kv_heads = 1 + below(8), head_dim = below(2) == 0 ? 128 : 256;
    AttentionBounds b{kv_heads << below(4), kv_heads, head_dim, 1 + below(132), below(2) == 0 ? 0 : 1 + below(5000)};
    b.few_keys = 64 << below(4), b.large_keys = 64 << below(4), b.few_rows = below(3) * 32;
    if (below(2) == 0) b.workspace_rows = std::max(4 * b.multiprocessors * 128, AttentionWorkspaceRows(b.kv_heads, 1));
    std::vector<int32_t> computed, queries;
    for (int32_t i = 0, count = 1 + below(6); i < count; ++i) {
      computed.push_back(below(3) == 0 ? below(200) : below(100'000));
      queries.push_back(below(2) == 0 ? 1 : 1 + below(700));
    }
    const AttentionPlan plan = PlanAttention(b, computed, queries);
    covers = covers && Covers(b, plan, computed, queries);
    fits = fits && Fits(b, plan);
    const int64_t rows = std::accumulate(queries.begin(), queries.end(), int64_t{0});
    counted = counted && static_cast<int64_t>(plan.items.size()) <= AttentionMostItems(b, rows, static_cast<int64_t>(queries.size()), 110'000);
    for (size_t s = 0; s < queries.size(); ++s) {
      const AttentionPlan one = PlanAttention(b, {&computed[s], 1}, {&queries[s], 1});
      alone_too = alone_too && KeysOf(one, 0) == KeysOf(plan, static_cast<int32_t>(s));
    }
  }
  ExpectTrue("PlanAttention", "covers each tile's keys once, in order", covers);
  ExpectTrue("PlanAttention", "gives tiles of a round room of their own, within the workspace", fits);
  ExpectTrue("PlanAttention", "cuts a sequence as it does alone", alone_too);
  ExpectTrue("PlanAttention", "makes no more items than it says", counted);
}

}  // namespace kvtier::cuda::check
