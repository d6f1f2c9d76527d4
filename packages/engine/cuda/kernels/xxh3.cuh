// The parts of XXH3-64 (seed 0, default secret) of KV blocks where they lie: in GPU memory. The algorithm is Yann Collet's, XXH3 for
// inputs longer than 240 bytes; what it computes is bit for bit what packages/base/data-plane/cc/xxh3.h does.
//
// XXH3 looks serial: 8 accumulators take in 64-byte stripes, and after 16 stripes (1 KiB) they are scrambled. But within
// a KiB all stripes only add to the accumulators, so its sums are computed without knowing what came before, and the serial
// part is eight multiplications per KiB:
//
//   KiB k of a block      64 vectors of 16 bytes; lane l holds vectors l and l + 32: stripes l/4 and l/4 + 8, accumulators
//                         2 (l%4) and the one after
//   sums[k][0..7]         butterfly over the eight lanes of equal l % 4; four KiB at a time, so that nothing is reduced twice
//   acc = scramble(acc + sums[k])      by one warp
//
// Who uses them: xxh3.cu, a thread block a pool block; xxh3_apart.cu, sums by all of the GPU, then a warp a pool block.
#pragma once
#include "../gpu/device.h"

namespace kvtier::cuda {
namespace {

constexpr int kWarpKib = 4;  // of a warp at a time

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

// What is the same of all blocks of a call.
struct BlockShape {
  explicit __device__ BlockShape(int64_t bytes) : bytes(bytes), stripes((bytes - 1) / kStripeBytes), kib((bytes - 1) / 1024) {}
  int64_t bytes;
  int64_t stripes;  // before the last one
  int64_t kib;      // whole ones that are scrambled; what follows counts as one more
};

// A warp's way through KiB: what each lane holds of four of them, and which of their sums it ends up with.
class KibSums {
 public:
  explicit __device__ KibSums(unsigned lane) : lane_(lane), stripe_(lane / 4), pair_(lane % 4) {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) keys_[i] = kSecret[stripe_ + i / 2 * 8 + 2 * pair_ + i % 2];
  }
  __device__ __forceinline__ void Load(const BlockShape& shape, const uint8_t* data, int64_t first_kib) {
#pragma unroll
    for (int i = 0; i < 2 * kWarpKib; ++i) {
      const int64_t stripe = StripeOf(first_kib, i);
      if (stripe < shape.stripes) vectors_[i] = gpu::LoadStreaming(reinterpret_cast<const uint4*>(data + stripe * kStripeBytes) + pair_);
    }
  }
  // Of what was loaded; `each` gets every vector and its place in the block, in bytes. What Reduce needs is left in `sums`.
  template <class Each>
  __device__ __forceinline__ void Add(const BlockShape& shape, int64_t first_kib, uint64_t (&sums)[2 * kWarpKib], const Each& each) const {
#pragma unroll
    for (int i = 0; i < 2 * kWarpKib; ++i) {
      const int64_t stripe = StripeOf(first_kib, i);
      if (stripe >= shape.stripes) continue;
      Accumulate(sums[i / 2 * 2], sums[i / 2 * 2 + 1], vectors_[i], keys_[i % 2 * 2], keys_[i % 2 * 2 + 1]);
      each(vectors_[i], stripe * kStripeBytes + pair_ * 16);
    }
  }
  // This lane's sum of all lanes': accumulator() of KiB row().
  __device__ __forceinline__ uint64_t Reduce(uint64_t (&sums)[2 * kWarpKib]) const {
    ReduceStep<4>(sums, lane_, 16);
    ReduceStep<2>(sums, lane_, 8);
    ReduceStep<1>(sums, lane_, 4);
    return sums[0];
  }
  __device__ __forceinline__ unsigned row() const { return Which() / 2; }
  __device__ __forceinline__ unsigned accumulator() const { return 2 * pair_ + Which() % 2; }

 private:
  __device__ __forceinline__ int64_t StripeOf(int64_t first_kib, int i) const { return (first_kib + i / 2) * kKibStripes + i % 2 * 8 + stripe_; }
  // The bits of lane / 4 say which of the eight sums is left, the highest first.
  __device__ __forceinline__ unsigned Which() const { return (lane_ >> 4 & 1) * 4 + (lane_ >> 3 & 1) * 2 + (lane_ >> 2 & 1); }

  const unsigned lane_, stripe_, pair_;
  uint64_t keys_[4];
  uint4 vectors_[2 * kWarpKib];
};

// The serial part. Every lane of a warp has accumulator lane % 8.
class Chain {
 public:
  // `data`: the block's; its last 64 bytes are read at once.
  __device__ Chain(const BlockShape& shape, const uint8_t* data, unsigned lane)
      : bytes_(shape.bytes), accumulator_(static_cast<int>(lane % 8)), key_(kSecret[kScrambleWord + accumulator_]), acc_(Initial(accumulator_)) {
    const auto* const end = reinterpret_cast<const uint64_t*>(data + shape.bytes - kStripeBytes);
    last_[0] = end[accumulator_];
    last_[1] = end[accumulator_ ^ 1];
  }
  __device__ __forceinline__ int accumulator() const { return accumulator_; }
  __device__ __forceinline__ void Add(uint64_t sum) { acc_ += sum; }
  __device__ __forceinline__ void Scrambled(uint64_t sum) { acc_ = Scramble(acc_ + sum, key_); }
  __device__ uint64_t Finish() const {
    const uint64_t acc = acc_ + last_[1] + ProductOfHalves(last_[0] ^ SecretAt(kLastByte + 8 * accumulator_));
    const uint64_t mixed = acc ^ SecretAt(kMergeByte + 8 * accumulator_);
    const uint64_t folded = FoldedProduct(mixed, __shfl_xor_sync(kAllLanes, mixed, 1));
    uint64_t hash = folded + __shfl_xor_sync(kAllLanes, folded, 2);
    hash += __shfl_xor_sync(kAllLanes, hash, 4);
    hash += static_cast<uint64_t>(bytes_) * kPrime64_1;
    hash ^= hash >> 37;
    hash *= kAvalanche;
    return hash ^ hash >> 32;
  }

 private:
  const int64_t bytes_;
  const int accumulator_;
  const uint64_t key_;
  uint64_t acc_, last_[2];
};

#endif

}  // namespace
}  // namespace kvtier::cuda
