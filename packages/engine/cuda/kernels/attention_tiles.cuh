// Attention over large tiles of rows, against tiles of 64 keys on tensor cores. Included by attention_tiles_*.cu, one file per
// type so that they compile side by side.
//
// A block has 4 warps of 32 rows (16 for head_dim 256, whose outputs fill the registers) and goes through the keys that its
// item of the plan (attention_plan.h) names: all that its rows see, or one part of them, whose result stays in the workspace for
// attention_merge.cu. Shared memory holds the queries and one tile each of keys and values:
//
//     wait K | sync | start V | S = Q K^T | wait V | sync | start next K | softmax | O += P V
//
// so that values arrive under the scores and the next keys under softmax and P V; two blocks share a multiprocessor and fill
// each other's waits. e4m3 arrives in a buffer where each thread widens just what it copied itself.
//
// Work per (query, head): 4 x head_dim FLOPs per key seen. Bytes: K/V once per tile of rows (from L2 mostly), Q and O once.
#pragma once
#include "attention.cuh"

namespace kvtier::cuda {

template <class T, class Kv, int kDimension>
struct RowTile {
  static constexpr int kDim = kDimension;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kFragments = kDim <= 128 ? 2 : 1;  // of 16 rows, per warp
  static constexpr int kWarpRows = 16 * kFragments, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = 64;
  static constexpr int kChunks = kDim / 8;                                      // of 16 bytes, per row of T
  static constexpr int kVectors = kDim * static_cast<int>(sizeof(Kv)) / 16;     // of 16 bytes, per key in memory
  static constexpr bool kWiden = sizeof(Kv) == 1;
  static constexpr int kQueryBytes = kRows * kDim * 2, kTileBytes = kKeys * kDim * 2;
  static constexpr int kRawBytes = kWiden ? kKeys * kDim : 0;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kTileBytes + kRawBytes;
  static_assert(kSharedBytes <= static_cast<int>(kDim <= 128 ? kLeastSharedBytes : kWideHeadsSharedBytes));

  // Whether a tile follows is compared twice where ptxas spills for the answer, and once where it spills for the comparison.
  static constexpr bool kAskAgain = kDim == 128 && !(kWiden && NumberTypeOf<T>::value == NumberType::kF16);

  static constexpr int kPasses = kKeys * kVectors / kThreads;
  static_assert(kPasses * kThreads == kKeys * kVectors);

  // fn(key of the tile, 16-byte vector, index of both) for what this thread copies.
  template <class Fn>
  static __device__ __forceinline__ void ForVectors(const Fn& fn) {
    const auto thread = static_cast<int>(threadIdx.x % kThreads);  // the compiler learns the bound
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = thread + pass * kThreads;
      if constexpr (kThreads % kVectors == 0) {
        fn(thread / kVectors + pass * (kThreads / kVectors), thread % kVectors, i);
      } else {
        fn(i / kVectors, i % kVectors, i);
      }
    }
  }

  // Starts the copy of one tile of keys (or values): `pool` includes the distance from keys to values; lane i % 8 of each warp
  // gives LocateKeys of the tile's keys 8 i to 8 i + 7 in `place`.
  static __device__ __forceinline__ void Start(uint8_t* tile, uint8_t* raw, const uint8_t* pool, uint32_t place, int32_t key,
                                               int32_t first, int32_t end, int32_t head_dim) {
    const int row_bytes = head_dim * static_cast<int>(sizeof(Kv));
    ForVectors([&](int row, int vector, int i) {
      const int64_t offset = __shfl_sync(gpu::kAllLanes, place, row >> 3) * kKeyUnit + (row & 7) * row_bytes + vector * 16;
      const bool valid = key + row >= first && key + row < end && vector * 16 < row_bytes;
      gpu::CopyAsync16(kWiden ? raw + i * 16 : tile + Swizzled<kChunks>(row, vector), pool + offset, valid);
    });
    gpu::CopyAsyncCommit();
  }

