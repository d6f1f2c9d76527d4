// cuBLASLt behind one call, loaded with dlopen: nothing of it is needed to build, and where it is missing the program runs
// with kernels of its own. The few prototypes and numbers used are in cublaslt.cc, after NVIDIA's public documentation.
//
// Invariant: one instance serves one stream, because its workspace does; each shape's algorithms are asked for once.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "../kernels/kernels.h"

namespace kvtier::cuda {

class CublasLt {
 public:
  // Null, and one line in `why`, where no library of major version 12 or 13 can be loaded or it refuses this device. `path`:
  // a library to take instead of the usual names; empty: these.
  static std::unique_ptr<CublasLt> Load(const std::string& path, std::string* why);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // As GemmOurs in kernels.h; f32 without TF32. `algorithm`: one of Algorithms, the library's favourite first; what the exact
  // shape does not have is the last that it has. False when the library has none for this shape: nothing was done.
  bool Run(Stream& stream, NumberType type, const GemmArgs& args, int algorithm = 0);
  int Algorithms(NumberType type, const GemmArgs& args);
  // "cuBLASLt 13.1.0 (libcublasLt.so.13)"
  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }

  struct Library;
  static constexpr size_t kWorkspaceBytes = 32 << 20;  // what NVIDIA recommends for Hopper

 private:
  struct Plan;
  struct Key {
    NumberType type;
    int64_t rows, outputs, inputs, target_stride, source_stride;
    bool accumulate, target_f32, aligned;
    auto operator<=>(const Key&) const = default;
  };
  CublasLt(std::unique_ptr<Library> library, std::string name, std::string version);
  std::unique_ptr<Plan> Prepare(const Key& key);
  const Plan& PlanOf(NumberType type, const GemmArgs& args);

  std::unique_ptr<Library> library_;
  std::string name_, version_;
  void* handle_ = nullptr;
  gpu::Buffer workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;  // at most kMaxPlans
};

}  // namespace kvtier::cuda
