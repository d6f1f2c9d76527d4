// AttentionDecode v2: 16 packed rows, keys split over blocks, on tensor cores. Included by attention_split_*.cu.
//
// grid (kv head x tile of 16 rows, sequence, split). Each split takes an equal share of the keys in steps of 128, so that a
// short context leaves the other splits empty, and a long one is read by the whole GPU. In a block 4 warps go their own way:
// each takes every 4th piece of 16 keys through a pipeline of its own (cp.async, no barrier between warps) and keeps maximum,
// sum and output of its keys; at the end they are merged in shared memory. When a sequence has more than one split, each leaves
// its part in the workspace, and the one that takes the last ticket merges them all and puts the ticket back to 0.
//
// Bound by memory: bytes are K/V of each context once. In flight per multiprocessor: 2 blocks x 4 warps x 2 stages of 16 keys and
// values (128 KiB at head_dim 128 in 16 bits), three times what bandwidth x latency asks for.
#pragma once
#include <stdexcept>

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
  static constexpr int kMergeBytes = (kWarps * kSplitRows * (kOutStride + 2) + kSplitRows * kMaxSplits) * 4;
  static constexpr int kSharedBytes = kWarps * kWarpBytes > kMergeBytes ? kWarps * kWarpBytes : kMergeBytes;

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

// One row's parts, each with its maximum and sum, as weights that make their sum the result; the maximum and sum of all. By one warp;
// the weights are written last, behind all that brings its lanes together.
template <int kMost, class Load>
__device__ __forceinline__ float2 MergeWeights(float* weights, int parts, float scale_log2, const Load& load) {
  constexpr int kEach = (kMost + 31) / 32;
  float mine[kEach];
  float max = kNoScore, sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    mine[j] = Lane() + 32 * j < parts ? load(Lane() + 32 * j).x : kNoScore;
    max = fmaxf(max, mine[j]);
  }
  max = gpu::WarpMax(max);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    mine[j] = mine[j] == kNoScore ? 0 : gpu::Exp2((mine[j] - max) * scale_log2);
    if (Lane() + 32 * j < parts) sum += mine[j] * load(Lane() + 32 * j).y;
  }
  sum = gpu::WarpSum(sum);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (Lane() + 32 * j < parts) weights[Lane() + 32 * j] = mine[j];
  }
  return make_float2(max, sum);
}

