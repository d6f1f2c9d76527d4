// A library with cuBLASLt's entry points that computes on the CPU, column by column, from what the descriptors say: the
// order of calls, the numbers of attributes and the transposed view of our matrices are tested where there is no GPU. The
// emulator's device memory is the host's; one stream must be idle when a product is asked for.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "../gpu/numeric.h"

using namespace kvtier;

namespace {

struct Desc {
  int compute, scale_type;
  std::map<int, int> operations;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t leading;
};
struct Preference {
  std::map<int, uint64_t> values;
};

int alive = 0, heuristics = 0, last_algorithm = 0;

constexpr int kInvalid = 7;  // CUBLAS_STATUS_INVALID_VALUE
constexpr int kUnsupported = 15;

float Read(const void* base, int type, int64_t at) {
  if (type == 0) return static_cast<const float*>(base)[at];
  if (type == 2) return ToFloat(static_cast<const f16*>(base)[at]);
  return ToFloat(static_cast<const bf16*>(base)[at]);
}
void Write(void* base, int type, int64_t at, float value) {
  if (type == 0) {
    static_cast<float*>(base)[at] = value;
  } else if (type == 2) {
    static_cast<f16*>(base)[at] = FromFloat<f16>(value);
  } else {
    static_cast<bf16*>(base)[at] = FromFloat<bf16>(value);
  }
}

template <class T, class... Args>
int Create(void** target, Args... args) {
  *target = new T{args...};
  ++alive;
  return 0;
}
template <class T>
int Destroy(void* object) {
  delete static_cast<T*>(object);
  --alive;
  return 0;
}

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

}  // namespace

extern "C" {

int standin_alive() { return alive; }
int standin_heuristics() { return heuristics; }
void standin_forget(int value) { last_algorithm = value; }
int standin_last_algorithm() { return last_algorithm; }

int cublasLtCreate(void** handle) { return Create<int>(handle, 42); }
int cublasLtDestroy(void* handle) { return Destroy<int>(handle); }
size_t cublasLtGetVersion() { return 130102; }
int cublasLtMatmulDescCreate(void** desc, int compute, int scale_type) {
  return Create<Desc>(desc, compute, scale_type, std::map<int, int>{});
}
int cublasLtMatmulDescDestroy(void* desc) { return Destroy<Desc>(desc); }
int cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* value, size_t bytes) {
  if (bytes != 4 || (attribute != 3 && attribute != 4)) return kInvalid;
  memcpy(&static_cast<Desc*>(desc)->operations[attribute], value, 4);
  return 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return leading < static_cast<int64_t>(rows) ? kInvalid : Create<Layout>(layout, type, rows, columns, leading);
}
int cublasLtMatrixLayoutDestroy(void* layout) { return Destroy<Layout>(layout); }
int cublasLtMatmulPreferenceCreate(void** preference) { return Create<Preference>(preference, std::map<int, uint64_t>{}); }
int cublasLtMatmulPreferenceDestroy(void* preference) { return Destroy<Preference>(preference); }
int cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* value, size_t bytes) {
  if (bytes != (attribute == 1 ? 8u : 4u) || attribute < 1 || attribute > 8) return kInvalid;
  memcpy(&static_cast<Preference*>(preference)->values[attribute], value, bytes);
  return 0;
}
// Shapes of 13 columns are "not supported", so that the caller's own way is tested, too.
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void* b, void*, void*, void* preference, int wanted, void* results, int* found) {
  ++heuristics;
  if (static_cast<Preference*>(preference)->values.count(1) == 0 || wanted != 12) return kInvalid;
  *found = static_cast<Layout*>(b)->columns == 13 ? 0 : 3;
  if (*found == 0) return kUnsupported;
  auto* result = static_cast<Heuristic*>(results);
  for (uint64_t i = 0; i < 3; ++i) {
    result[i] = {};
    result[i].algorithm[0] = 4711 + i;
    result[i].status = i == 1 ? kUnsupported : 0;  // is left out
  }
  return 0;
}
int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout, const void* beta,
                   const void* c, void* c_layout, void* d, void* d_layout, const void* algorithm, void* workspace, size_t, void*) {
  const auto &wanted = *static_cast<Desc*>(desc);
  const auto &la = *static_cast<Layout*>(a_layout), &lb = *static_cast<Layout*>(b_layout), &lc = *static_cast<Layout*>(c_layout),
             &ld = *static_cast<Layout*>(d_layout);
  const bool transpose_a = wanted.operations.at(3) == 1, transpose_b = wanted.operations.at(4) == 1;
  const uint64_t m = transpose_a ? la.columns : la.rows, k = transpose_a ? la.rows : la.columns;
  const uint64_t k_b = transpose_b ? lb.columns : lb.rows, n = transpose_b ? lb.rows : lb.columns;
  uint64_t mark;
  memcpy(&mark, algorithm, 8);
  if (*static_cast<int*>(handle) != 42 || (mark != 4711 && mark != 4713) || workspace == nullptr || wanted.compute != 68 || wanted.scale_type != 0) return kInvalid;
  if (k != k_b || ld.rows != m || ld.columns != n || lc.rows != m || lc.columns != n || la.type != lb.type || lc.type != ld.type) return kInvalid;
  last_algorithm = static_cast<int>(mark);
  // The favourite is not always the fastest one.
  static const char* const slow = getenv("KVTIER_STANDIN_FAVOURITE_MS");
  if (slow != nullptr && mark == 4711) std::this_thread::sleep_for(std::chrono::milliseconds(atoi(slow)));
  float one, old;
  memcpy(&one, alpha, 4);
  memcpy(&old, beta, 4);
  for (uint64_t j = 0; j < n; ++j) {
    for (uint64_t i = 0; i < m; ++i) {
      float sum = 0;
      for (uint64_t x = 0; x < k; ++x) {
        const uint64_t at_a = transpose_a ? i * static_cast<uint64_t>(la.leading) + x : x * static_cast<uint64_t>(la.leading) + i;
        const uint64_t at_b = transpose_b ? x * static_cast<uint64_t>(lb.leading) + j : j * static_cast<uint64_t>(lb.leading) + x;
        sum += Read(a, la.type, static_cast<int64_t>(at_a)) * Read(b, lb.type, static_cast<int64_t>(at_b));
      }
      const auto at = static_cast<int64_t>(j * static_cast<uint64_t>(ld.leading) + i);
      Write(d, ld.type, at, one * sum + (old == 0 ? 0 : old * Read(c, lc.type, at)));
    }
  }
  return 0;
}

}  // extern "C"
