#include "cublaslt.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <compare>
#include <stdexcept>
#include <vector>

namespace kvtier::cuda {
namespace {

// From the cuBLAS documentation (cublasLt API, "Datatypes Reference"); the same in versions 12 and 13.
constexpr int kSuccess = 0;
constexpr int kReal32 = 0, kReal16 = 2, kRealBf16 = 14;  // cudaDataType_t
constexpr int kCompute32 = 68;                           // CUBLAS_COMPUTE_32F: no TF32
constexpr int kTransposeA = 3, kTransposeB = 4;          // cublasLtMatmulDescAttributes_t
constexpr int kAsIs = 0, kTransposed = 1;                // cublasOperation_t
constexpr int kMaxWorkspaceBytes = 1;                    // cublasLtMatmulPreferenceAttributes_t
constexpr int kMinAlignmentBytes[] = {5, 6, 7, 8};       // of A, B, C, D

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

constexpr size_t kMaxPlans = 1024;  // prompts bring ever new numbers of rows
constexpr int kAlgorithms = 12;     // that are asked for; the first is the library's favourite

const char* const kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so.13",
                              "/usr/local/cuda/lib64/libcublasLt.so.12"};

bool Aligned(const void* pointer, int64_t stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % 256 == 0 && stride * element_bytes % 16 == 0;
}

// The file that a module came from.
std::string FileOf(void* module, const std::string& name) {
  link_map* map = nullptr;
  return dlinfo(module, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != 0 ? map->l_name : name;
}

}  // namespace

struct CublasLt::Library {
  void* module = nullptr;
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  size_t (*version)();
  int (*desc_create)(void** desc, int compute, int scale_type);
  int (*desc_destroy)(void* desc);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t bytes);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_destroy)(void* preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                   Heuristic results[], int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm,
                void* workspace, size_t workspace_bytes, void* stream);

  // The first symbol that is missing; empty when all are there.
  std::string Bind() {
    std::string missing;
    const auto bind = [&](auto& function, const char* name) {
      void* symbol = dlsym(module, name);
      if (symbol == nullptr && missing.empty()) missing = name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    bind(create, "cublasLtCreate");
    bind(destroy, "cublasLtDestroy");
    bind(version, "cublasLtGetVersion");
    bind(desc_create, "cublasLtMatmulDescCreate");
    bind(desc_destroy, "cublasLtMatmulDescDestroy");
    bind(desc_set, "cublasLtMatmulDescSetAttribute");
    bind(layout_create, "cublasLtMatrixLayoutCreate");
    bind(layout_destroy, "cublasLtMatrixLayoutDestroy");
    bind(preference_create, "cublasLtMatmulPreferenceCreate");
    bind(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    bind(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    bind(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    bind(matmul, "cublasLtMatmul");
    return missing;
  }
};

// Descriptors of one shape; no algorithms: the library has nothing for it.
struct CublasLt::Plan {
  explicit Plan(const Library& library) : library(library) {}
  ~Plan() {
    for (void* layout : {a, b, d}) {
      if (layout != nullptr) library.layout_destroy(layout);
    }
    if (desc != nullptr) library.desc_destroy(desc);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Library& library;
  void *desc = nullptr, *a = nullptr, *b = nullptr, *d = nullptr;
  std::vector<Heuristic> algorithms;
};

std::unique_ptr<CublasLt> CublasLt::Load(const std::string& path, std::string* why) {
  auto library = std::make_unique<Library>();
  std::string name = path;
  if (!path.empty()) {
    library->module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  } else {
    for (const char* candidate : kNames) {
      name = candidate;
      library->module = dlopen(candidate, RTLD_NOW | RTLD_LOCAL);
      if (library->module != nullptr) break;
    }
  }
  if (library->module == nullptr) {
    const char* error = dlerror();
    *why = path.empty() ? "libcublasLt.so.13 and .12 are not in the library path" : std::string(error ? error : "not loaded");
    return nullptr;
  }
  if (const std::string missing = library->Bind(); !missing.empty()) {
    *why = name + " has no " + missing;
    return nullptr;
  }
  name = FileOf(library->module, name);
  // 13.1.0 is 130100; 12.8.4 is 120804.
  const size_t version = library->version();
  const std::string number = std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  if (version / 10000 != 12 && version / 10000 != 13) {
    *why = name + " is version " + number + "; 12 and 13 are known";
    return nullptr;
  }
  auto made = std::unique_ptr<CublasLt>(new CublasLt(std::move(library), "cuBLASLt " + number + " (" + name + ")", number));
  if (const int status = made->library_->create(&made->handle_); status != kSuccess) {
    *why = name + ": cublasLtCreate failed with status " + std::to_string(status);
    return nullptr;
  }
  made->workspace_ = gpu::Buffer(kWorkspaceBytes, "the workspace of cuBLASLt");
  return made;
}

CublasLt::CublasLt(std::unique_ptr<Library> library, std::string name, std::string version)
    : library_(std::move(library)), name_(std::move(name)), version_(std::move(version)) {}

CublasLt::~CublasLt() {
  plans_.clear();
  if (handle_ != nullptr) library_->destroy(handle_);
  // The module stays loaded: unloading it while its own threads and caches live is not supported.
}

// Row-major matrices are column-major ones transposed: target^T[outputs, rows] = weight (transposed back) x source^T.
std::unique_ptr<CublasLt::Plan> CublasLt::Prepare(const Key& key) {
  auto plan = std::make_unique<Plan>(*library_);
  const int type = key.type == NumberType::kF32 ? kReal32 : key.type == NumberType::kF16 ? kReal16 : kRealBf16;
  const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
  const int operation_a = kTransposed, operation_b = kAsIs;
  const bool made =
      library_->desc_create(&plan->desc, kCompute32, kReal32) == kSuccess &&
      library_->desc_set(plan->desc, kTransposeA, &operation_a, sizeof operation_a) == kSuccess &&
      library_->desc_set(plan->desc, kTransposeB, &operation_b, sizeof operation_b) == kSuccess &&
      library_->layout_create(&plan->a, type, u(key.inputs), u(key.outputs), key.inputs) == kSuccess &&
      library_->layout_create(&plan->b, type, u(key.inputs), u(key.rows), key.source_stride) == kSuccess &&
      library_->layout_create(&plan->d, key.target_f32 ? kReal32 : type, u(key.outputs), u(key.rows), key.target_stride) == kSuccess;
  void* preference = nullptr;
  if (!made || library_->preference_create(&preference) != kSuccess) {
    throw std::runtime_error("GPU: " + name_ + " cannot describe a matrix product; switch it off (cublaslt: off)");
  }
  const uint64_t bytes = kWorkspaceBytes;
  bool good = library_->preference_set(preference, kMaxWorkspaceBytes, &bytes, sizeof bytes) == kSuccess;
  if (!key.aligned) {  // else the library takes for granted that pointers are multiples of 256
    const uint32_t alignment = static_cast<uint32_t>(NumberBytes(key.type));
    for (const int attribute : kMinAlignmentBytes) {
      good = good && library_->preference_set(preference, attribute, &alignment, sizeof alignment) == kSuccess;
    }
  }
  int found = 0;
  Heuristic results[kAlgorithms] = {};
  const int status =
      good ? library_->heuristic(handle_, plan->desc, plan->a, plan->b, plan->d, plan->d, preference, kAlgorithms, results, &found) : -1;
  library_->preference_destroy(preference);
  for (int i = 0; status == kSuccess && i < std::min(found, kAlgorithms); ++i) {
    if (results[i].status == kSuccess && results[i].workspace_bytes <= kWorkspaceBytes) plan->algorithms.push_back(results[i]);
  }
  return plan;
}

const CublasLt::Plan& CublasLt::PlanOf(NumberType type, const GemmArgs& a) {
  const int64_t bytes = NumberBytes(type);
  const Key key{type, a.rows, a.outputs, a.inputs, a.target_stride, a.source_stride, a.accumulate, a.target_f32,
                Aligned(a.weight, a.inputs, bytes) && Aligned(a.source, a.source_stride, bytes) &&
                    Aligned(a.target, a.target_stride, a.target_f32 ? 4 : bytes)};
  auto at = plans_.find(key);
  if (at == plans_.end()) {
    if (plans_.size() >= kMaxPlans) plans_.clear();
    at = plans_.emplace(key, Prepare(key)).first;
  }
  return *at->second;
}

int CublasLt::Algorithms(NumberType type, const GemmArgs& args) { return static_cast<int>(PlanOf(type, args).algorithms.size()); }

bool CublasLt::Run(Stream& stream, NumberType type, const GemmArgs& a, int algorithm) {
  if (a.rows == 0 || a.outputs == 0) return true;
  const Plan& plan = PlanOf(type, a);
  if (plan.algorithms.empty()) return false;
  const Heuristic& chosen = plan.algorithms[std::min(static_cast<size_t>(algorithm), plan.algorithms.size() - 1)];
  const float one = 1, beta = a.accumulate ? 1 : 0;
  const int status = library_->matmul(handle_, plan.desc, &one, a.weight, plan.a, a.source, plan.b, &beta, a.target, plan.d, a.target,
                                      plan.d, &chosen.algorithm, workspace_.data(), kWorkspaceBytes, gpu::NativeStream(stream));
  if (status != kSuccess) {
    throw std::runtime_error("GPU: " + name_ + ": a product of " + std::to_string(a.rows) + " x " + std::to_string(a.outputs) + " x " +
                             std::to_string(a.inputs) + " failed with status " + std::to_string(status) + "; switch it off (cublaslt: off)");
  }
  return true;
}

}  // namespace kvtier::cuda
