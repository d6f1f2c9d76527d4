// What the attention kernels have in common: which rows a block works on, where keys lie, swizzled tiles, online softmax in
// the fragments of mma.m16n8k16.
//
// Rows are packed: row r of a sequence and KV head is query r / group of head r % group among the `group` heads that share the
// KV head, so that a tile of rows is full even when there are few queries, and K/V are read once for all of them.
//
// Invariant: a key outside [first, end) of a tile's rows is never read: neither what it holds nor its table entry, whatever
// stands there. In shared memory it is zeros, and masked.
//
// Ideas: FlashAttention-2 (Dao, 2023) for the tiles and the softmax in registers, FlashDecoding for the split over keys,
// PagedAttention (vLLM) for the blocks.
#pragma once
#include <cstdint>

#include "../gpu/device.h"
#include "attention.h"

namespace kvtier::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNoScore = -INFINITY;

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x & 31); }

// One sequence of the batch, seen from one attention group.
struct SequenceView {
  int32_t row, queries, computed, group, window;
  const int32_t* table;

  __device__ SequenceView(const AttentionArgs& a, const Batch& b, int32_t sequence)
      : row(b.query_start[sequence]),
        queries(b.query_start[sequence + 1] - b.query_start[sequence]),
        computed(b.computed[sequence]),
        group(a.heads / a.kv.kv_heads),
        window(a.window),
        table(a.table + sequence * b.table_stride) {}

  __device__ int32_t rows() const { return queries * group; }
  // The position of a packed row's query; rows past the end stand where the last one does.
  __device__ int32_t position(int32_t packed) const { return computed + min(packed, rows() - 1) / group; }
  // The keys that rows from `first_row` on see start here.
  __device__ int32_t first_key(int32_t first_row) const { return window == 0 ? 0 : max(0, position(first_row) - window + 1); }
  // Where a packed row's vector starts in an array of [row][heads x head_dim], in elements.
  __device__ int64_t element(const AttentionArgs& a, int32_t packed, int32_t kv_head, int64_t stride) const {
    return (row + packed / group) * stride + (kv_head * group + packed % group) * a.kv.head_dim;
  }
};

// Where the key of `token` lies, from the pool's start, in units of 128 bytes: `token` is the first of 8 that follow one another
// in memory, as blocks hold multiples of 8, and 8 rows of a multiple of 16 numbers are a multiple of 128 bytes. 0 outside [first, end).
constexpr int64_t kKeyUnit = 128;
__device__ __forceinline__ uint32_t LocateKeys(const PagedKv& kv, const int32_t* table, int32_t kv_head, int32_t token, int32_t first,
                                               int32_t end) {
  if (token + 8 <= first || token >= end) return 0;
  const int32_t entry = static_cast<int32_t>(static_cast<uint32_t>(token) / static_cast<uint32_t>(kv.block_tokens));
  const int64_t offset = table[entry] * kv.block_bytes + kv.layer_offset + kv.Row(0, kv_head, token - entry * kv.block_tokens);
  return static_cast<uint32_t>(offset / kKeyUnit);
}

// Tiles in shared memory have rows of kChunks chunks of 16 bytes (8 n or 8 n + 4), permuted so that the same chunk of 8 following
// rows lies in 8 different groups of banks, as ldmatrix wants it: chunk c of row r is at c ^ Mix(r).
template <int kChunks>
__device__ __forceinline__ int Mix(int row) {
  static_assert(kChunks % 4 == 0);
  return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
// Byte offset of a chunk.
template <int kChunks>
__device__ __forceinline__ int Swizzled(int row, int chunk) {
  return (row * kChunks + (chunk ^ Mix<kChunks>(row))) * 16;
}
// What a lane gives to ldmatrix: row `row` of a 16-row piece, the even or odd chunk of a pair. Pairs and pieces then cost one
// exclusive or and an immediate.
template <int kChunks>
struct LaneRow {
  int base, mix;
  __device__ LaneRow(int row, int odd) : base(row * kChunks * 16), mix((odd ^ Mix<kChunks>(row)) * 16) {}
  // Byte offset in a tile; `rows` is a multiple of 16.
  __device__ int at(int rows, int pair) const { return base + (mix ^ (pair * 32)) + rows * kChunks * 16; }
  // At the top of a loop: else the compiler computes the offsets of all pairs before it, and accumulators are spilled for them.
  __device__ void ForgetPairs() { asm volatile("" : "+r"(mix)); }
};
// Left operands of mma.m16n8k16, and right operands by transposing: rows of lanes 0 to 15, then the same of the odd chunk.
template <int kChunks>
__device__ __forceinline__ LaneRow<kChunks> LeftRow() {
  return {Lane() & 15, Lane() >> 4};
}
// Right operands as they lie: 8 rows, even and odd, then the next 8.
template <int kChunks>
__device__ __forceinline__ LaneRow<kChunks> RightRow() {
  return {(Lane() & 7) + ((Lane() >> 4) << 3), (Lane() >> 3) & 1};
}

// Two e4m3 numbers, the first in the low byte, as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t WidenPair(uint32_t two) {
#if defined(KVTIER_EMULATED)
  return gpu::PackFloats<T>(ToFloat(e4m3{static_cast<uint8_t>(two)}), ToFloat(e4m3{static_cast<uint8_t>(two >> 8)}));
#else
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  if constexpr (NumberTypeOf<T>::value == NumberType::kF16) {
    return PackPair(half.x, half.y);
  } else {
    const float2 both = __half22float2(__half2(half));
    return gpu::PackFloats<T>(both.x, both.y);
  }
#endif
}
template <class T>
__device__ __forceinline__ uint4 WidenEight(unsigned low, unsigned high) {
  return make_uint4(WidenPair<T>(low & 0xffff), WidenPair<T>(low >> 16), WidenPair<T>(high & 0xffff), WidenPair<T>(high >> 16));
}

