// XXH3-64 of large KV blocks (the algorithm: xxh3.cuh) beside a model that computes: the sums of each KiB by all of the GPU, which takes a few
// microseconds, then the serial part, one warp a block. One thread block a pool block (xxh3.cu) would keep its multiprocessor for longer than the
// model's kernels take: on an H200 two such blocks cost decodes 5 %, and 1.3 ms a GB; this costs them 0.27 ms, of which reading it takes 0.23.
//
//   sum_rows     warp w of all    four KiB: rows of eight sums, one block's after the other's
//   chain_rows   warp w           block w: acc = scramble(acc + row), the next 32 rows on their way
#include "../gpu/device.h"
#include "kernels.h"
#include "transfer_kernels.h"
#include "xxh3.cuh"

namespace kvtier::cuda {
namespace {

constexpr int kApartWarps = 8, kApartEach = 3;  // of a thread block that adds up, and such blocks of a multiprocessor
constexpr int kChainWarps = 8;

#if !defined(KVTIER_DRIVER)

__device__ __forceinline__ void SumRows(uint64_t* rows, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, const BlockShape& shape) {
  KibSums kib(threadIdx.x % 32);
  const int64_t rows_each = shape.kib + 1, units = (rows_each + kWarpKib - 1) / kWarpKib;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kApartWarps;
  int64_t unit = static_cast<int64_t>(blockIdx.x) * kApartWarps + threadIdx.x / 32;
  const auto load = [&] {
    if (unit < blocks * units) kib.Load(shape, pool + pool_offsets[unit / units], unit % units * kWarpKib);
  };
  load();
  while (unit < blocks * units) {
    const int64_t block = unit / units, first = unit % units * kWarpKib;
    uint64_t sums[2 * kWarpKib] = {};
    kib.Add(shape, first, sums, [](uint4, int64_t) {});
    unit += stride;
    load();
    const uint64_t sum = kib.Reduce(sums);
    const int64_t row = first + kib.row();
    if (row < rows_each) rows[(block * rows_each + row) * 8 + kib.accumulator()] = sum;
  }
}

__device__ __forceinline__ void ChainRows(uint64_t* hashes, const uint64_t* rows, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks,
                                          const BlockShape& shape) {
  constexpr int kLoads = 8, kRows = 4;  // of a warp: four rows a load
  const unsigned lane = threadIdx.x % 32;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kChainWarps + threadIdx.x / 32;
  if (block >= blocks) return;
  Chain chain(shape, pool + pool_offsets[block], lane);
  const int64_t words = (shape.kib + 1) * 8;
  const uint64_t* const from = rows + block * words;
  const auto load = [&](uint64_t(&to)[kLoads], int64_t first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t word = (first + i * kRows) * 8 + lane;
      to[i] = word < words ? from[word] : 0;
    }
  };
  uint64_t now[kLoads], next[kLoads];
  load(now, 0);
  for (int64_t first = 0; first <= shape.kib; first += kLoads * kRows) {
    load(next, first + kLoads * kRows);
#pragma unroll
    for (int i = 0; i < kLoads * kRows; ++i) {
      const uint64_t sum = __shfl_sync(gpu::kAllLanes, now[i / kRows], i % kRows * 8 + chain.accumulator());
      if (first + i < shape.kib) chain.Scrambled(sum);
      if (first + i == shape.kib) chain.Add(sum);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) now[i] = next[i];
  }
  const uint64_t hash = chain.Finish();
  if (lane == 0) hashes[block] = hash;
}

#endif

}  // namespace

#if !defined(KVTIER_DRIVER)
extern "C" {

__global__ void __launch_bounds__(32 * kApartWarps, kApartEach) kvtier_sum_rows(uint64_t* rows, const uint8_t* pool, const int64_t* pool_offsets,
                                                                               int64_t blocks, int64_t bytes) {
  SumRows(rows, pool, pool_offsets, blocks, BlockShape(bytes));
}

__global__ void __launch_bounds__(32 * kChainWarps) kvtier_chain_rows(uint64_t* sums, const uint64_t* rows, const uint8_t* pool,
                                                                      const int64_t* pool_offsets, int64_t blocks, int64_t bytes) {
  ChainRows(sums, rows, pool, pool_offsets, blocks, BlockShape(bytes));
}

}  // extern "C"
#endif

int64_t HashRowsBytes(int64_t blocks, int64_t bytes) { return blocks * ((bytes - 1) / 1024 + 1) * 64; }

void HashBlocksApart(Stream& stream, uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes, uint64_t* rows,
                     int multiprocessors) {
  if (blocks == 0) return;
  const int64_t units = blocks * (((bytes - 1) / 1024 + kWarpKib) / kWarpKib), wanted = (units + kApartWarps - 1) / kApartWarps;
  const int64_t most = int64_t{kApartEach} * multiprocessors;
  gpu::Launch(stream, "sum_rows", kvtier_sum_rows, {static_cast<unsigned>(wanted < most ? wanted : most)}, {32 * kApartWarps}, 0, rows, pool,
              pool_offsets, blocks, bytes);
  gpu::Launch(stream, "chain_rows", kvtier_chain_rows, {static_cast<unsigned>((blocks + kChainWarps - 1) / kChainWarps)}, {32 * kChainWarps}, 0,
              sums, rows, pool, pool_offsets, blocks, bytes);
}

}  // namespace kvtier::cuda
