// Matrix products of a model: cuBLASLt where it is there and knows the shape, kernels of ours otherwise. For few rows, where
// memory is the limit, either may be the faster one: the first product of a shape times ours and some of the library's
// algorithms as decode steps run them, from one graph over the matrices of several layers, so that neither launches nor a
// cache that a step would find cold decide. What was chosen is kept (choices.h).
//
// Invariant: the first product of a shape waits for the device, so it never comes while a graph is captured (the transformer
// runs each batch size once before it captures it); from then on a shape is always computed by the same kernel.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "choices.h"
#include "cublaslt.h"

namespace kvtier::cuda {

struct GemmOptions {
  std::string cublaslt = {};        // a path of the library; empty: the usual names; "off": kernels of ours only
  std::string choices_folder = {};  // empty: choices are not kept
  // A row has the same bits in every process, however many rows come with it, up to 64: ours, and nothing is measured.
  bool equal_bits = false;
  bool dependent_launches = false;  // in what is measured, as in the steps' graphs
  // Microseconds of a graph; empty: measured. For tests.
  std::function<double(Stream&, const gpu::Graph&)> stopwatch = {};
};

class Gemm {
 public:
  static constexpr char kKernels[] = "kernels 3";  // another number whenever the kernels of ours change their speed

  // For one stream.
  explicit Gemm(const GemmOptions& options);
  // `alike`: the same matrix of all layers, args.weight among them.
  void Run(Stream& stream, NumberType type, const GemmArgs& args, std::span<const void* const> alike = {});
  // For the log, one line: which of the two it is, and why.
  const std::string& name() const { return name_; }

 private:
  int Choose(Stream& stream, NumberType type, const GemmArgs& args, std::span<const void* const> alike);

  const GemmOptions options_;
  std::unique_ptr<CublasLt> library_;
  std::string name_;
  std::unique_ptr<Choices> choices_;
};

}  // namespace kvtier::cuda