// Fragments. d[0], d[1]: row lane / 4, columns 2 (lane % 4) and the next; d[2], d[3]: the same of row lane / 4 + 8.
// Scores s[j] are columns (keys) 8 j to 8 j + 7.

// cap * tanh(s * scale / cap), by 2^x: what the softmax then scales by log2(e) only.
template <int kTiles>
__device__ __forceinline__ void CapScores(float (&s)[kTiles][4], float scale, float cap) {
  const float inner = 2 * kLog2E * scale / cap;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[j][e] = cap - __fdividef(2 * cap, gpu::Exp2(s[j][e] * inner) + 1);
  }
}

// What the two rows of this lane, at positions low and high, do not see.
template <int kTiles>
__device__ __forceinline__ void MaskScores(float (&s)[kTiles][4], int32_t first_key, int32_t low, int32_t high, int32_t window) {
  const int32_t reach = window == 0 ? INT32_MAX : window;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t behind = (e < 2 ? low : high) - (first_key + 8 * j + 2 * (Lane() & 3) + (e & 1));
      if (behind < 0 || behind >= reach) s[j][e] = kNoScore;
    }
  }
}

// One step of the online softmax: s become probabilities against the new maximum, o and sum are brought down to it. max is the
// raw score; `scale_log2` > 0 takes it to base 2. sum stays this lane's own part until QuadSum.
template <int kTiles, int kOut>
__device__ __forceinline__ void OnlineSoftmax(float (&s)[kTiles][4], float (&o)[kOut][4], float (&max)[2], float (&sum)[2],
                                              float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = max[half];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) top = fmaxf(top, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(gpu::kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(gpu::kAllLanes, top, 2));
    const float base = top == kNoScore ? 0 : top * scale_log2;  // a row that has seen no key yet: no inf - inf
    const float shrink = gpu::Exp2(max[half] * scale_log2 - base);
    max[half] = top;
    float added = 0;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[j][e] = gpu::Exp2(s[j][e] * scale_log2 - base);
        added += s[j][e];
      }
    }
    sum[half] = sum[half] * shrink + added;
#pragma unroll
    for (int j = 0; j < kOut; ++j) {
      o[j][2 * half] *= shrink;
      o[j][2 * half + 1] *= shrink;
    }
  }
}

__device__ __forceinline__ float QuadSum(float value) {
  value += __shfl_xor_sync(gpu::kAllLanes, value, 1);
  return value + __shfl_xor_sync(gpu::kAllLanes, value, 2);
}

// The probabilities of keys 16 step to 16 step + 15 as the left operand of P x V.
template <class T, int kTiles>
__device__ __forceinline__ void PackProbabilities(uint32_t (&p)[4], const float (&s)[kTiles][4], int step) {
  p[0] = gpu::PackFloats<T>(s[2 * step][0], s[2 * step][1]);
  p[1] = gpu::PackFloats<T>(s[2 * step][2], s[2 * step][3]);
  p[2] = gpu::PackFloats<T>(s[2 * step + 1][0], s[2 * step + 1][1]);
  p[3] = gpu::PackFloats<T>(s[2 * step + 1][2], s[2 * step + 1][3]);
}

// Two following tiles of 8 columns; b as ldmatrix gives it.
template <class T>
__device__ __forceinline__ void MultiplyAddPair(float (&first)[4], float (&second)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
  gpu::MultiplyAdd16816<T>(first, a, low);
  gpu::MultiplyAdd16816<T>(second, a, high);
}

