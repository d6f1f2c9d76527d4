// What the copy engine is told: pieces of equal size, each between an offset of the pool and an offset of the arena, put
// together into as few copies as their places allow. Pure.
//
//   pieces   a ─ 0, b ─ 1, c ─ 2 (equal distances on both sides)   ──▶ one 2D copy of three rows
//   a piece that lies over the border of two pinned chunks of the arena ──▶ two copies: the driver takes no copy over it
//
// Invariant: the copies cover each byte of each piece once, and no copy touches two chunks, and no row is
// further from the one before it than the copy engine can step.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::cuda {

struct Run {
  int64_t pool_offset, host_offset;
  int64_t pool_stride, host_stride;  // of rows; meaningless for one row
  int64_t bytes, rows;
};

struct PlanBounds {
  int64_t chunk_bytes;      // the arena's chunks start at multiples of it
  int64_t merge_below;      // pieces of so many bytes or more stay alone
  int64_t max_pitch_bytes;  // the longest step from row to row
};
std::vector<Run> PlanRuns(std::span<const int64_t> pool_offsets, std::span<const int64_t> host_offsets, int64_t bytes,
                          const PlanBounds& bounds);

}  // namespace kvtier::cuda
