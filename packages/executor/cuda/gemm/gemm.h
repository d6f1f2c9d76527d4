// Matrix products of a model: cuBLASLt where it is there and knows the shape, kernels of ours otherwise.
#pragma once
#include <memory>
#include <string>

#include "cublaslt.h"

namespace kvtier::cuda {

class Gemm {
 public:
  // `cublaslt`: a path of the library; empty: the usual names; "off": kernels of ours only. For one stream.
  explicit Gemm(const std::string& cublaslt);
  void Run(Stream& stream, NumberType type, const GemmArgs& args);
  // For the log, one line: which of the two it is, and why.
  const std::string& name() const { return name_; }

 private:
  std::unique_ptr<CublasLt> library_;
  std::string name_;
};

}  // namespace kvtier::cuda
