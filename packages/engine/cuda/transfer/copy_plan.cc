#include "copy_plan.h"

#include <algorithm>

namespace kvtier::cuda {
namespace {

// Whether the piece goes on where the run would have its next row; a run of one row takes the distance to it as its strides.
bool Extend(Run& run, int64_t pool_offset, int64_t host_offset, int64_t bytes, const PlanBounds& bounds) {
  if (run.bytes != bytes || run.host_offset / bounds.chunk_bytes != host_offset / bounds.chunk_bytes) return false;
  const int64_t pool_stride = pool_offset - run.pool_offset, host_stride = host_offset - run.host_offset;
  if (run.rows == 1) {
    if (pool_stride < bytes || host_stride < bytes) return false;
    if (std::max(pool_stride, host_stride) > bounds.max_pitch_bytes) return false;
    run.pool_stride = pool_stride;
    run.host_stride = host_stride;
  } else if (pool_stride != run.rows * run.pool_stride || host_stride != run.rows * run.host_stride) {
    return false;
  }
  ++run.rows;
  return true;
}

}  // namespace

std::vector<Run> PlanRuns(std::span<const int64_t> pool_offsets, std::span<const int64_t> host_offsets, int64_t bytes,
                          const PlanBounds& bounds) {
  const int64_t chunk_bytes = bounds.chunk_bytes;
  std::vector<Run> runs;
  for (size_t i = 0; i < pool_offsets.size(); ++i) {
    const int64_t pool = pool_offsets[i], host = host_offsets[i];
    const int64_t border = (host / chunk_bytes + 1) * chunk_bytes;
    if (host + bytes <= border) {
      if (bytes < bounds.merge_below && !runs.empty() && Extend(runs.back(), pool, host, bytes, bounds)) continue;
      runs.push_back({pool, host, 0, 0, bytes, 1});
      continue;
    }
    for (int64_t done = 0; done < bytes;) {
      const int64_t end = ((host + done) / chunk_bytes + 1) * chunk_bytes;
      const int64_t part = std::min(bytes - done, end - host - done);
      runs.push_back({pool + done, host + done, 0, 0, part, 1});
      done += part;
    }
  }
  return runs;
}

}  // namespace kvtier::cuda
