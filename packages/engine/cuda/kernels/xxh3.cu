// XXH3-64 (seed 0, default secret) of KV blocks where they lie: in GPU memory. The algorithm is Yann Collet's, XXH3 for
// inputs longer than 240 bytes; what it computes is bit for bit what packages/base/data-plane/cc/xxh3.h does.
//
// XXH3 looks serial: 8 accumulators take in 64-byte stripes, and after 16 stripes (1 KiB) they are scrambled. But within
// a KiB all stripes only add to the accumulators, so its sums are computed without knowing what came before, and the serial
// part is eight multiplications per KiB:
//
//   KiB k of a block      64 vectors of 16 bytes; lane l holds vectors l and l + 32: stripes l/4 and l/4 + 8, accumulators
//                         2 (l%4) and the one after
//   sums[k][0..7]         butterfly over the eight lanes of equal l % 4; four KiB at a time, so that nothing is reduced twice
//   acc = scramble(acc + sums[k])      by one warp, a round behind the eight warps that add up
//
//   warps 1..8   | load r+1, reduce r, store sums r | barrier | load r+2, reduce r+1 ...
//   warp 0       |                                  | barrier | chain the 32 KiB of round r ...
//
// One thread block per pool block, 32 KiB of it in flight. Bytes: each once. A few of them keep up with any bus: the caller says
// how many, so that the rest of the GPU keeps computing.
#include "../gpu/device.h"
#include "kernels.h"
#include "transfer_kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int kSumWarps = 8;
constexpr int kWarpKib = 4;                         // per warp and round
constexpr int kRoundKib = kSumWarps * kWarpKib;
constexpr int kThreads = 32 * (1 + kSumWarps);

#if !defined(KVTIER_DRIVER)
using gpu::kAllLanes;

constexpr int64_t kStripeBytes = 64;
constexpr int64_t kKibStripes = 16;

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u,
                   kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t kAvalanche = 0x165667919E3779F9u;

// The default secret of XXH3, as little-endian words.
__device__ const uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u,
    0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u,
    0x49daf0b751dd0d17u, 0x9e68d429265516d3u, 0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

constexpr int kScrambleWord = 16;  // (192 - 64) / 8: the secret of the scramble
constexpr int kLastByte = 121;     // 192 - 64 - 7: of the last stripe
constexpr int kMergeByte = 11;     // of the merge

// Eight bytes of the secret that are not aligned.
__device__ __forceinline__ uint64_t SecretAt(int byte) {
  const int word = byte / 8, shift = 8 * (byte % 8);
  return kSecret[word] >> shift | kSecret[word + 1] << (64 - shift);
}

__device__ __forceinline__ uint64_t Initial(int accumulator) {
  switch (accumulator) {
    case 0: return kPrime32_3;
    case 1: return kPrime64_1;
    case 2: return kPrime64_2;
    case 3: return kPrime64_3;
    case 4: return kPrime64_4;
    case 5: return kPrime32_2;
    case 6: return kPrime64_5;
    default: return kPrime32_1;
  }
}

__device__ __forceinline__ uint64_t Word(unsigned low, unsigned high) { return static_cast<uint64_t>(high) << 32 | low; }

__device__ __forceinline__ uint64_t ProductOfHalves(uint64_t x) { return (x & 0xffffffffu) * (x >> 32); }

// One vector's part of its two accumulators.
__device__ __forceinline__ void Accumulate(uint64_t& even, uint64_t& odd, uint4 vector, uint64_t even_key, uint64_t odd_key) {
  const uint64_t first = Word(vector.x, vector.y), second = Word(vector.z, vector.w);
  even += second + ProductOfHalves(first ^ even_key);
  odd += first + ProductOfHalves(second ^ odd_key);
}

__device__ __forceinline__ uint64_t Scramble(uint64_t acc, uint64_t key) { return (acc ^ acc >> 47 ^ key) * kPrime32_1; }

__device__ __forceinline__ uint64_t FoldedProduct(uint64_t a, uint64_t b) { return a * b ^ __umul64hi(a, b); }

// Halves what a lane holds and what its partner at `distance` holds of the same sums, until each lane has one sum of all.
template <int Count>
__device__ __forceinline__ void ReduceStep(uint64_t (&sums)[8], unsigned lane, int distance) {
  const bool upper = (lane & static_cast<unsigned>(distance)) != 0;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const uint64_t mine = upper ? sums[i + Count] : sums[i];
    const uint64_t given = upper ? sums[i] : sums[i + Count];
    sums[i] = mine + __shfl_xor_sync(kAllLanes, given, distance);
  }
}

struct Block {
  const uint8_t* data;
  int64_t stripes;  // before the last one
  int64_t kib;      // whole ones that are scrambled; what follows counts as one more
  int64_t rounds;
};

__device__ __forceinline__ void LoadKib(uint4 (&vectors)[2 * kWarpKib], const Block& block, int64_t first_kib, unsigned lane) {
#pragma unroll
  for (int i = 0; i < 2 * kWarpKib; ++i) {
    const int64_t stripe = (first_kib + i / 2) * kKibStripes + i % 2 * 8 + lane / 4;
    if (stripe < block.stripes) vectors[i] = gpu::LoadStreaming(reinterpret_cast<const uint4*>(block.data + stripe * kStripeBytes) + lane % 4);
  }
}

