#include "gemm.h"

#include <cblas.h>

#include <algorithm>

namespace kvtier {
namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kFewOutputs = 64;  // outputs per task when few rows: 64 rows of weights, 128 KiB at 512 inputs
constexpr int64_t kManyRows = 1024;
constexpr int64_t kFewColumns = 256;
constexpr int64_t kPiecesPerThread = 4;

// Dots of one weight row with R source rows at once, so that the weight is loaded once.
template <int R>
void FewRows(const GemmArgs& a, int64_t first_row, int64_t first, int64_t last) {
  const float* source = a.source + first_row * a.source_stride;
  float* target = a.target + first_row * a.target_stride;
  for (int64_t output = first; output < last; ++output) {
    typedef float Vector __attribute__((vector_size(64), aligned(4)));
    constexpr int64_t kWidth = 16;
    const float* weight = a.weight + output * a.inputs;
    Vector sums[R][2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth <= a.inputs; i += 2 * kWidth) {
      const Vector w0 = *reinterpret_cast<const Vector*>(weight + i);
      const Vector w1 = *reinterpret_cast<const Vector*>(weight + i + kWidth);
      for (int r = 0; r < R; ++r) {
        sums[r][0] += w0 * *reinterpret_cast<const Vector*>(source + r * a.source_stride + i);
        sums[r][1] += w1 * *reinterpret_cast<const Vector*>(source + r * a.source_stride + i + kWidth);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Vector both = sums[r][0] + sums[r][1];
      float sum = 0;
      for (int64_t lane = 0; lane < kWidth; ++lane) sum += both[lane];
      for (int64_t rest = i; rest < a.inputs; ++rest) sum += weight[rest] * source[r * a.source_stride + rest];
      float& out = target[r * a.target_stride + output];
      out = a.accumulate ? out + sum : sum;
    }
  }
}

void FewRowsPiece(const GemmArgs& a, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + 4 <= a.rows; row += 4) FewRows<4>(a, row, first, last);
  switch (a.rows - row) {
    case 3: FewRows<3>(a, row, first, last); break;
    case 2: FewRows<2>(a, row, first, last); break;
    case 1: FewRows<1>(a, row, first, last); break;
    default: break;
  }
}

int64_t Pieces(int64_t count, int64_t piece) { return (count + piece - 1) / piece; }

}  // namespace

void GemmSetup() { openblas_set_num_threads(1); }

void Gemm(const GemmArgs& a, ThreadPool& pool) {
  if (a.rows <= kFewRows) {
    pool.For(Pieces(a.outputs, kFewOutputs), [&](int64_t task, int) {
      FewRowsPiece(a, task * kFewOutputs, std::min(a.outputs, (task + 1) * kFewOutputs));
    });
    return;
  }
  // Each piece packs its own operands, so pieces are large in both directions; four per thread balance shared cores.
  const int64_t row_piece = Pieces(a.rows, Pieces(a.rows, kManyRows));
  const int64_t wanted = std::max<int64_t>(1, kPiecesPerThread * pool.threads() / Pieces(a.rows, row_piece));
  const int64_t column_piece = std::max(std::min(a.outputs, kFewColumns), Pieces(a.outputs, wanted));
  const int64_t columns = Pieces(a.outputs, column_piece);
  pool.For(Pieces(a.rows, row_piece) * columns, [&](int64_t task, int) {
    const int64_t row = task / columns * row_piece, column = task % columns * column_piece;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(std::min(row_piece, a.rows - row)),
                static_cast<int>(std::min(column_piece, a.outputs - column)), static_cast<int>(a.inputs), 1.0f,
                a.source + row * a.source_stride, static_cast<int>(a.source_stride), a.weight + column * a.inputs,
                static_cast<int>(a.inputs), a.accumulate ? 1.0f : 0.0f,
                a.target + row * a.target_stride + column, static_cast<int>(a.target_stride));
  });
}

}  // namespace kvtier
