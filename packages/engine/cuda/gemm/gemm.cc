#include "gemm.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>

namespace kvtier::cuda {
namespace {

constexpr int64_t kFewRows = 64;
constexpr int kRounds = 5;
constexpr int64_t kDeadlineUs = 60'000'000;

template <class Work>
double TimeUs(Stream& stream, const Work& work) {
  gpu::Event from(true), to(true);
  from.Record(stream);
  work();
  to.Record(stream);
  if (!to.Wait(kDeadlineUs)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: a matrix product did not end within 60 s; restart the worker");
  }
  return gpu::Event::ElapsedUs(from, to);
}

double Median(std::array<double, kRounds>& values) {
  std::sort(values.begin(), values.end());
  return values[kRounds / 2];
}

}  // namespace

Gemm::Gemm(const std::string& cublaslt) {
  std::string why = "switched off";
#if defined(KVTIER_EMULATED)
  if (cublaslt.empty()) {
    name_ = "own kernels, without cuBLASLt: the emulator has no GPU";
    return;
  }
#endif
  if (cublaslt != "off") library_ = CublasLt::Load(cublaslt, &why);
  name_ = library_ ? library_->name() + ", own kernels where they are faster" : "own kernels, without cuBLASLt: " + why;
}

bool Gemm::OursIsFaster(Stream& stream, NumberType type, const GemmArgs& args) {
  const auto tiles = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>((args.rows + 7) / 8)));
  const Shape shape{type, tiles, args.outputs, args.inputs, args.target_f32};
  if (const auto known = ours_.find(shape); known != ours_.end()) return known->second;
  std::array<double, kRounds> ours{}, theirs{};
  bool has_algorithm = library_->Run(stream, type, args);  // both are loaded before they are timed
  GemmOurs(stream, type, args);
  for (int round = 0; has_algorithm && round < kRounds; ++round) {
    theirs[static_cast<size_t>(round)] = TimeUs(stream, [&] { has_algorithm = library_->Run(stream, type, args); });
    ours[static_cast<size_t>(round)] = TimeUs(stream, [&] { GemmOurs(stream, type, args); });
  }
  return ours_[shape] = !has_algorithm || Median(ours) < Median(theirs);
}

void Gemm::Run(Stream& stream, NumberType type, const GemmArgs& args) {
  // What accumulates cannot be done twice; f32 has no kernel for few rows.
  const bool choose = library_ && args.rows > 0 && args.rows <= kFewRows && !args.accumulate && type != NumberType::kF32;
  if (library_ && !(choose && OursIsFaster(stream, type, args)) && library_->Run(stream, type, args)) return;
  GemmOurs(stream, type, args);
}

}  // namespace kvtier::cuda
