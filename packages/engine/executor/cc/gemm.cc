#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tile.h"

namespace kvtier {
namespace {

constexpr int64_t kTaskFloats = 32 << 10;  // of weights per task: they stay in the second cache while all rows pass
constexpr int64_t kTasksPerThread = 4;     // balance shared cores
constexpr int64_t kTaskOutputs = 4 * kPanel;

typedef float Vector __attribute__((vector_size(kVectorFloats * 4), aligned(4)));

// The lanes' sum, always in the same order.
float SumOf(const Vector& vector) {
  float lanes[kVectorFloats];
  memcpy(lanes, &vector, sizeof(lanes));
  for (int64_t half = kVectorFloats / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Dots of R source rows with C rows of weights: each is loaded once.
template <int R, int C>
void Dots(const GemmArgs& a, const float* __restrict source, const float* __restrict weight, float* target) {
  Vector sums[R][C] = {};
  int64_t i = 0;
  for (; i + kVectorFloats <= a.inputs; i += kVectorFloats) {
    Vector w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) w[c] = *reinterpret_cast<const Vector*>(weight + c * a.inputs + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vector s = *reinterpret_cast<const Vector*>(source + r * a.source_stride + i);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] += s * w[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float sum = SumOf(sums[r][c]);
      for (int64_t rest = i; rest < a.inputs; ++rest) sum += weight[c * a.inputs + rest] * source[r * a.source_stride + rest];
      float& out = target[r * a.target_stride + c];
      out = a.accumulate ? out + sum : sum;
    }
  }
}

template <int R, int C>
void DotRows(const GemmArgs& a, int64_t row, int64_t first, int64_t last) {
  const float* source = a.source + row * a.source_stride;
  float* target = a.target + row * a.target_stride;
  int64_t output = first;
  for (; output + C <= last; output += C) Dots<R, C>(a, source, a.weight + output * a.inputs, target + output);
  for (; output < last; ++output) Dots<R, 1>(a, source, a.weight + output * a.inputs, target + output);
}

// fn(first output, last output)
template <class Fn>
void ForOutputs(const GemmArgs& a, ThreadPool& pool, const Fn& fn) {
  const auto tasks = [](int64_t outputs) { return std::max<int64_t>(1, outputs / kTaskOutputs) * kTaskOutputs; };
  const int64_t each = tasks(std::min(kTaskFloats / a.inputs, a.outputs / (kTasksPerThread * pool.threads())));
  pool.For((a.outputs + each - 1) / each, [&](int64_t task, int) { fn(task * each, std::min(a.outputs, (task + 1) * each)); });
}

}  // namespace

void PackPanels(float* weight, int64_t outputs, int64_t inputs) {
  std::vector<float> rows(static_cast<size_t>(kPanel * inputs));
  for (int64_t first = 0; first < outputs; first += kPanel) {
    const int64_t count = std::min(kPanel, outputs - first);
    float* panel = weight + first * inputs;
    memcpy(rows.data(), panel, static_cast<size_t>(count * inputs) * 4);
    if (count == kPanel) {
      Transpose(rows.data(), kPanel, inputs, panel);
      continue;
    }
    for (int64_t i = 0; i < inputs; ++i) {
      for (int64_t row = 0; row < count; ++row) panel[i * count + row] = rows[static_cast<size_t>(row * inputs + i)];
    }
  }
}

void Gemm(const GemmArgs& a, ThreadPool& pool) {
  ForOutputs(a, pool, [&](int64_t first, int64_t last) {
    const auto tiles = [&](int64_t from, int64_t to, int64_t input_step) {
      const TileArgs tile{a.source,   a.source_stride,   a.weight + from * a.inputs, input_step, kPanel * a.inputs,
                          a.inputs, a.target + from, a.target_stride};
      if (a.accumulate) {
        Tiles<Into::kAdd>(tile, a.rows, to - from);
      } else {
        Tiles<Into::kReplace>(tile, a.rows, to - from);
      }
    };
    const int64_t whole = last - (last - first) % kPanel;
    if (whole > first) tiles(first, whole, kPanel);
    if (last > whole) tiles(whole, last, last - whole);
  });
}

void GemmOfRows(const GemmArgs& a, ThreadPool& pool) {
  ForOutputs(a, pool, [&](int64_t first, int64_t last) {
    constexpr int kManyOutputs = kVectorFloats == 16 ? 6 : 3;
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4) DotRows<4, kManyOutputs>(a, row, first, last);
    switch (a.rows - row) {
      case 3: DotRows<3, 4>(a, row, first, last); break;
      case 2: DotRows<2, 4>(a, row, first, last); break;
      case 1: DotRows<1, 8>(a, row, first, last); break;
      default: break;
    }
  });
}

}  // namespace kvtier
