// The implementations behind AttentionPrefill and AttentionDecode, for checks and for attention.cu, which chooses.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace kvtier::cuda {

// One warp per query and head, any type: the reference on the device.
void AttentionWarp(Stream&, NumberType, const AttentionArgs&, const Batch&);
// Tiles of rows on tensor cores, for the sequences that have more than `above` queries. T: f16, bf16.
template <class T>
void AttentionTiles(Stream&, const AttentionArgs&, const Batch&, int32_t above);
// 16 rows at a time, keys split over blocks, for the sequences that have at most `max_queries` queries. T: f16, bf16.
template <class T>
void AttentionSplit(Stream&, const AttentionArgs&, const Batch&, int32_t max_queries, int multiprocessors);

constexpr int kSplitRows = 16;      // packed rows of a block
constexpr int kSplitStep = 128;     // keys: what a split holds is a multiple of it
constexpr int kMaxSplits = 256;     // per sequence; their weights wait in shared memory

// The split-KV workspace: tickets, one per (kv head x tile, sequence), then parts of 16 rows of outputs, maxima and sums per
// block. There are splits only while they fit into 2 blocks per multiprocessor, so its size does not grow with the batch.
struct SplitWorkspace {
  static constexpr int64_t TicketBytes(int multiprocessors) { return (2 * multiprocessors * int64_t{4} + 127) / 128 * 128; }
  static constexpr int64_t PartFloats(int64_t dim) { return kSplitRows * (dim + 2); }
};

// Throws when the shapes are not ones that the kernels know.
void CheckAttention(NumberType, const AttentionArgs&, const Batch&);

}  // namespace kvtier::cuda
