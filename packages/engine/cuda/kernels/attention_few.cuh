// Attention over tiles of 16 packed rows on tensor cores: decodes, and short tails behind a long prefix. Included by attention_few_*.cu.
//
// A block takes item after item of the plan (attention_plan.h), so that a launch has the size of the GPU however many there are. In a
// block 4 warps go their own way: each takes every 4th piece of 16 keys through a pipeline of its own (cp.async, no barrier
// between warps) and keeps maximum, sum and output of its keys; at the end they are merged in shared memory. When a tile has
// several parts, each leaves its own in the workspace, and the one that takes the last ticket merges them all, in their order,
// and puts the ticket back to 0: a launch of its own for that would cost a decode more than it does.
//
// Bound by memory: bytes are K/V of each context once. In flight per multiprocessor: 2 blocks x 4 warps x 2 stages of 16 keys and
// values (128 KiB at head_dim 128 in 16 bits), three times what bandwidth x latency asks for.
#pragma once
#include "attention.cuh"

namespace kvtier::cuda {

template <class T, class Kv, int kDimension>
struct KeyPiece {
  static constexpr int kDim = kDimension;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kKeys = 16;
  static constexpr int kStages = kDim <= 128 ? 3 : 2;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kVectors = kDim * static_cast<int>(sizeof(Kv)) / 16;
  static constexpr bool kWiden = sizeof(Kv) == 1;
  static constexpr int kRawBytes = 2 * kKeys * kDim * static_cast<int>(sizeof(Kv));  // a stage: keys, then values
  static constexpr int kWideBytes = kWiden ? 2 * kKeys * kDim * 2 : 0;
  static constexpr int kWarpBytes = kStages * kRawBytes + kWideBytes;
  static constexpr int kOutStride = kDim + 8;  // floats; 8 rows of a fragment in different banks
  static constexpr int kMergeBytes = (kWarps * kFewRows * (kOutStride + 2) + kFewRows * kMostParts) * 4;
  static constexpr int kSharedBytes = kWarps * kWarpBytes > kMergeBytes ? kWarps * kWarpBytes : kMergeBytes;
  static_assert(kSharedBytes <= static_cast<int>(kDim <= 128 ? kLeastSharedBytes : kWideHeadsSharedBytes));

  // Starts the copy of a piece's keys and values; lanes `source` and source + 1 hold LocateKeys of its two groups of 8 keys.
  static __device__ __forceinline__ void Start(uint8_t* stage, const uint8_t* pool, int64_t to_values, uint32_t places, int source,
                                               int32_t key, int32_t first, int32_t end, int32_t head_dim) {
    const int row_bytes = head_dim * static_cast<int>(sizeof(Kv));
    const uint32_t low = __shfl_sync(gpu::kAllLanes, places, source), high = __shfl_sync(gpu::kAllLanes, places, source + 1);
#pragma unroll
    for (int pass = 0; pass < kKeys * kVectors / 32; ++pass) {
      const int i = Lane() + pass * 32;
      const int row = i / kVectors, vector = i % kVectors;
      const uint8_t* from = pool + (row < 8 ? low : high) * kKeyUnit + (row & 7) * row_bytes + vector * 16;
      const bool valid = key + row >= first && key + row < end && vector * 16 < row_bytes;
      uint8_t* const to = stage + (kWiden ? i * 16 : Swizzled<kChunks>(row, vector));
      gpu::CopyAsync16(to, from, valid);
      gpu::CopyAsync16(to + kRawBytes / 2, from + to_values, valid);
    }
  }

