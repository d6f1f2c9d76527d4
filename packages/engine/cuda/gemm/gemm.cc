#include "gemm.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

namespace kvtier::cuda {
namespace {

constexpr int64_t kDecodeRows = 64;
constexpr int kGemmRounds = 5;
constexpr size_t kLaunches = 8;  // of different layers: more bytes than a cache holds
constexpr int64_t kGemmDeadlineUs = 60'000'000;

double MeasuredUs(Stream& stream, const gpu::Graph& graph) {
  std::array<double, kGemmRounds> times{};
  stream.Launch(graph);  // what is loaded and warmed up
  for (double& us : times) {
    gpu::Event from(true), to(true);
    from.Record(stream);
    stream.Launch(graph);
    to.Record(stream);
    if (!to.Wait(kGemmDeadlineUs)) {
      gpu::Abandon();
      throw std::runtime_error("GPU: a matrix product did not end within 60 s; restart the worker");
    }
    us = gpu::Event::ElapsedUs(from, to);
  }
  std::sort(times.begin(), times.end());
  return times[kGemmRounds / 2];
}

int64_t Padded(int64_t rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : (rows + 7) / 8 * 8; }

}  // namespace

Gemm::Gemm(const GemmOptions& options) : options_(options) {
  std::string why = "switched off";
#if defined(KVTIER_EMULATED)
  if (options.cublaslt.empty()) {
    name_ = "own kernels, without cuBLASLt: the emulator has no GPU";
    return;
  }
#endif
  if (options.cublaslt != "off") library_ = CublasLt::Load(options.cublaslt, &why);
  if (!library_) {
    name_ = "own kernels, without cuBLASLt: " + why;
    return;
  }
  name_ = library_->name() + (options.equal_bits ? ", own kernels for up to 64 rows" : ", own kernels where they are faster");
  const auto info = gpu::Info();
  const std::string of = info.name + " " + std::to_string(info.compute_capability) + " " + library_->version() + " " + kKernels +
                         (options.dependent_launches ? " dependent" : "");
  choices_ = std::make_unique<Choices>(options.choices_folder, of);
}

int Gemm::Choose(Stream& stream, NumberType type, const GemmArgs& args, std::span<const void* const> alike) {
  const ProductShape shape{type, Padded(args.rows), args.outputs, args.inputs, args.target_f32};
  if (const int* known = choices_->Find(shape)) return *known;
  const auto time = [&](int way) {
    const auto run = [&](const void* weight) {
      GemmArgs one = args;
      one.weight = weight;
      if (way != kOurs) return library_->Run(stream, type, one, way);
      GemmOurs(stream, type, one);
      return true;
    };
    if (!run(args.weight)) return std::numeric_limits<double>::infinity();  // loaded before it is captured
    stream.BeginCapture(options_.dependent_launches);
    for (size_t i = 0; i < kLaunches; ++i) run(alike.empty() ? args.weight : alike[i % alike.size()]);
    const gpu::Graph graph = stream.EndCapture();
    return options_.stopwatch ? options_.stopwatch(stream, graph) : MeasuredUs(stream, graph);
  };
  int best = kOurs;
  double best_us = time(kOurs);
  const int algorithms = library_->Algorithms(type, args);
  for (int way = 0; way < algorithms; ++way) {
    if (const double us = time(way); us < best_us) best = way, best_us = us;
  }
  return choices_->Keep(shape, best);
}

void Gemm::Run(Stream& stream, NumberType type, const GemmArgs& args, std::span<const void* const> alike) {
  // What accumulates cannot be done twice; f32 has no kernel for few rows.
  const bool few = library_ && args.rows > 0 && args.rows <= kDecodeRows && !args.accumulate && type != NumberType::kF32;
  const int way = few ? options_.equal_bits ? kOurs : Choose(stream, type, args, alike) : 0;
  if (library_ && way != kOurs && library_->Run(stream, type, args, way)) return;
  GemmOurs(stream, type, args);
}

}  // namespace kvtier::cuda