// Warps 1..kSumWarps: sums of each KiB of the block, a round per barrier.
__device__ void AddUp(const Block& block, uint64_t (*shared)[kRoundKib][8], unsigned warp, unsigned lane) {
  const unsigned stripe = lane / 4, pair = lane % 4;
  const uint64_t keys[4] = {kSecret[stripe + 2 * pair], kSecret[stripe + 2 * pair + 1], kSecret[stripe + 8 + 2 * pair],
                            kSecret[stripe + 8 + 2 * pair + 1]};
  uint4 vectors[2 * kWarpKib];
  int64_t first = static_cast<int64_t>(warp) * kWarpKib;
  LoadKib(vectors, block, first, lane);
  for (int64_t round = 0; round < block.rounds; ++round, first += kRoundKib) {
    uint64_t sums[2 * kWarpKib] = {};  // [KiB][even, odd]
#pragma unroll
    for (int i = 0; i < 2 * kWarpKib; ++i) {
      const bool valid = (first + i / 2) * kKibStripes + i % 2 * 8 + stripe < block.stripes;
      if (valid) Accumulate(sums[i / 2 * 2], sums[i / 2 * 2 + 1], vectors[i], keys[i % 2 * 2], keys[i % 2 * 2 + 1]);
    }
    LoadKib(vectors, block, first + kRoundKib, lane);
    ReduceStep<4>(sums, lane, 16);
    ReduceStep<2>(sums, lane, 8);
    ReduceStep<1>(sums, lane, 4);
    // The bits of lane / 4 say which of the eight sums is left, the highest first.
    const unsigned which = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    shared[round & 1][warp * kWarpKib + which / 2][2 * pair + which % 2] = sums[0];
    __syncthreads();
  }
}

// Warp 0: the serial part. Every lane computes accumulator lane % 8.
__device__ uint64_t Chain(const Block& block, uint64_t (*shared)[kRoundKib][8], unsigned lane) {
  const int accumulator = static_cast<int>(lane % 8);
  const uint64_t key = kSecret[kScrambleWord + accumulator];
  uint64_t acc = Initial(accumulator);
  for (int64_t round = 0; round < block.rounds; ++round) {
    __syncthreads();
    const int64_t left = block.kib - round * kRoundKib;  // to be scrambled
    const int scrambled = static_cast<int>(left < kRoundKib ? left : kRoundKib);
    const uint64_t(*sums)[8] = shared[round & 1];
#pragma unroll 8
    for (int k = 0; k < scrambled; ++k) acc = Scramble(acc + sums[k][accumulator], key);
    if (scrambled < kRoundKib) acc += sums[scrambled][accumulator];
  }
  return acc;
}

__device__ uint64_t Finish(uint64_t acc, const uint8_t* data, int64_t bytes, unsigned lane) {
  const int accumulator = static_cast<int>(lane % 8);
  const auto* last = reinterpret_cast<const uint64_t*>(data + bytes - kStripeBytes);
  acc += last[accumulator ^ 1] + ProductOfHalves(last[accumulator] ^ SecretAt(kLastByte + 8 * accumulator));
  const uint64_t mixed = acc ^ SecretAt(kMergeByte + 8 * accumulator);
  const uint64_t folded = FoldedProduct(mixed, __shfl_xor_sync(kAllLanes, mixed, 1));
  uint64_t hash = folded + __shfl_xor_sync(kAllLanes, folded, 2);
  hash += __shfl_xor_sync(kAllLanes, hash, 4);
  hash += static_cast<uint64_t>(bytes) * kPrime64_1;
  hash ^= hash >> 37;
  hash *= kAvalanche;
  return hash ^ hash >> 32;
}

#endif

}  // namespace

#if !defined(KVTIER_DRIVER)
extern "C" __global__ void __launch_bounds__(kThreads) kvtier_hash_blocks(uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets,
                                                                          int64_t blocks, int64_t bytes) {
  __shared__ uint64_t shared[2][kRoundKib][8];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Block block;
  block.stripes = (bytes - 1) / kStripeBytes;
  block.kib = (bytes - 1) / 1024;
  block.rounds = block.kib / kRoundKib + 1;
  for (int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    block.data = pool + pool_offsets[i];
    if (warp == 0) {
      const uint64_t hash = Finish(Chain(block, shared, lane), block.data, bytes, lane);
      if (lane == 0) sums[i] = hash;
    } else {
      AddUp(block, shared, warp - 1, lane);
    }
    __syncthreads();  // nobody overwrites the sums of the last round before they are chained
  }
}
#endif

void HashBlocks(Stream& stream, uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes, int grid) {
  if (blocks == 0) return;
  gpu::Launch(stream, "hash_blocks", kvtier_hash_blocks, {static_cast<unsigned>(blocks < grid ? blocks : grid)}, {kThreads}, 0, sums, pool, pool_offsets, blocks, bytes);
}

}  // namespace kvtier::cuda
