// The two functions of a BLAS library that the CPU backend calls, as plain loops: the checks compare with the CPU's forward
// pass on machines that have no such library. Small models only. In place of the system's <cblas.h>.
#pragma once
#include <cstdint>

enum CBLAS_ORDER { CblasRowMajor = 101 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };

inline void openblas_set_num_threads(int) {}

// c[m, n] = alpha * a[m, k] x op(b) + beta * c, row-major; a is never transposed.
inline void cblas_sgemm(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE transpose_b, int m, int n, int k, float alpha, const float* a,
                        int a_stride, const float* b, int b_stride, float beta, float* c, int c_stride) {
  const auto at = [](const float* base, int64_t row, int64_t stride, int64_t column) { return base[row * stride + column]; };
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int x = 0; x < k; ++x) {
        sum += static_cast<double>(at(a, i, a_stride, x)) * (transpose_b == CblasTrans ? at(b, j, b_stride, x) : at(b, x, b_stride, j));
      }
      float& target = c[static_cast<int64_t>(i) * c_stride + j];
      target = static_cast<float>(alpha * sum) + (beta == 0 ? 0 : beta * target);  // beta 0: c may hold anything
    }
  }
}