  // Waits for what this thread started; what others did needs __syncthreads as well.
  static __device__ __forceinline__ void Finish(uint8_t* tile, const uint8_t* raw) {
    gpu::CopyAsyncWait<0>();
    if constexpr (kWiden) {
      ForVectors([&](int row, int vector, int i) {
        const uint4 packed = *reinterpret_cast<const uint4*>(raw + i * 16);
        *reinterpret_cast<uint4*>(tile + Swizzled<kChunks>(row, 2 * vector)) = WidenEight<T>(packed.x, packed.y);
        *reinterpret_cast<uint4*>(tile + Swizzled<kChunks>(row, 2 * vector + 1)) = WidenEight<T>(packed.z, packed.w);
      });
    }
  }
};

template <class T, class Kv, int kDimension>
__global__ void __launch_bounds__(128, 2) AttentionTilesKernel(AttentionArgs a, Batch b, AttentionUnits units) {
  using Tile = RowTile<T, Kv, kDimension>;
  constexpr int kFragments = Tile::kFragments, kChunks = Tile::kChunks, kKeys = Tile::kKeys;
  KVTIER_DYNAMIC_SHARED(shared);
  uint8_t* const queries = shared;
  uint8_t* const keys = queries + Tile::kQueryBytes;
  uint8_t* const values = keys + Tile::kTileBytes;
  uint8_t* const raw = values + Tile::kTileBytes;

  // Read again behind the loop: registers are scarce in it.
  const auto item = [&]() -> const AttentionItem& { return units.items[blockIdx.x]; };
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const SequenceView view(a, b, item().sequence);
  const int32_t first_row = item().first_row, first = item().first, end = item().end;
  const int32_t head_dim = a.kv.head_dim;
  const uint8_t* const pool = static_cast<const uint8_t*>(a.kv.pool);
  const int64_t to_values = a.kv.Row(1, 0, 0);
  const auto locate = [&](int32_t key) { return LocateKeys(a.kv, view.table, kv_head, key + 8 * (Lane() & 7), first, end); };

  int32_t key = first / kKeys * kKeys;
  uint32_t place = locate(key);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kChunks; i += Tile::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool valid = first_row + row < view.rows() && chunk * 8 < head_dim;
    const T* source = static_cast<const T*>(a.q) + (valid ? view.element(a, first_row + row, kv_head, a.q_stride) + chunk * 8 : 0);
    gpu::CopyAsync16(queries + Swizzled<kChunks>(row, chunk), source, valid);
  }
  Tile::Start(keys, raw, pool, place, key, first, end, head_dim);

  const int warp_row = static_cast<int>(threadIdx.x / 32) * Tile::kWarpRows;
  const uint8_t* const warp_queries = queries + warp_row * kChunks * 16;
  LaneRow<kChunks> left = LeftRow<kChunks>(), right = RightRow<kChunks>();
  // Positions of this warp's first and last row; a warp without rows sees nothing.
  const int32_t warp_low = view.position(first_row + warp_row);
  const int32_t warp_high = first_row + warp_row < view.rows() ? view.position(first_row + warp_row + Tile::kWarpRows - 1) : -1;
  const float scale_log2 = (a.soft_cap > 0 ? 1.0f : a.scale) * kLog2E;
  float o[kFragments][kChunks][4] = {};
  float max[kFragments][2], sum[kFragments][2] = {};
