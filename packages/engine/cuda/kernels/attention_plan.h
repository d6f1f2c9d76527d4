// The work of a step's attention, as a list that the host makes for each window: which keys of which rows a block takes, so that
// a long context is read by the whole GPU, and no block is launched for nothing.
//
// Rows are packed as in attention.cuh, and come in tiles of following rows: of 16 where a sequence has few of them (a decode, a
// short tail), else of as many as fit the tensor cores' kernel. The keys that a tile sees are cut into parts, an item each;
// what the parts give is merged in their order.
//
// Invariant: every bit of a query's result depends on the model, the query's position and its kind (few rows or large tiles), and on
// nothing else: not on the sequences beside it, nor on how many queries of its own sequence come with it, the GPU or the rounds. Parts begin
// at multiples of a number of keys that follows from the position (PartKeys); a tile ends where that number changes; weights of parts
// are summed in an order that follows from where in the context they lie. What does not fit into the workspace comes in later rounds.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::cuda {

constexpr int32_t kFewRows = 16;     // rows of a tile where there are few
constexpr int32_t kMostParts = 64;   // of a tile: two for each lane of the warp that merges them; a power of two

// 32 bytes: kernels whose registers are scarce read it again, and find it by a shift.
struct AttentionItem {
  int32_t sequence, first_row;
  int32_t first, end;    // keys
  int16_t rows;
  int16_t part, parts;   // of the tile
  int16_t place;         // of the tile's first part among kMostParts, by where in the context it lies
  int32_t slot;          // the first of the tile's rows in the workspace, all parts and KV heads; none: 0
  int32_t ticket;        // the tile's number among those with parts in this round
};

static_assert(sizeof(AttentionItem) == 32);

// Launched one after another, as they share the workspace. Numbers of items, and where they start.
struct AttentionRound {
  int32_t few_at = 0, few = 0;      // tiles of 16 rows
  int32_t tiles_at = 0, tiles = 0;  // large tiles
  int32_t merges_at = 0, merges = 0;  // large tiles of several parts, once each
};

struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<AttentionRound> rounds;
};

struct AttentionBounds {
  int32_t heads, kv_heads, head_dim, multiprocessors;
  int32_t window = 0;
  // A sequence has few rows up to this number per KV head (and always where it has one query): in large tiles they would be few blocks with
  // long ways. 0: large tiles only.
  int32_t few_rows = 64;
  int32_t few_keys = 512;      // of a part, or a power of two times that
  int32_t large_keys = 1024;   // the same of a large tile's: more, as its parts are 128 rows of numbers to write and read
  int32_t workspace_rows = 0;  // 0: AttentionWorkspaceRows
};

// Rows of a large tile; at head_dim 256 outputs fill the registers.
constexpr int32_t AttentionTileRows(int32_t head_dim) { return head_dim <= 128 ? 128 : 64; }
// Keys of a part for a query at `position`: a power of two times the bound's, so large that parts stay within what the kernels merge.
int32_t PartKeys(const AttentionBounds& bounds, bool few, int32_t position);
// Rows of the workspace: enough for every single tile, and for the parts that fill a GPU several times.
int32_t AttentionWorkspaceRows(int64_t heads, int multiprocessors);
// The most items that PlanAttention makes of that many rows and sequences.
int64_t AttentionMostItems(const AttentionBounds& bounds, int64_t rows, int64_t sequences, int64_t max_tokens);

// `computed` and `queries`: of each sequence, tokens before its first query and queries.
AttentionPlan PlanAttention(const AttentionBounds& bounds, std::span<const int32_t> computed, std::span<const int32_t> queries);

// A plan and where its items lie on the device. `few_count`: where a captured launch reads how many items of round 0 there are; such a
// plan has one round and no large tiles. Null: what the plan says is launched.
struct AttentionWork {
  const AttentionPlan* plan;
  const AttentionItem* items;
  const int32_t* few_count;
  int32_t workspace_rows;
};

}  // namespace kvtier::cuda
