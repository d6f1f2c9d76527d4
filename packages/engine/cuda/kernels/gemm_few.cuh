// Matrix product of few rows (decode): the weights are the traffic, so each is read from memory once, by 16-byte loads
// straight into tensor-core fragments, without shared memory. Weights are mma's rows (16 outputs a tile), the batch its
// columns (8 a tile).
//
// A dot product does not care in which order its terms come, so k may be renamed, for both operands alike: lane q of a
// quad takes the 8 inputs [8q, 8q + 8) of a run of 32 as one load, and calls its first pair "k = 2q, 2q + 1", its second
// "k = 8 + 2q, ...", the other two the same of the next mma. That is what makes the loads 16 bytes wide.
//
//   run of 32 inputs   |0 .. 7|8 .. 15|16 .. 23|24 .. 31|
//                        q = 0   q = 1   q = 2    q = 3
//
// A block's warps share its outputs and take runs of 64 inputs in turn; their sums meet in shared memory, always in the
// same order. Bytes: outputs x inputs x 2 (+ the batch from L1/L2). FLOPs: 2 x rows x outputs x inputs.
#pragma once
#include "gemm_plain.cuh"

namespace kvtier::cuda {

constexpr int kFewWarps = 8;
constexpr int kFewRun = 64;  // inputs a warp takes at a time

// The warps' sums [warp][tile][lane] of 4 floats, in shared memory, become the target; tiles of one 16 outputs after another.
template <class T, int RowTiles, int Tiles, int Threads>
__device__ __forceinline__ void StoreSums(const GemmArgs& a, const float4* partial, int64_t first_output, int64_t first_row) {
  for (int at = static_cast<int>(threadIdx.x); at < Tiles * 128; at += Threads) {
    const int element = at % 4, source_lane = at / 4 % 32, tile = at / 128;
    float sum = 0;
#pragma unroll
    for (int from = 0; from < kFewWarps; ++from) {
      sum += reinterpret_cast<const float*>(partial)[(from * Tiles + tile) * 128 + source_lane * 4 + element];
    }
    // d0 d1: output group, rows 2q and 2q + 1; d2 d3: output group + 8.
    const int64_t output = first_output + tile / RowTiles * 16 + source_lane / 4 + 8 * (element / 2);
    const int64_t row = first_row + tile % RowTiles * 8 + 2 * (source_lane % 4) + element % 2;
    if (row < a.rows && output < a.outputs) StoreProduct<T>(a, row, output, sum);
  }
}

// RowTiles: 8 rows each; OutputTiles: 16 outputs each, more where the batch is wide, so that it is read less often.
template <class T, int RowTiles, int OutputTiles>
__global__ void __launch_bounds__(kFewWarps * 32) GemmFew(GemmArgs a) {
  KVTIER_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int group = lane / 4, quad = lane % 4;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * (16 * OutputTiles);
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * (8 * RowTiles);
  const uint4 zero = make_uint4(0, 0, 0, 0);

  // Rows past the end read the last one: their sums are thrown away.
  const uint4* weights[2 * OutputTiles];
#pragma unroll
  for (int i = 0; i < 2 * OutputTiles; ++i) {
    const int64_t output = min(first_output + 8 * i + group, a.outputs - 1);
    weights[i] = reinterpret_cast<const uint4*>(static_cast<const T*>(a.weight) + output * a.inputs) + quad;
  }
  const uint4* rows[RowTiles];
#pragma unroll
  for (int i = 0; i < RowTiles; ++i) {
    const int64_t row = min(first_row + 8 * i + group, a.rows - 1);
    rows[i] = reinterpret_cast<const uint4*>(static_cast<const T*>(a.source) + row * a.source_stride) + quad;
  }

  float sums[OutputTiles][RowTiles][4] = {};
  uint4 w[2][2 * OutputTiles];  // of this run: both halves of 32
  const int64_t chunks = a.inputs / 8;
  const auto load = [&](int64_t chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2 * OutputTiles; ++i) {
        const int64_t at = chunk + 4 * half;
        w[half][i] = at + quad < chunks ? gpu::LoadStreaming(weights[i] + at) : zero;
      }
    }
  };
  constexpr int64_t kStep = kFewWarps * kFewRun / 8;
  int64_t chunk = static_cast<int64_t>(warp) * (kFewRun / 8);
  gpu::LetNextStart();
  if (chunk < chunks) load(chunk);  // weights are nobody's result
  gpu::WaitForPrevious();
  for (; chunk < chunks; chunk += kStep) {
    uint4 now[2][2 * OutputTiles];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2 * OutputTiles; ++i) now[half][i] = w[half][i];
    }
    if (chunk + kStep < chunks) load(chunk + kStep);  // in flight while this run is multiplied
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        const int64_t at = chunk + 4 * half;
        const uint4 x = at + quad < chunks ? rows[r][at] : zero;
#pragma unroll
        for (int o = 0; o < OutputTiles; ++o) {
          const uint4 low = now[half][2 * o], high = now[half][2 * o + 1];
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
          const uint32_t x_first[2] = {x.x, x.y}, x_second[2] = {x.z, x.w};
          gpu::MultiplyAdd16816<T>(sums[o][r], first, x_first);
          gpu::MultiplyAdd16816<T>(sums[o][r], second, x_second);
        }
      }
    }
  }

  // [warp][tile][lane] of 4 floats.
  constexpr int kTiles = OutputTiles * RowTiles;
  auto* partial = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int o = 0; o < OutputTiles; ++o) {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
      const float* s = sums[o][r];
      partial[(warp * kTiles + o * RowTiles + r) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  __syncthreads();
  StoreSums<T, RowTiles, kTiles, kFewWarps * 32>(a, partial, first_output, first_row);
}

}  // namespace kvtier::cuda