#pragma unroll
  for (int f = 0; f < kFragments; ++f) max[f][0] = max[f][1] = kNoScore;

  for (; key < end; key += kKeys) {
    const bool more = Tile::kAskAgain || key + kKeys < end;
    const uint32_t next_place = more ? locate(key + kKeys) : 0;  // the table's latency goes by under the scores
    const bool seen = key <= warp_high && (view.window == 0 || key + kKeys > warp_low - view.window + 1);
    float s[kFragments][kKeys / 8][4] = {};

    left.ForgetPairs();
    right.ForgetPairs();
    Tile::Finish(keys, raw);
    __syncthreads();  // keys are here, and everybody has done with the last values
    Tile::Start(values, raw, pool + to_values, place, key, first, end, head_dim);
    if (seen) {
#pragma unroll
      for (int step = 0; step < kChunks / 2; ++step) {
        uint32_t q[kFragments][4];
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          gpu::LoadMatrix4(q[f], warp_queries + left.at(16 * f, step));
        }
#pragma unroll
        for (int j = 0; j < kKeys / 8; j += 2) {
          uint32_t k[4];
          gpu::LoadMatrix4(k, keys + right.at(8 * j, step));
#pragma unroll
          for (int f = 0; f < kFragments; ++f) MultiplyAddPair<T>(s[f][j], s[f][j + 1], q[f], k);
        }
      }
    }

    Tile::Finish(values, raw);
    __syncthreads();  // values are here, and everybody has done with the keys
    if (Tile::kAskAgain ? key + kKeys < end : more) Tile::Start(keys, raw, pool, next_place, key + kKeys, first, end, head_dim);
    place = next_place;
    if (!seen) continue;
    const bool masked = key + kKeys - 1 > warp_low || (view.window != 0 && key <= warp_high - view.window);
    uint32_t p[kFragments][kKeys / 16][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      if (a.soft_cap > 0) CapScores(s[f], a.scale, a.soft_cap);
      if (masked) {
        const int32_t row = first_row + warp_row + 16 * f + Lane() / 4;
        MaskScores(s[f], key, view.position(row), view.position(row + 8), view.window);
      }
      OnlineSoftmax(s[f], o[f], max[f], sum[f], scale_log2);
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) PackProbabilities<T>(p[f][step], s[f], step);
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        uint32_t v[4];
        gpu::LoadMatrix4Transposed(v, values + left.at(16 * step, chunk / 2));
#pragma unroll
        for (int f = 0; f < kFragments; ++f) MultiplyAddPair<T>(o[f][chunk], o[f][chunk + 1], p[f][step], v);
      }
    }
  }

  if (const AttentionItem& of = item(); of.parts > 1) {
    const int32_t rows = of.rows;
    const Parts<T, kDimension> parts(a, units, of, view, kv_head);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * f + 8 * half + Lane() / 4;
        const float total = QuadSum(sum[f][half]);
        if (row >= rows) continue;
        float* const target = parts.output(of.part, row) + 2 * (Lane() & 3);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          *reinterpret_cast<float2*>(target + 8 * chunk) = make_float2(o[f][chunk][2 * half], o[f][chunk][2 * half + 1]);
        }
        if ((Lane() & 3) == 0) *parts.total(of.part, row) = make_float2(max[f][half], total);
      }
    }
    return;
  }

  // Out through the queries' place, of which each warp has read only its own rows, so that stores are 16 bytes wide.
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    const float low = 1.0f / QuadSum(sum[f][0]), high = 1.0f / QuadSum(sum[f][1]);
    const int row = warp_row + 16 * f + Lane() / 4, within = 4 * (Lane() & 3);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float(&part)[4] = o[f][chunk];
      *reinterpret_cast<uint32_t*>(queries + Swizzled<kChunks>(row, chunk) + within) = gpu::PackFloats<T>(part[0] * low, part[1] * low);
      *reinterpret_cast<uint32_t*>(queries + Swizzled<kChunks>(row + 8, chunk) + within) = gpu::PackFloats<T>(part[2] * high, part[3] * high);
    }
  }
  __syncwarp();
  const int32_t limit = min(view.rows(), first_row + item().rows);  // the first of them is always more: without it ptxas spills
#pragma unroll 4
  for (int i = Lane(); i < Tile::kWarpRows * kChunks; i += 32) {
    const int row = warp_row + i / kChunks, chunk = i % kChunks;
    if (first_row + row >= limit || chunk * 8 >= head_dim) continue;
    T* target = static_cast<T*>(a.out) + view.element(a, first_row + row, kv_head, static_cast<int64_t>(a.heads) * head_dim) + chunk * 8;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(queries + Swizzled<kChunks>(row, chunk));
  }
}

template <class T>
void AttentionTiles(Stream& stream, const AttentionArgs& a, const Batch& b, const AttentionUnits& units) {
  ForAttentionShape<T>(a.kv, [&]<class Kv, int kDim>() {
    using Tile = RowTile<T, Kv, kDim>;
    const gpu::Dim grid{static_cast<unsigned>(units.count), static_cast<unsigned>(a.kv.kv_heads)};  // tiles that share keys are neighbours
    gpu::Launch(stream, "attention tiles", AttentionTilesKernel<T, Kv, kDim>, grid, {Tile::kThreads}, Tile::kSharedBytes, a, b, units);
  });
}

}  // namespace kvtier::cuda
