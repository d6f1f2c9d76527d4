// Matrix products of a model: cuBLASLt where it is there and knows the shape, kernels of ours otherwise. For few rows, where
// memory is the limit, either may be the faster one: the first product of a shape times both, and the better one stays.
//
// Invariant: the first product of a shape waits for the device, so it never comes while a graph is captured (the transformer
// runs each batch size once before it captures it); from then on a shape is always computed by the same kernel.
#pragma once
#include <compare>
#include <map>
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
  struct Shape {
    NumberType type;
    int64_t row_tiles, outputs, inputs;  // tiles of 8 rows, a power of two
    bool target_f32;
    auto operator<=>(const Shape&) const = default;
  };
  bool OursIsFaster(Stream& stream, NumberType type, const GemmArgs& args);

  std::unique_ptr<CublasLt> library_;
  std::string name_;
  std::map<Shape, bool> ours_;  // one for each matrix of the model and size of batch: as many as it has kinds of these
};

}  // namespace kvtier::cuda