  // Each lane widens what it copied.
  static __device__ __forceinline__ void Widen(uint8_t* wide, const uint8_t* stage) {
#pragma unroll
    for (int pass = 0; pass < 2 * kKeys * kVectors / 32; ++pass) {
      const int i = Lane() + pass * 32;
      const int row = i / kVectors, vector = i % kVectors;  // rows 16 to 31: values; kChunks x 16 is where their tile starts
      const uint4 packed = *reinterpret_cast<const uint4*>(stage + i * 16);
      *reinterpret_cast<uint4*>(wide + Swizzled<kChunks>(row, 2 * vector)) = WidenEight<T>(packed.x, packed.y);
      *reinterpret_cast<uint4*>(wide + Swizzled<kChunks>(row, 2 * vector + 1)) = WidenEight<T>(packed.z, packed.w);
    }
  }
};

template <class T, class Kv, int kDimension>
__device__ __forceinline__ void AttendItem(const AttentionArgs& a, const Batch& b, const AttentionUnits& units, const AttentionItem& item,
                                           int32_t kv_head, uint8_t* shared) {
  using Piece = KeyPiece<T, Kv, kDimension>;
  constexpr int kChunks = Piece::kChunks, kKeys = Piece::kKeys, kStages = Piece::kStages, kWarps = Piece::kWarps;
  constexpr int kQuads = kDimension / 4;
  const SequenceView view(a, b, item.sequence);
  const int32_t first_row = item.first_row, first = item.first, end = item.end;
  const int32_t head_dim = a.kv.head_dim;

  const int warp = static_cast<int>(threadIdx.x / 32);
  // Of this warp's piece 0; piece n: + n * kStride. By where keys lie, not by where they begin: which warp sums what must not depend on that.
  constexpr int32_t kStride = kWarps * kKeys;
  const int32_t warp_key = first / kStride * kStride + warp * kKeys;
  const int32_t pieces = end > warp_key ? (end - warp_key + kStride - 1) / kStride : 0;
  const uint8_t* const pool = static_cast<const uint8_t*>(a.kv.pool);
  const int64_t to_values = a.kv.Row(1, 0, 0);

  // 16 pieces' places at a time, a lane for each group of 8 keys; the next 16 are on their way while these are used.
  const auto locate = [&](int piece) {
    const int32_t key = warp_key + (piece + Lane() / 2) * kStride + 8 * (Lane() & 1);
    return key < end ? LocateKeys(a.kv, view.table, kv_head, key, first, end) : 0;
  };
  uint32_t places = locate(0), next_places = locate(16);
  uint8_t* const stages = shared + warp * Piece::kWarpBytes;
  const auto start = [&](int piece) {
    if (piece < pieces) {
      if (piece > 0 && piece % 16 == 0) {
        places = next_places;
        next_places = locate(piece + 16);
      }
      Piece::Start(stages + piece % kStages * Piece::kRawBytes, pool, to_values, places, piece % 16 * 2, warp_key + piece * kStride, first,
                   end, head_dim);
    }
    gpu::CopyAsyncCommit();  // empty groups too: the count of groups is what is waited for
  };
  for (int piece = 0; piece < kStages - 1; ++piece) start(piece);

  // Queries, straight into fragments.
  const int32_t low_row = first_row + Lane() / 4, high_row = low_row + 8;
  uint32_t q[kChunks / 2][4];
  {
    const T* const source = static_cast<const T*>(a.q);
    const int64_t low = view.element(a, min(low_row, view.rows() - 1), kv_head, a.q_stride);
    const int64_t high = view.element(a, min(high_row, view.rows() - 1), kv_head, a.q_stride);
#pragma unroll
    for (int step = 0; step < kChunks / 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int dim = 16 * step + 8 * (i / 2) + 2 * (Lane() & 3);
        q[step][i] = dim < head_dim ? *reinterpret_cast<const uint32_t*>(source + (i % 2 == 0 ? low : high) + dim) : 0;
      }
    }
  }

  const int32_t low_position = view.position(low_row), high_position = view.position(high_row);
  const int32_t all_see_from = view.window == 0 ? 0 : view.position(first_row + kFewRows - 1) - view.window + 1;
  const int32_t all_see_to = view.position(first_row) + 1;
  const float scale_log2 = (a.soft_cap > 0 ? 1.0f : a.scale) * kLog2E;
  const LaneRow<kChunks> left = LeftRow<kChunks>(), right = RightRow<kChunks>();
  float o[kChunks][4] = {};
  float max[2] = {kNoScore, kNoScore}, sum[2] = {};
  for (int piece = 0; piece < pieces; ++piece) {
    gpu::CopyAsyncWait<kStages - 2>();
    __syncwarp();  // this piece is here, and all lanes have done with the one whose place the next takes
    start(piece + kStages - 1);
    const uint8_t* keys = stages + piece % kStages * Piece::kRawBytes;
    if constexpr (Piece::kWiden) {
      uint8_t* const wide = stages + kStages * Piece::kRawBytes;
      Piece::Widen(wide, keys);
      __syncwarp();
      keys = wide;
    }
    const uint8_t* const values = keys + kKeys * kDimension * 2;
    float s[2][4] = {};
#pragma unroll
    for (int step = 0; step < kChunks / 2; ++step) {
      uint32_t k[4];
      gpu::LoadMatrix4(k, keys + right.at(0, step));
      MultiplyAddPair<T>(s[0], s[1], q[step], k);
    }
    if (a.soft_cap > 0) CapScores(s, a.scale, a.soft_cap);
    const int32_t key = warp_key + piece * kStride;
    if (key < all_see_from || key + kKeys > all_see_to) MaskScores(s, key, low_position, high_position, view.window);
    OnlineSoftmax(s, o, max, sum, scale_log2);
    uint32_t p[4];
    PackProbabilities<T>(p, s, 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      uint32_t v[4];
      gpu::LoadMatrix4Transposed(v, values + left.at(0, chunk / 2));
      MultiplyAddPair<T>(o[chunk], o[chunk + 1], p, v);
    }
  }

