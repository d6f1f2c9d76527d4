// The implementations behind Attention, for checks and for attention.cu, which chooses.
#pragma once
#include <cstdint>

#include "attention_plan.h"
#include "kernels.h"

namespace kvtier::cuda {

// One warp per query and head, any type: the reference on the device.
void AttentionWarp(Stream&, NumberType, const AttentionArgs&, const Batch&);

// Items that a launch takes, each for all KV heads; their number lies on the device where `counted` is given.
struct AttentionUnits {
  const AttentionItem* items;
  const int32_t* counted;
  int32_t count;
  int32_t workspace_rows;
};
// Large tiles of rows on tensor cores, each item by a block per KV head; parts stay in the workspace. T: f16, bf16.
template <class T>
void AttentionTiles(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);
// 16 rows at a time, each item by a block per KV head, at most `blocks` of them; the last of a tile's parts merges all of them.
template <class T>
void AttentionFew(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&, int32_t blocks);
// The parts of large tiles become their results.
template <class T>
void AttentionMerge(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);

constexpr int32_t kFewBlocksEach = 2;  // per multiprocessor, as shared memory allows

// The workspace: tickets, of which no round takes more than half as many as rows, then outputs, maxima and sums of the parts.
struct PartsWorkspace {
  static constexpr int64_t TicketBytes(int64_t rows) { return (rows / 2 * 4 + 127) / 128 * 128; }
  static constexpr int64_t Bytes(int64_t rows, int64_t dim) { return TicketBytes(rows) + rows * (dim + 2) * 4; }
};

// Throws when the shapes are not ones that the kernels know.
void CheckAttention(NumberType, const AttentionArgs&, const Batch&);

}  // namespace kvtier::cuda
