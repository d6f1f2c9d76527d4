// Matrix product of 9 to 64 rows (decodes of many sequences): as gemm_few.cuh, with twice the outputs to a block, whose warps share the rows
// through shared memory. There each block of 32 outputs reads all rows from L2 by itself: at 32 rows as many bytes as the weights, at
// 64 twice as many, which is more than L2 gives. Here it is half of that, and the rows of the next step are on their way meanwhile.
//
// 16 warps: 8 take runs of 64 inputs in turn, as there, each for the first or the second half of the outputs. Every sum is made of the same
// terms in the same order as there: a row has the same bits by either kernel.
//
//   a step's rows   [warp of 8][row][8 chunks of 8 inputs]; chunk c of row r lies at c ^ 4 (r % 2): the 8 lanes that read at once are two
//                   rows of half a run, in different banks
//
// Bytes: outputs x inputs x 2 from memory; rows x inputs x 2 per 64 outputs from L2.
#pragma once
#include "gemm_few.cuh"

namespace kvtier::cuda {

constexpr int kSharedHalves = 2;  // of a block's outputs
constexpr int kSharedThreads = kSharedHalves * kFewWarps * 32;
constexpr int kSharedTiles = 2;  // of 16 outputs, of a warp
constexpr int kSharedOutputs = kSharedHalves * kSharedTiles * 16;

// Of two steps' rows, and afterwards of the warps' sums.
template <int RowTiles>
constexpr size_t SharedRowsBytes() {
  constexpr size_t kRows = 2 * size_t{kFewWarps} * 8 * RowTiles * kFewRun * 2;
  constexpr size_t kSums = size_t{kFewWarps} * kSharedOutputs * 8 * RowTiles * sizeof(float);
  return kRows > kSums ? kRows : kSums;
}

template <class T, int RowTiles>
__global__ void __launch_bounds__(kSharedThreads, 1) GemmShared(GemmArgs a) {
  KVTIER_DYNAMIC_SHARED(shared);
  constexpr int kRows = 8 * RowTiles, kRunChunks = kFewRun / 8, kStepChunks = kFewWarps * kRunChunks;
  constexpr int kStageBytes = kFewWarps * kRows * kRunChunks * 16;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 % kFewWarps, half_of_outputs = thread / 32 / kFewWarps;
  const int lane = thread % 32, group = lane / 4, quad = lane % 4;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * kSharedOutputs;
  const int chunks = static_cast<int>(a.inputs / 8);  // registers are scarce: what fits has 32 bits
  const uint4 zero = make_uint4(0, 0, 0, 0);

  // Where the outputs' chunks begin. Outputs past the end read the last one: their sums are thrown away.
  const uint4* const weight = static_cast<const uint4*>(a.weight);
  uint32_t outputs[2 * kSharedTiles];
#pragma unroll
  for (int i = 0; i < 2 * kSharedTiles; ++i) {
    const int64_t output = min(first_output + half_of_outputs * (kSharedTiles * 16) + 8 * i + group, a.outputs - 1);
    outputs[i] = static_cast<uint32_t>(output * chunks + quad);
  }
  uint4 w[2][2 * kSharedTiles];  // both halves of a run; each is loaded anew when it has been multiplied
  const auto load = [&](int half, int chunk) {
    const int at = chunk + 4 * half;
#pragma unroll
    for (int i = 0; i < 2 * kSharedTiles; ++i) w[half][i] = at + quad < chunks ? gpu::LoadStreaming(weight + outputs[i] + at) : zero;
  };
  // The rows' chunks of a step, a row after the other by 64 threads each. Rows past the end are zeros: their sums are thrown away.
  const auto share = [&](int step) {
    uint8_t* const stage = shared + step % 2 * kStageBytes;
#pragma unroll 2
    for (int pass = 0; pass < kRows * kStepChunks / kSharedThreads; ++pass) {
      const int row = thread / kStepChunks + pass * (kSharedThreads / kStepChunks), in_step = thread % kStepChunks;
      const int chunk = step * kStepChunks + in_step;
      const bool valid = row < a.rows && chunk < chunks;
      const T* from = static_cast<const T*>(a.source) + (valid ? row * a.source_stride + chunk * 8 : 0);
      const int place = (in_step / kRunChunks * kRows + row) * kRunChunks + ((in_step % kRunChunks) ^ (row % 2 * 4));
      gpu::CopyAsync16(stage + place * 16, from, valid);
    }
    gpu::CopyAsyncCommit();
  };

  gpu::LetNextStart();
  int chunk = warp * kRunChunks;
  load(0, chunk);
  load(1, chunk);  // weights are nobody's result
  gpu::WaitForPrevious();
  share(0);
  float sums[kSharedTiles][RowTiles][4] = {};
  const int steps = (chunks + kStepChunks - 1) / kStepChunks;
  for (int step = 0; step < steps; ++step, chunk += kStepChunks) {
    gpu::CopyAsyncWait<0>();
    __syncthreads();  // this step's rows are here, and everybody has done with those whose place the next ones take
    if (step + 1 < steps) share(step + 1);
    if (chunk >= chunks) continue;
    const uint8_t* const rows = shared + step % 2 * kStageBytes + (warp * kRows + group) * (kRunChunks * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        const uint4 x = *reinterpret_cast<const uint4*>(rows + (r * 8 * kRunChunks + ((half * 4 + quad) ^ (group % 2 * 4))) * 16);
        const uint32_t x_first[2] = {x.x, x.y}, x_second[2] = {x.z, x.w};
#pragma unroll
        for (int o = 0; o < kSharedTiles; ++o) {
          const uint4 &low = w[half][2 * o], &high = w[half][2 * o + 1];
          const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
          gpu::MultiplyAdd16816<T>(sums[o][r], first, x_first);
          gpu::MultiplyAdd16816<T>(sums[o][r], second, x_second);
        }
      }
      if (chunk + kStepChunks < chunks) load(half, chunk + kStepChunks);
    }
  }

  // [warp of 8][tile of outputs, of rows][lane] of 4 floats.
  constexpr int kTiles = kSharedHalves * kSharedTiles * RowTiles;
  auto* partial = reinterpret_cast<float4*>(shared);
  __syncthreads();  // everybody has done with the rows
#pragma unroll
  for (int o = 0; o < kSharedTiles; ++o) {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
      const float* s = sums[o][r];
      partial[(warp * kTiles + (half_of_outputs * kSharedTiles + o) * RowTiles + r) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  __syncthreads();
  StoreSums<T, RowTiles, kTiles, kSharedThreads>(a, partial, first_output, 0);
}

}  // namespace kvtier::cuda
