// Matrix products of the 8B model, ours and cuBLASLt's: few rows against the bandwidth (each weight is read once), many
// against the best rate of this run.
#include <algorithm>
#include <string>
#include <vector>

#include "../gemm/gemm.h"
#include "bench.h"

namespace kvtier::cuda::bench {
namespace {

constexpr auto kGemmType = NumberType::kBf16;
constexpr int64_t kMemoryRows = 64;  // up to here memory is the limit

struct Matrix {
  const char* name;
  int64_t outputs, inputs;
};
const std::vector<Matrix> kMatrices = {{"qkv", kHidden + 2 * kKvHeads * kHeadDim, kHidden},
                                       {"o", kHidden, kHidden},
                                       {"gate_up", 2 * kIntermediate, kHidden},
                                       {"down", kHidden, kIntermediate}};

gpu::Buffer Random(gpu::Stream& stream, int64_t count, uint64_t seed) {
  gpu::Buffer buffer(static_cast<size_t>(count * NumberBytes(kGemmType)), "a bench's matrix");
  FillRandom(stream, kGemmType, buffer.data(), count, seed, 1, 0);
  return buffer;
}

using Product = std::function<void(gpu::Stream&, NumberType, const GemmArgs&)>;

// Microseconds of one product; the sizes and who computes it, as the figure's name.
void Measure(gpu::Stream& stream, const Matrix& m, int64_t rows, const std::string& who, const Product& product) {
  const auto source = Random(stream, rows * m.inputs, 1), weight = Random(stream, m.outputs * m.inputs, 2);
  const gpu::Buffer target(static_cast<size_t>(rows * m.outputs * NumberBytes(kGemmType)), "a bench's matrix");
  const double us = TimeUs(stream, [&] {
    product(stream, kGemmType, {target.data(), source.data(), weight.data(), rows, m.outputs, m.inputs, m.outputs, m.inputs, false, false});
  });
  const std::string shape = "bf16 " + std::to_string(rows) + " rows " + m.name + " " + std::to_string(m.outputs) + "x" + std::to_string(m.inputs);
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(m.outputs) * static_cast<double>(m.inputs);
  if (rows <= kMemoryRows) {
    ReportBytes("GEMM " + who, shape, us, static_cast<double>(m.outputs * m.inputs + rows * (m.inputs + m.outputs)) * 2);
  } else {
    ReportFlops("GEMM " + who, shape, us, flops);
  }
}

}  // namespace

GemmRate MeasuredGemmRate() {
  gpu::Stream stream;
  constexpr int64_t kSide = Scaled(8192);
  const auto source = Random(stream, kSide * kSide, 1), weight = Random(stream, kSide * kSide, 2);
  const gpu::Buffer target(static_cast<size_t>(kSide * kSide * NumberBytes(kGemmType)), "a bench's matrix");
  const GemmArgs args{target.data(), source.data(), weight.data(), kSide, kSide, kSide, kSide, kSide, false, false};
  std::string why;
  const auto cublaslt = CublasLt::Load("", &why);
  const std::string of = " bf16 " + std::to_string(kSide) + "^3";
  const auto rate = [&](const std::function<void()>& product) { return 2.0 * kSide * kSide * kSide / TimeUs(stream, product) * 1e6; };
  const int algorithms = cublaslt ? cublaslt->Algorithms(kGemmType, args) : 0;
  if (algorithms == 0) {
    const double ours = rate([&] { GemmOurs(stream, kGemmType, args); });
    return {ours, ours, "our GEMM (no cuBLASLt)" + of};
  }
  std::vector<double> rates;
  for (int way = 0; way < algorithms; ++way) rates.push_back(rate([&] { cublaslt->Run(stream, kGemmType, args, way); }));
  return {std::ranges::max(rates), rates.front(), "cuBLASLt" + of + ", the fastest of " + std::to_string(algorithms)};
}

namespace {

KVTIER_BENCH(gemm) {
  gpu::Stream stream;
  std::string why;
  const auto cublaslt = CublasLt::Load("", &why);
  if (!cublaslt) fprintf(stderr, "cuBLASLt: %s; the GEMM rate is that of our own kernels\n", why.c_str());
  const Product ours = [](gpu::Stream& s, NumberType type, const GemmArgs& args) { GemmOurs(s, type, args); };
  const Product apart = [](gpu::Stream& s, NumberType type, const GemmArgs& args) { GemmOurs(s, type, args, 2); };
  const Product theirs = [&](gpu::Stream& s, NumberType type, const GemmArgs& args) {
    if (!cublaslt->Run(s, type, args)) throw std::runtime_error("cuBLASLt has no algorithm for a shape of the 8B model");
  };
  for (const Matrix& matrix : kMatrices) {
    for (const int64_t rows : {int64_t{1}, int64_t{16}, int64_t{32}, kMemoryRows, Scaled(256), Scaled(2048), Scaled(8192)}) {
      Measure(stream, matrix, rows, "ours", ours);
      if (rows > 8 && rows <= kMemoryRows) Measure(stream, matrix, rows, "ours, rows not shared", apart);
      if (cublaslt) Measure(stream, matrix, rows, "cuBLASLt", theirs);
    }
  }
}

}  // namespace
}  // namespace kvtier::cuda::bench
