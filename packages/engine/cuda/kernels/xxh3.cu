// XXH3-64 of KV blocks by one thread block each (the algorithm: xxh3.cuh): of what lies in the pool, or of what passes on its way over the bus,
// so that each byte is read once.
//
//   warps 1..8   | load r+1, reduce r, store sums r | barrier | load r+2, reduce r+1 ...
//   warp 0       |                                  | barrier | chain the 32 KiB of round r ...
//
// 32 KiB of a block are in flight; the first round of the next block is on its way while the last one of this block is added up. The sums of a
// round lie until the barrier after the next one: warps are never two rounds apart.
#include "../gpu/device.h"
#include "kernels.h"
#include "transfer_kernels.h"
#include "xxh3.cuh"

namespace kvtier::cuda {
namespace {

constexpr int kSumWarps = 8;
constexpr int kThreads = 32 * (1 + kSumWarps);

#if !defined(KVTIER_DRIVER)

constexpr int kRoundKib = kSumWarps * kWarpKib;
using Sums = uint64_t (*)[kRoundKib][8];  // of two rounds

// What becomes of the bytes that are hashed: they stay where they are, or go over the bus, out of the pool or into it, as they are read.
enum class Fate { kStay, kOut, kIn };

template <Fate kFate>
__device__ __forceinline__ void Put(uint8_t* place, uint4 vector) {
  if constexpr (kFate == Fate::kOut) gpu::StoreStreaming(reinterpret_cast<uint4*>(place), vector);  // not read here again
  if constexpr (kFate == Fate::kIn) *reinterpret_cast<uint4*>(place) = vector;
}

// A thread block takes every gridDim.x-th block.
struct Work {
  const uint8_t* source;
  uint8_t* target;  // null: they stay
  const int64_t *source_offsets, *target_offsets;
  int64_t blocks;
  BlockShape shape;
  __device__ __forceinline__ const uint8_t* Source(int64_t block) const { return block < blocks ? source + source_offsets[block] : nullptr; }
  __device__ __forceinline__ int64_t Rounds() const { return shape.kib / kRoundKib + 1; }
};

template <Fate kFate>
__device__ void AddUp(const Work& work, Sums shared, unsigned warp, unsigned lane) {
  KibSums kib(lane);
  const int64_t first = static_cast<int64_t>(warp) * kWarpKib, rounds = work.Rounds();
  int64_t block = blockIdx.x;
  const uint8_t* data = work.Source(block);
  if (data != nullptr) kib.Load(work.shape, data, first);
  unsigned parity = 0;
  while (data != nullptr) {
    uint8_t* const to = kFate == Fate::kStay ? nullptr : work.target + work.target_offsets[block];
    block += gridDim.x;
    const uint8_t* const next = work.Source(block);
    for (int64_t round = 0; round < rounds; ++round, parity ^= 1) {
      const int64_t at = first + round * kRoundKib;
      uint64_t sums[2 * kWarpKib] = {};
      kib.Add(work.shape, at, sums, [&](uint4 vector, int64_t place) { Put<kFate>(to + place, vector); });
      if (round + 1 < rounds) {
        kib.Load(work.shape, data, at + kRoundKib);
      } else if (next != nullptr) {
        kib.Load(work.shape, next, first);
      }
      const uint64_t sum = kib.Reduce(sums);
      shared[parity][warp * kWarpKib + kib.row()][kib.accumulator()] = sum;
      __syncthreads();
    }
    data = next;
  }
}

template <Fate kFate>
__device__ void ChainUp(const Work& work, uint64_t* hashes, Sums shared, unsigned lane) {
  unsigned parity = 0;
  for (int64_t block = blockIdx.x; block < work.blocks; block += gridDim.x) {
    const uint8_t* const data = work.Source(block);
    Chain chain(work.shape, data, lane);
    if constexpr (kFate != Fate::kStay) {  // what no whole stripe before the last one holds
      const int64_t at = work.shape.stripes * kStripeBytes + lane * 16;
      if (lane < kStripeBytes / 16 && at < work.shape.bytes) {
        Put<kFate>(work.target + work.target_offsets[block] + at, gpu::LoadStreaming(reinterpret_cast<const uint4*>(data + at)));
      }
    }
    for (int64_t done = 0; done <= work.shape.kib; done += kRoundKib, parity ^= 1) {
      __syncthreads();
      const int64_t left = work.shape.kib - done;
      const int scrambled = static_cast<int>(left < kRoundKib ? left : kRoundKib);
      const uint64_t(*sums)[8] = shared[parity];
#pragma unroll 8
      for (int k = 0; k < scrambled; ++k) chain.Scrambled(sums[k][chain.accumulator()]);
      if (scrambled < kRoundKib) chain.Add(sums[scrambled][chain.accumulator()]);
    }
    const uint64_t hash = chain.Finish();
    if (lane == 0) hashes[block] = hash;
  }
}

template <Fate kFate>
__device__ __forceinline__ void Hash(uint64_t* hashes, const Work& work, Sums shared) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    ChainUp<kFate>(work, hashes, shared, lane);
  } else {
    AddUp<kFate>(work, shared, warp - 1, lane);
  }
}