template <class T, class Kv, int kDimension>
__global__ void __launch_bounds__(128) AttentionSplitKernel(AttentionArgs a, Batch b, int32_t max_queries, int64_t ticket_bytes) {
  using Piece = KeyPiece<T, Kv, kDimension>;
  constexpr int kChunks = Piece::kChunks, kKeys = Piece::kKeys, kStages = Piece::kStages, kWarps = Piece::kWarps;
  constexpr int kQuads = kDimension / 4;
  KVTIER_DYNAMIC_SHARED(shared);
  const int32_t kv_head = static_cast<int32_t>(blockIdx.x) % a.kv.kv_heads;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) / a.kv.kv_heads * kSplitRows;
  const int32_t splits = static_cast<int32_t>(gridDim.z), split = static_cast<int32_t>(blockIdx.z);
  const SequenceView view(a, b, static_cast<int32_t>(blockIdx.y));
  if (view.queries > max_queries || first_row >= view.rows()) return;
  const int32_t head_dim = a.kv.head_dim;

  // Keys that the rows see, and this split's share of them.
  const int32_t first = view.first_key(first_row), end = view.position(first_row + kSplitRows - 1) + 1;
  const int32_t aligned = first / kKeys * kKeys;
  const int32_t share = ((end - aligned + splits - 1) / splits + kSplitStep - 1) / kSplitStep * kSplitStep;
  const int32_t parts = (end - aligned + share - 1) / share;
  if (split >= parts) return;
  const int32_t share_end = min(end, aligned + (split + 1) * share);

  const int warp = static_cast<int>(threadIdx.x / 32);
  const int32_t warp_key = aligned + split * share + warp * kKeys;  // of this warp's piece 0; piece n: + n * kStride
  constexpr int32_t kStride = kWarps * kKeys;
  const int32_t pieces = share_end > warp_key ? (share_end - warp_key + kStride - 1) / kStride : 0;
  const uint8_t* const pool = static_cast<const uint8_t*>(a.kv.pool);
  const int64_t to_values = a.kv.Row(1, 0, 0);

  // 16 pieces' places at a time, a lane for each group of 8 keys; the next 16 are on their way while these are used.
  const auto locate = [&](int piece) {
    const int32_t key = warp_key + (piece + Lane() / 2) * kStride + 8 * (Lane() & 1);
    return key < share_end ? LocateKeys(a.kv, view.table, kv_head, key, first, end) : 0;
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
  const int32_t all_see_from = view.window == 0 ? 0 : view.position(first_row + kSplitRows - 1) - view.window + 1;
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

  // All copies have arrived: what the last wait left open are groups without any. Merge the warps. Shared memory: outputs [warp][row][kOutStride], then {max, sum} [row][warp], then weights [row][kMaxSplits].
  __syncthreads();
  float* const outputs = reinterpret_cast<float*>(shared);
  float2* const totals = reinterpret_cast<float2*>(outputs + kWarps * kSplitRows * Piece::kOutStride);
  float* const weights = reinterpret_cast<float*>(totals + kWarps * kSplitRows);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = Lane() / 4 + 8 * half;
    float* const target = outputs + (warp * kSplitRows + row) * Piece::kOutStride + 2 * (Lane() & 3);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      *reinterpret_cast<float2*>(target + 8 * chunk) = make_float2(o[chunk][2 * half], o[chunk][2 * half + 1]);
    }
    const float total = QuadSum(sum[half]);
    if ((Lane() & 3) == 0) totals[row * kWarps + warp] = make_float2(max[half], total);
  }
  __syncthreads();

  const int rows = min(kSplitRows, view.rows() - first_row);
  const auto write = [&](int row, int quad, float4 value) {
    if (quad * 4 >= head_dim) return;
    T* const target = static_cast<T*>(a.out) + view.element(a, first_row + row, kv_head, static_cast<int64_t>(a.heads) * head_dim) + quad * 4;
    *reinterpret_cast<uint2*>(target) = make_uint2(gpu::PackFloats<T>(value.x, value.y), gpu::PackFloats<T>(value.z, value.w));
  };
  const int64_t ticket = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  float* const base = reinterpret_cast<float*>(static_cast<uint8_t*>(a.workspace) + ticket_bytes) +
                      ticket * splits * SplitWorkspace::PartFloats(kDimension);
  const auto part = [&](int i) { return base + i * SplitWorkspace::PartFloats(kDimension); };
  const auto part_total = [&](int i, int row) { return reinterpret_cast<float2*>(part(i) + kSplitRows * kDimension) + row; };

  for (int row = warp; row < rows; row += kWarps) {
    const float2 total = MergeWeights<kWarps>(weights + row * kMaxSplits, kWarps, scale_log2, [&](int i) { return totals[row * kWarps + i]; });
    __syncwarp();
    const float inverse = parts == 1 ? 1 / total.y : 1;
    for (int quad = Lane(); quad < kQuads; quad += 32) {
      float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const float weight = weights[row * kMaxSplits + i] * inverse;
        const float4 add = *reinterpret_cast<const float4*>(outputs + (i * kSplitRows + row) * Piece::kOutStride + quad * 4);
        value = make_float4(value.x + weight * add.x, value.y + weight * add.y, value.z + weight * add.z, value.w + weight * add.w);
      }
      if (parts == 1) {
        write(row, quad, value);
      } else {
        *reinterpret_cast<float4*>(part(split) + row * kDimension + quad * 4) = value;
      }
    }
    if (parts > 1 && Lane() == 0) *part_total(split, row) = total;
  }
  if (parts == 1) return;

  __threadfence();  // this block's part before its ticket
  __syncthreads();
  int32_t* const tickets = static_cast<int32_t*>(a.workspace);
  int32_t* const taken = reinterpret_cast<int32_t*>(totals + kWarps);  // the totals there are done with
  if (threadIdx.x == 0) *taken = atomicAdd(tickets + ticket, 1);
  __syncthreads();
  if (*taken != parts - 1) return;
  __threadfence();  // the others' parts after their tickets
  if (threadIdx.x == 0) tickets[ticket] = 0;
  for (int row = warp; row < rows; row += kWarps) {
    float* const row_weights = weights + row * kMaxSplits;
    const float2 total = MergeWeights<kMaxSplits>(row_weights, parts, scale_log2, [&](int i) { return *part_total(i, row); });
    __syncwarp();
    const float inverse = 1 / total.y;
    for (int quad = Lane(); quad < kQuads; quad += 32) {
      float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int i = 0; i < parts; ++i) {
        const float weight = row_weights[i] * inverse;
        const float4 add = *reinterpret_cast<const float4*>(part(i) + row * kDimension + quad * 4);
        value = make_float4(value.x + weight * add.x, value.y + weight * add.y, value.z + weight * add.z, value.w + weight * add.w);
      }
      write(row, quad, value);
    }
  }
}

template <class T>
void AttentionSplit(Stream& stream, const AttentionArgs& a, const Batch& b, int32_t max_queries, int multiprocessors) {
  const int32_t rows = min(max_queries, b.max_queries) * (a.heads / a.kv.kv_heads);
  const int32_t blocks = a.kv.kv_heads * ((rows + kSplitRows - 1) / kSplitRows);
  // From bounds only: one wave of 2 blocks per multiprocessor, and no more splits than the longest context has steps.
  const int64_t steps = (b.max_context + kSplitStep - 1) / kSplitStep;
  int64_t splits = int64_t{2} * multiprocessors / (int64_t{blocks} * b.sequences);
  splits = splits < steps ? splits : steps;
  splits = splits < kMaxSplits ? splits : kMaxSplits;
  if (splits < 1) splits = 1;
  if (splits > 1 && a.workspace == nullptr) {
    throw std::invalid_argument("GPU: attention over split keys without a workspace; give it AttentionWorkspaceBytes");
  }
  ForAttentionShape<T>(a.kv, [&]<class Kv, int kDim>() {
    using Piece = KeyPiece<T, Kv, kDim>;
    const gpu::Dim grid{static_cast<unsigned>(blocks), static_cast<unsigned>(b.sequences), static_cast<unsigned>(splits)};
    gpu::Launch(stream, "attention split", AttentionSplitKernel<T, Kv, kDim>, grid, {Piece::kThreads}, Piece::kSharedBytes, a, b, max_queries,
                SplitWorkspace::TicketBytes(multiprocessors));
  });
}

}  // namespace kvtier::cuda