  // All copies have arrived: what the last wait left open are groups without any. Merge the warps. Shared memory: outputs [warp][row][kOutStride], then {max, sum} [row][warp], then weights [row][kMostParts].
  __syncthreads();
  float* const outputs = reinterpret_cast<float*>(shared);
  float2* const totals = reinterpret_cast<float2*>(outputs + kWarps * kFewRows * Piece::kOutStride);
  float* const weights = reinterpret_cast<float*>(totals + kWarps * kFewRows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = Lane() / 4 + 8 * half;
    float* const target = outputs + (warp * kFewRows + row) * Piece::kOutStride + 2 * (Lane() & 3);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      *reinterpret_cast<float2*>(target + 8 * chunk) = make_float2(o[chunk][2 * half], o[chunk][2 * half + 1]);
    }
    const float total = QuadSum(sum[half]);
    if ((Lane() & 3) == 0) totals[row * kWarps + warp] = make_float2(max[half], total);
  }
  __syncthreads();

  const int rows = item.rows;
  const Parts<T, kDimension> parts(a, units, item, view, kv_head);
  for (int row = warp; row < rows; row += kWarps) {
    const float2 total = MergeWeights<kWarps>(weights + row * kMostParts, kWarps, 0, scale_log2, [&](int i) { return totals[row * kWarps + i]; });
    __syncwarp();
    const float inverse = item.parts == 1 ? 1 / total.y : 1;
    for (int quad = Lane(); quad < kQuads; quad += 32) {
      float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        AddWeighted(value, weights[row * kMostParts + i], *reinterpret_cast<const float4*>(outputs + (i * kFewRows + row) * Piece::kOutStride + quad * 4));
      }
      if (item.parts == 1) {  // rounded as where this is one part of several
        parts.Write(a, row, quad, make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse));
      } else {
        *reinterpret_cast<float4*>(parts.output(item.part, row) + quad * 4) = value;
      }
    }
    if (item.parts > 1 && Lane() == 0) *parts.total(item.part, row) = total;
  }
  if (item.parts == 1) return;

  __threadfence();  // this block's part before its ticket
  __syncthreads();
  int32_t* const ticket = static_cast<int32_t*>(a.workspace) + item.ticket * a.kv.kv_heads + kv_head;
  int32_t* const taken = reinterpret_cast<int32_t*>(totals + kWarps);  // the totals there are done with
  if (threadIdx.x == 0) *taken = atomicAdd(ticket, 1);
  __syncthreads();
  if (*taken != item.parts - 1) return;
  __threadfence();  // the others' parts after their tickets
  if (threadIdx.x == 0) *ticket = 0;
  for (int row = warp; row < rows; row += kWarps) parts.Merge(a, row, weights + row * kMostParts, scale_log2);
}

template <class T, class Kv, int kDimension>
__global__ void __launch_bounds__(128) AttentionFewKernel(AttentionArgs a, Batch b, AttentionUnits units) {
  KVTIER_DYNAMIC_SHARED(shared);
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int32_t count = (units.counted != nullptr ? *units.counted : units.count) * a.kv.kv_heads;
  for (int32_t unit = static_cast<int32_t>(blockIdx.x); unit < count; unit += static_cast<int32_t>(gridDim.x)) {
    AttendItem<T, Kv, kDimension>(a, b, units, AttentionItem(units.items[unit / a.kv.kv_heads]), unit % a.kv.kv_heads, shared);
    __syncthreads();  // the next item's copies go where this one was merged
  }
}

template <class T>
void AttentionFew(Stream& stream, const AttentionArgs& a, const Batch& b, const AttentionUnits& units, int32_t blocks) {
  ForAttentionShape<T>(a.kv, [&]<class Kv, int kDim>() {
    using Piece = KeyPiece<T, Kv, kDim>;
    const int64_t wanted = units.counted != nullptr ? blocks : int64_t{units.count} * a.kv.kv_heads;
    const gpu::Dim grid{static_cast<unsigned>(wanted < blocks ? wanted : blocks)};
    gpu::LaunchDependent(stream, "attention few", AttentionFewKernel<T, Kv, kDim>, grid, {Piece::kThreads}, Piece::kSharedBytes, a, b, units);
  });
}

}  // namespace kvtier::cuda