#endif

unsigned Grid(int64_t blocks, int most) { return static_cast<unsigned>(blocks < most ? blocks : most); }

}  // namespace

#if !defined(KVTIER_DRIVER)
extern "C" {

__global__ void __launch_bounds__(kThreads) kvtier_hash_blocks(uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks,
                                                               int64_t bytes) {
  __shared__ uint64_t shared[2][kRoundKib][8];
  Hash<Fate::kStay>(sums, {pool, nullptr, pool_offsets, nullptr, blocks, BlockShape(bytes)}, shared);
}

__global__ void __launch_bounds__(kThreads) kvtier_export_blocks(uint64_t* sums, uint8_t* host, const uint8_t* pool, const int64_t* host_offsets,
                                                                 const int64_t* pool_offsets, int64_t blocks, int64_t bytes) {
  __shared__ uint64_t shared[2][kRoundKib][8];
  Hash<Fate::kOut>(sums, {pool, host, pool_offsets, host_offsets, blocks, BlockShape(bytes)}, shared);
}

__global__ void __launch_bounds__(kThreads) kvtier_import_blocks(uint64_t* sums, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets,
                                                                 const int64_t* host_offsets, int64_t blocks, int64_t bytes) {
  __shared__ uint64_t shared[2][kRoundKib][8];
  Hash<Fate::kIn>(sums, {host, pool, host_offsets, pool_offsets, blocks, BlockShape(bytes)}, shared);
}

}  // extern "C"
#endif

void HashBlocks(Stream& stream, uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes, int grid) {
  if (blocks == 0) return;
  gpu::Launch(stream, "hash_blocks", kvtier_hash_blocks, {Grid(blocks, grid)}, {kThreads}, 0, sums, pool, pool_offsets, blocks, bytes);
}

void ExportBlocks(Stream& stream, uint64_t* sums, uint8_t* host, const uint8_t* pool, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t blocks, int64_t bytes, int grid) {
  if (blocks == 0) return;
  gpu::Launch(stream, "export_blocks", kvtier_export_blocks, {Grid(blocks, grid)}, {kThreads}, 0, sums, host, pool, host_offsets, pool_offsets,
              blocks, bytes);
}

void ImportBlocks(Stream& stream, uint64_t* sums, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t blocks, int64_t bytes, int grid) {
  if (blocks == 0) return;
  gpu::Launch(stream, "import_blocks", kvtier_import_blocks, {Grid(blocks, grid)}, {kThreads}, 0, sums, pool, host, pool_offsets, host_offsets,
              blocks, bytes);
}

}  // namespace kvtier::cuda
