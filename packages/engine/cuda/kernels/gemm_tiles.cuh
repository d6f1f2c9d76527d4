// Matrix product, version 2: tensor cores over tiles in shared memory, fed by cp.async several steps ahead (after the
// multistage kernels of CUTLASS). f16 and bf16 in, f32 sums.
//
//   block   Rows x Outputs of the target, kWarps warps of WarpRows x WarpOutputs each
//   step    32 inputs of both operands: 64-byte lines in shared memory, four 16-byte chunks each
//   line    chunk c of line l lies at chunk c ^ (l / 2 % 4): the eight lines that ldmatrix reads at once are in eight
//           different groups of banks
//
// Bytes: each block reads (Rows + Outputs) x inputs x 2; blocks that run at the same time are neighbours in both
// directions (kGroupRows), so most of it comes from L2. FLOPs: 2 x rows x outputs x inputs.
#pragma once
#include "gemm_plain.cuh"

namespace kvtier::cuda {

constexpr int kTileInputs = 32;
constexpr int kTileStages = 4;
constexpr int kGroupRows = 8;  // tiles of rows that share a wave's tiles of outputs

template <int Rows, int Outputs>
constexpr size_t TileSharedBytes() {
  return static_cast<size_t>(kTileStages) * (Rows + Outputs) * kTileInputs * 2;
}

__device__ __forceinline__ int TileOffset(int line, int chunk) { return line * 64 + ((chunk ^ ((line >> 1) & 3)) << 4); }

// Lines [first, first + Lines) of a matrix to shared memory, inputs [k, k + 32); zeros outside of it.
template <class T, int Lines, int Threads>
__device__ __forceinline__ void LoadLines(uint8_t* shared, const void* matrix, int64_t stride, int64_t first, int64_t lines,
                                          int64_t k, int64_t inputs, int thread) {
#pragma unroll
  for (int i = 0; i < (Lines * 4 + Threads - 1) / Threads; ++i) {
    const int at = thread + i * Threads, line = at / 4, chunk = at % 4;
    if (Lines * 4 % Threads != 0 && line >= Lines) break;
    const bool valid = first + line < lines && k + chunk * 8 < inputs;
    const T* from = static_cast<const T*>(matrix);
    if (valid) from += (first + line) * stride + k + chunk * 8;
    gpu::CopyAsync16(shared + TileOffset(line, chunk), from, valid);
  }
}

template <class T, int Rows, int Outputs, int WarpRows, int WarpOutputs>
__global__ void __launch_bounds__(Rows / WarpRows * (Outputs / WarpOutputs) * 32) GemmTiles(GemmArgs a, int row_tiles, int output_tiles) {
  constexpr int kWarpsAcross = Outputs / WarpOutputs;
  constexpr int kThreads = Rows / WarpRows * kWarpsAcross * 32;
  constexpr int kStageBytes = (Rows + Outputs) * kTileInputs * 2;
  constexpr int kM = WarpRows / 16, kN = WarpOutputs / 8;
  static_assert(kN % 2 == 0);
  KVTIER_DYNAMIC_SHARED(shared);

  // Blocks in groups of kGroupRows tiles of rows, down the group first.
  const int per_group = kGroupRows * output_tiles;
  const int group = static_cast<int>(blockIdx.x) / per_group, in_group = static_cast<int>(blockIdx.x) % per_group;
  const int group_rows = min(row_tiles - group * kGroupRows, kGroupRows);
  const int64_t first_row = static_cast<int64_t>(group * kGroupRows + in_group % group_rows) * Rows;
  const int64_t first_output = static_cast<int64_t>(in_group / group_rows) * Outputs;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warp_row = warp / kWarpsAcross * WarpRows, warp_output = warp % kWarpsAcross * WarpOutputs;
  const auto load = [&](int stage, int64_t k) {
    uint8_t* base = shared + stage * kStageBytes;
    LoadLines<T, Rows, kThreads>(base, a.source, a.source_stride, first_row, a.rows, k, a.inputs, thread);
    LoadLines<T, Outputs, kThreads>(base + Rows * 64, a.weight, a.inputs, first_output, a.outputs, k, a.inputs, thread);
  };

  const int steps = static_cast<int>((a.inputs + kTileInputs - 1) / kTileInputs);
#pragma unroll
  for (int stage = 0; stage < kTileStages - 1; ++stage) {
    if (stage < steps) load(stage, static_cast<int64_t>(stage) * kTileInputs);
    gpu::CopyAsyncCommit();
  }

  // Which line and chunk this lane gives to ldmatrix: 16 x 16 of the source, and 16 outputs x 16 inputs of the weight.
  const int source_line = lane % 16, source_chunk = lane / 16;
  const int weight_line = lane % 8 + lane / 16 * 8, weight_chunk = lane / 8 % 2;
  float sums[kM][kN][4] = {};
  for (int step = 0; step < steps; ++step) {
    gpu::CopyAsyncWait<kTileStages - 2>();
    __syncthreads();  // this step has arrived, and nobody reads the stage that is loaded next
    const int next = step + kTileStages - 1;
    if (next < steps) load(next % kTileStages, static_cast<int64_t>(next) * kTileInputs);
    gpu::CopyAsyncCommit();

    const uint8_t* source = shared + step % kTileStages * kStageBytes;
    const uint8_t* weight = source + Rows * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 16 inputs each
      uint32_t x[kM][4], w[kN / 2][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        gpu::LoadMatrix4(x[m], source + TileOffset(warp_row + m * 16 + source_line, half * 2 + source_chunk));
      }
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        gpu::LoadMatrix4(w[n], weight + TileOffset(warp_output + n * 16 + weight_line, half * 2 + weight_chunk));
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const uint32_t pair[2] = {w[n / 2][n % 2 * 2], w[n / 2][n % 2 * 2 + 1]};
          gpu::MultiplyAdd16816<T>(sums[m][n], x[m], pair);
        }
      }
    }
  }

  const int64_t row = first_row + warp_row + lane / 4, output = first_output + warp_output + lane % 4 * 2;
  // Two neighbours in one store where the target allows it.
  const bool pairs = !a.target_f32 && !a.accumulate && a.target_stride % 2 == 0 && a.outputs % 2 == 0;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t r = row + m * 16 + half * 8, o = output + n * 8;
        const float low = sums[m][n][half * 2], high = sums[m][n][half * 2 + 1];
        if (r >= a.rows || o >= a.outputs) continue;
        if (pairs) {
          *reinterpret_cast<uint32_t*>(static_cast<T*>(a.target) + r * a.target_stride + o) = gpu::PackFloats<T>(low, high);
        } else {
          StoreProduct<T>(a, r, o, low);
          if (o + 1 < a.outputs) StoreProduct<T>(a, r, o + 1, high);
        }
      }
    }
  }
}

}  // namespace kvtier::cuda
