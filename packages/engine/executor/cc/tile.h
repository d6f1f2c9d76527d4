// One tile of a matrix product, of which all others are made: R rows x V vectors of outputs, each output summed over the inputs one
// after the other, from the first to the last. Invariant: what comes out for a row never depends on which rows stand beside it, nor on
// how many: so a request's tokens are the same alone and in company, computed at once or in parts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

namespace kvtier {

#ifdef __AVX512F__
constexpr int64_t kVectorFloats = 16;
constexpr int kTileRows = 12;
#else
constexpr int64_t kVectorFloats = 8;  // sixteen registers: twelve of sums, two of weights, one of the source
constexpr int kTileRows = 6;
#endif
constexpr int64_t kPanel = 16;  // outputs side by side
constexpr int kPanelVectors = kPanel / kVectorFloats;

// kAdd: to what target holds, once all is summed. kContinue: what target holds is where the sums begin.
enum class Into { kReplace, kAdd, kContinue };

// Output o of input i is weight[o / kPanel * panel_step + i * input_step + o % kPanel].
struct TileArgs {
  const float* source;
  int64_t source_stride;
  const float* weight;
  int64_t input_step, panel_step, inputs;
  float* target;
  int64_t target_stride;
};

template <int R, int P, Into I>
void Tile(const TileArgs& a) {
  typedef float Vector __attribute__((vector_size(kVectorFloats * 4), aligned(4)));
  constexpr int V = P * kPanelVectors;
  const auto target = [&](int r, int v) -> Vector& {
    return *reinterpret_cast<Vector*>(a.target + r * a.target_stride + v * kVectorFloats);
  };
  Vector sums[R][V] = {};
  if constexpr (I == Into::kContinue) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] = target(r, v);
    }
  }
  const float* __restrict source = a.source;
  const float* __restrict weight = a.weight;
  for (int64_t i = 0; i < a.inputs; ++i) {
    Vector w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      w[v] = *reinterpret_cast<const Vector*>(weight + v / kPanelVectors * a.panel_step + i * a.input_step +
                                              v % kPanelVectors * kVectorFloats);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float s = source[r * a.source_stride + i];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] += s * w[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) target(r, v) = I == Into::kAdd ? target(r, v) + sums[r][v] : sums[r][v];
  }
}

// The last outputs, fewer than a panel.
template <Into I>
void NarrowTile(const TileArgs& a, int64_t rows, int64_t outputs) {
  for (int64_t r = 0; r < rows; ++r) {
    float* target = a.target + r * a.target_stride;
    float sums[kPanel] = {};
    if (I == Into::kContinue) std::copy(target, target + outputs, sums);
    for (int64_t i = 0; i < a.inputs; ++i) {
      const float s = a.source[r * a.source_stride + i];
      for (int64_t o = 0; o < outputs; ++o) sums[o] += s * a.weight[i * a.input_step + o];
    }
    for (int64_t o = 0; o < outputs; ++o) target[o] = I == Into::kAdd ? target[o] + sums[o] : sums[o];
  }
}

// R rows; P panels at once, so that few rows are sums enough to keep the adders busy.
template <int R, int P, Into I>
void TileRow(const TileArgs& a, int64_t outputs) {
  TileArgs at = a;
  const auto next = [&](int panels) {
    at.weight += panels * a.panel_step;
    at.target += panels * kPanel;
    outputs -= panels * kPanel;
  };
  for (; outputs >= P * kPanel; next(P)) Tile<R, P, I>(at);
  for (; outputs >= kPanel; next(1)) Tile<R, 1, I>(at);
}

template <Into I, int... R>
void TileRows(const TileArgs& a, int64_t rows, int64_t outputs, std::integer_sequence<int, R...>) {
  // One of R + 1, the number of rows, 1 to kTileRows.
  ((rows == R + 1 ? TileRow<R + 1, (R < 1 ? 4 : R < 2 ? 2 : 1), I>(a, outputs) : void()), ...);
}

// target[rows, outputs] (+)= source[rows, inputs] x weight
template <Into I>
void Tiles(const TileArgs& a, int64_t rows, int64_t outputs) {
  const int64_t narrow = outputs % kPanel, whole = outputs - narrow;
  for (int64_t row = 0; row < rows; row += kTileRows) {
    TileArgs at = a;
    at.source += row * a.source_stride;
    at.target += row * a.target_stride;
    const int64_t count = std::min<int64_t>(kTileRows, rows - row);
    TileRows<I>(at, count, whole, std::make_integer_sequence<int, kTileRows>());
    if (narrow == 0) continue;
    at.weight += whole / kPanel * a.panel_step;
    at.target += whole;
    NarrowTile<I>(at, count, narrow);
  }
}

// Rows of `count` floats become columns: target[i * kPanel + row].
inline void Transpose(const float* source, int64_t rows, int64_t count, float* target) {
  typedef float Four __attribute__((vector_size(16), aligned(4)));
  typedef int32_t Order __attribute__((vector_size(16)));
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    const float* from = source + row * count;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      Four in[4];
      for (int r = 0; r < 4; ++r) in[r] = *reinterpret_cast<const Four*>(from + r * count + i);
      const Four low01 = __builtin_shuffle(in[0], in[1], Order{0, 4, 1, 5}), high01 = __builtin_shuffle(in[0], in[1], Order{2, 6, 3, 7});
      const Four low23 = __builtin_shuffle(in[2], in[3], Order{0, 4, 1, 5}), high23 = __builtin_shuffle(in[2], in[3], Order{2, 6, 3, 7});
      const Four out[4] = {__builtin_shuffle(low01, low23, Order{0, 1, 4, 5}), __builtin_shuffle(low01, low23, Order{2, 3, 6, 7}),
                           __builtin_shuffle(high01, high23, Order{0, 1, 4, 5}), __builtin_shuffle(high01, high23, Order{2, 3, 6, 7})};
      for (int r = 0; r < 4; ++r) *reinterpret_cast<Four*>(target + (i + r) * kPanel + row) = out[r];
    }
    for (; i < count; ++i) {
      for (int r = 0; r < 4; ++r) target[i * kPanel + row + r] = from[r * count + i];
    }
  }
  if (rows % 4 == 0) return;  // known at compile time for whole panels: no loop then
  for (; row < rows; ++row) {
    for (int64_t i = 0; i < count; ++i) target[i * kPanel + row] = source[row * count + i];
  }
}

}  // namespace kvtier