// One row's parts, each with its maximum and sum, as weights that make their sum the result; the maximum and sum of all. By one warp;
// the weights are written last, behind all that brings its lanes together. Part i is summed in the place (`place` + i) % kMost, so that parts
// without keys for this row, before it and behind, change no bit.
template <int kMost, class Load>
__device__ __forceinline__ float2 MergeWeights(float* weights, int parts, int place, float scale_log2, const Load& load) {
  constexpr int kEach = (kMost + 31) / 32;
  static_assert((kMost & (kMost - 1)) == 0);
  const auto part = [&](int j) { return Lane() + 32 * j < kMost ? (Lane() + 32 * j - place) & (kMost - 1) : kMost; };
  float mine[kEach];
  float max = kNoScore, sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    mine[j] = part(j) < parts ? load(part(j)).x : kNoScore;
    max = fmaxf(max, mine[j]);
  }
  max = gpu::WarpMax(max);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    mine[j] = mine[j] == kNoScore ? 0 : gpu::Exp2((mine[j] - max) * scale_log2);
    if (part(j) < parts) sum += mine[j] * load(part(j)).y;
  }
  sum = gpu::WarpSum(sum);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (part(j) < parts) weights[part(j)] = mine[j];
  }
  return make_float2(max, sum);
}

__device__ __forceinline__ void AddWeighted(float4& sum, float weight, const float4& add) {
  sum = make_float4(sum.x + weight * add.x, sum.y + weight * add.y, sum.z + weight * add.z, sum.w + weight * add.w);
}

// Where the parts of one tile and KV head lie in the workspace, and where the tile's result goes.
template <class T, int kDimension>
struct Parts {
  float* outputs;
  float2* totals;
  const SequenceView& view;
  int32_t first_row, kv_head, kv_heads, rows, parts, place;

  __device__ Parts(const AttentionArgs& a, const AttentionUnits& units, const AttentionItem& item, const SequenceView& of, int32_t head)
      : outputs(reinterpret_cast<float*>(static_cast<uint8_t*>(a.workspace) + PartsWorkspace::TicketBytes(units.workspace_rows))),
        totals(reinterpret_cast<float2*>(outputs + int64_t{units.workspace_rows} * kDimension) + item.slot),
        view(of),
        first_row(item.first_row),
        kv_head(head),
        kv_heads(a.kv.kv_heads),
        rows(item.rows),
        parts(item.parts),
        place(item.place) {
    outputs += int64_t{item.slot} * kDimension;
  }
  __device__ int64_t at(int32_t part, int32_t row) const { return (int64_t{part} * kv_heads + kv_head) * rows + row; }
  __device__ float* output(int32_t part, int32_t row) const { return outputs + at(part, row) * kDimension; }
  __device__ float2* total(int32_t part, int32_t row) const { return totals + at(part, row); }

  // Four numbers of a row's result.
  __device__ void Write(const AttentionArgs& a, int32_t row, int32_t quad, const float4& value) const {
    if (quad * 4 >= a.kv.head_dim) return;
    T* const target = static_cast<T*>(a.out) + view.element(a, first_row + row, kv_head, int64_t{a.heads} * a.kv.head_dim) + quad * 4;
    *reinterpret_cast<uint2*>(target) = make_uint2(gpu::PackFloats<T>(value.x, value.y), gpu::PackFloats<T>(value.z, value.w));
  }
  // One row's parts, in their order, by one warp. weights: kMostParts of shared memory, of this row alone.
  __device__ void Merge(const AttentionArgs& a, int32_t row, float* weights, float scale_log2) const {
    const float2 sum = MergeWeights<kMostParts>(weights, parts, place, scale_log2, [&](int i) { return *total(i, row); });
    __syncwarp();
    const float inverse = 1 / sum.y;
    for (int quad = Lane(); quad < kDimension / 4; quad += 32) {
      float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = 0; i < parts; ++i) AddWeighted(value, weights[i] * inverse, *reinterpret_cast<const float4*>(output(i, row) + quad * 4));
      Write(a, row, quad, value);
    }
  }
};

// Calls launch.template operator()<Kv, kDim>() for the KV type and the tile width that holds head_dim: 32 goes into 64, 80
// into 96; what is too wide is zeros in shared memory and costs no global traffic.
template <class T, class Fn>
void ForAttentionShape(const PagedKv& kv, const Fn& launch) {
  const auto with_type = [&]<class Kv>(Kv) {
    if (kv.head_dim <= 64) {
      launch.template operator()<Kv, 64>();
    } else if (kv.head_dim <= 96) {
      launch.template operator()<Kv, 96>();
    } else if (kv.head_dim <= 128) {
      launch.template operator()<Kv, 128>();
    } else {
      launch.template operator()<Kv, 256>();
    }
  };
  if (kv.type == NumberType::kE4m3) {
    with_type(e4m3{});
  } else {
    with_type(T{});
  }
}

}  // namespace kvtier::cuda
