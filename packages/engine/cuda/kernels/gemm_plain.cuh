// Matrix product, version 1: plain tiles, any type, any size. Every sum runs over the inputs from first to last by fused
// multiply-adds in f32, whatever the number of rows: a row's result does not depend on what it is batched with.
//
// FLOPs: 2 x rows x outputs x inputs. Bytes: each tile of 64 x 64 reads its 64 rows of both operands once.
#pragma once
#include "../gpu/device.h"
#include "kernels.h"

namespace kvtier::cuda {

constexpr int kPlainTile = 64;    // rows and outputs of a block
constexpr int kPlainInputs = 16;  // inputs per step
constexpr int kPlainThreads = 256;

// Where the epilogue writes; the same for all versions.
template <class T>
__device__ __forceinline__ void StoreProduct(const GemmArgs& a, int64_t row, int64_t output, float value) {
  const int64_t at = row * a.target_stride + output;
  if (a.target_f32) {
    float* target = static_cast<float*>(a.target) + at;
    *target = a.accumulate ? *target + value : value;
  } else {
    T* target = static_cast<T*>(a.target) + at;
    *target = FromFloat<T>(a.accumulate ? ToFloat(*target) + value : value);
  }
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads) GemmPlain(GemmArgs a) {
  // One more column: threads of a warp read along a row, and write down a column.
  __shared__ float source[kPlainInputs][kPlainTile + 1];
  __shared__ float weight[kPlainInputs][kPlainTile + 1];
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kPlainTile;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * kPlainTile;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 16, output = thread % 16;  // and every 16th after: neighbours read neighbours
  float sums[4][4] = {};

  for (int64_t k = 0; k < a.inputs; k += kPlainInputs) {
#pragma unroll
    for (int i = 0; i < kPlainTile * kPlainInputs / kPlainThreads; ++i) {
      const int at = thread + i * kPlainThreads, line = at / kPlainInputs, input = at % kPlainInputs;
      const bool inside = k + input < a.inputs;
      source[input][line] = inside && first_row + line < a.rows
                                ? ToFloat(static_cast<const T*>(a.source)[(first_row + line) * a.source_stride + k + input])
                                : 0.0f;
      weight[input][line] = inside && first_output + line < a.outputs
                                ? ToFloat(static_cast<const T*>(a.weight)[(first_output + line) * a.inputs + k + input])
                                : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int input = 0; input < kPlainInputs; ++input) {
      float x[4], w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = source[input][row + 16 * i];
        w[i] = weight[input][output + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[i], w[j], sums[i][j]);
      }
    }
    __syncthreads();
  }

  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int64_t r = first_row + row + 16 * i, o = first_output + output + 16 * j;
      if (r < a.rows && o < a.outputs) StoreProduct<T>(a, r, o, sums[i][j]);
    }
  }
}

}  // namespace kvtier::cuda
