// Matrix products against sums in double: every kernel, every type, sizes at and around the edges of tiles; what lies
// beside the target stays as it was.
#include <cmath>
#include <string>

#include "../gemm/gemm.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

struct Case {
  NumberType type;
  int64_t rows, outputs, inputs;
  bool accumulate = false, target_f32 = false;
  int version = 0;
  int64_t extra = 0;  // elements between rows, of source and target
};

std::string NameOf(const Case& c) {
  return std::string(Name(c.type)) + " " + std::to_string(c.rows) + "x" + std::to_string(c.outputs) + "x" + std::to_string(c.inputs) +
         (c.accumulate ? " accumulate" : "") + (c.target_f32 ? " f32 target" : "") + (c.extra > 0 ? " strided" : "") +
         (c.version > 0 ? " v" + std::to_string(c.version) : "");
}

size_t Size(int64_t count) { return static_cast<size_t>(count); }

// Everything between rows and one row behind the last is guarded.
void RunGemm(const Case& c) {
  const int64_t source_stride = c.inputs + c.extra, target_stride = c.outputs + c.extra;
  const auto source = RoundedAs(c.type, RandomFloats(1, c.rows * source_stride, -1, 1));
  const auto weight = RoundedAs(c.type, RandomFloats(2, c.outputs * c.inputs, -1, 1));
  const NumberType target_type = c.target_f32 ? NumberType::kF32 : c.type;
  const auto before = RoundedAs(target_type, RandomFloats(3, (c.rows + 1) * target_stride, -1, 1));

  std::vector<float> expected = before;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t output = 0; output < c.outputs; ++output) {
      double sum = 0;
      for (int64_t k = 0; k < c.inputs; ++k) sum += static_cast<double>(source[Size(row * source_stride + k)]) * weight[Size(output * c.inputs + k)];
      float& target = expected[Size(row * target_stride + output)];
      target = static_cast<float>(c.accumulate ? target + sum : sum);
    }
  }

  gpu::Stream stream;
  const auto device_source = UploadAs(c.type, source), device_weight = UploadAs(c.type, weight), target = UploadAs(target_type, before);
  GemmOurs(stream, c.type,
           {target.data(), device_source.data(), device_weight.data(), c.rows, c.outputs, c.inputs, target_stride, source_stride,
            c.accumulate, c.target_f32},
           c.version);
  Finish(stream);
  const auto result = DownloadAs(target_type, target);
  // One rounding of the result; and those of f32 sums of `inputs` terms of at most 1.
  const double allowed = Epsilon(target_type) + 2e-6 + 3e-8 * static_cast<double>(c.inputs);
  Expect("GemmOurs", NameOf(c), MaxRelativeError(result, expected), allowed);
  bool guarded = true;
  for (int64_t row = 0; row <= c.rows; ++row) {
    for (int64_t i = row < c.rows ? c.outputs : 0; i < target_stride; ++i) {
      guarded = guarded && result[Size(row * target_stride + i)] == before[Size(row * target_stride + i)];
    }
  }
  ExpectTrue("GemmOurs", NameOf(c) + ": nothing beside the target is written", guarded);
}

KVTIER_CHECK(gemm_plain) {
  for (const auto type : {kF32, kF16, kBf16}) {
    RunGemm({type, 1, 1, 1, false, false, 1});
    RunGemm({type, 5, 70, 33, false, false, 1});
    RunGemm({type, 67, 65, 40, true, false, 1, 3});
    RunGemm({type, 3, 66, 18, false, true, 1, 1});
  }
}

KVTIER_CHECK(gemm_few_rows) {
  for (const auto type : {kF16, kBf16}) {
    // One tile of rows, two, four, eight, and the edges between; inputs that not all warps have, and halves of a run.
    for (const int64_t rows : {1, 7, 8, 9, 16, 17, 32, 33, 64}) RunGemm({type, rows, 40, 584, rows % 2 == 0, rows == 7, 2});
    RunGemm({type, 1, 16, 8});
    RunGemm({type, 2, 17, 72, true, true, 0, 8});
    RunGemm({type, 20, 33, 1032, false, true, 0, 8});
  }
}

// Where outputs suffice for every multiprocessor the rows are shared; 40 outputs more are a block that is not full.
KVTIER_CHECK(gemm_shared_rows) {
  const int64_t outputs = 64 * gpu::Info().multiprocessors + 40;
  for (const auto type : {kF16, kBf16}) {
    for (const int64_t rows : {9, 16, 17, 33, 64}) RunGemm({type, rows, outputs, 584, rows % 2 == 0, rows == 17});
    RunGemm({type, 20, outputs, 1032, false, true, 0, 8});
    RunGemm({type, 40, outputs, 8});
  }
}

KVTIER_CHECK(gemm_tiles) {
  for (const auto type : {kF16, kBf16}) {
    RunGemm({type, 65, 64, 64});
    RunGemm({type, 130, 70, 40, true, false, 0, 8});       // edges in all directions, a step of 8 inputs
    RunGemm({type, 129, 515, 136, false, true});           // 128 x 128 tiles on the emulator's four multiprocessors
    RunGemm({type, 257, 1030, 72});                        // 128 x 256
    RunGemm({type, 300, 1111, 104, true});                 // odd outputs: no pairs
  }
  RunGemm({kBf16, 1100, 130, 64});  // more than one group of tiles of rows
}

// Unaligned operands must fall back, not fault.
KVTIER_CHECK(gemm_unaligned) {
  RunGemm({kBf16, 4, 20, 36});
  RunGemm({kF16, 70, 20, 64, false, false, 0, 1});
}

// A row's sum does not depend on how many rows come with it: as long as one version serves them, in every bit.
KVTIER_CHECK(gemm_batch_invariance) {
  constexpr int64_t kRows = 64, kInputs = 1096;
  for (const auto type : {kF32, kBf16}) {
    for (const int64_t outputs : {int64_t{48}, int64_t{64} * gpu::Info().multiprocessors}) {  // the second: rows are shared
      if (type == kF32 && outputs > 48) continue;
      const auto source = UploadAs(type, RandomFloats(4, kRows * kInputs, -1, 1)), weight = UploadAs(type, RandomFloats(5, outputs * kInputs, -1, 1));
      gpu::Stream stream;
      const auto product = [&](int64_t rows, int version) {
        DeviceArray<float> target(Size(rows * outputs));
        GemmOurs(stream, type, {target.data(), source.data(), weight.data(), rows, outputs, kInputs, outputs, kInputs, false, true}, version);
        Finish(stream);
        return target.Download();
      };
      const auto all = product(kRows, 0);
      if (type != kF32) ExpectTrue("GemmOurs", std::string(Name(type)) + " " + std::to_string(outputs) + " outputs, shared rows or not", product(kRows, 2) == all);
      for (const int64_t rows : {1, 3, 12, 30}) {
        const auto some = product(rows, 0);
        ExpectTrue("GemmOurs", std::string(Name(type)) + " " + std::to_string(rows) + " rows as among 64, " + std::to_string(outputs) + " outputs",
                   std::equal(some.begin(), some.end(), all.begin()));
      }
    }
  }
}

// Random numbers that later checks and benches stand on: in range, of the right mean, and the same for the same seed.
KVTIER_CHECK(fill_random) {
  constexpr int64_t kCount = 10'001;
  for (const auto type : {kF32, kF16, kBf16}) {
    gpu::Stream stream;
    const DeviceArray<uint8_t> one(Size(kCount * NumberBytes(type))), two(Size(kCount * NumberBytes(type)));
    FillRandom(stream, type, one.data(), kCount, 7, 0.5f, 1.0f);
    FillRandom(stream, type, two.data(), kCount, 7, 0.5f, 1.0f);
    Finish(stream);
    const auto values = DownloadAs(type, one);
    double sum = 0, farthest = 0;
    for (const float value : values) {
      sum += value;
      farthest = std::max(farthest, std::abs(static_cast<double>(value) - 1));
    }
    Expect("FillRandom", std::string(Name(type)) + " mean", std::abs(sum / kCount - 1), 0.02);
    Expect("FillRandom", std::string(Name(type)) + " range", farthest, 0.5);
    ExpectTrue("FillRandom", std::string(Name(type)) + " again", values == DownloadAs(type, two));
  }
}

KVTIER_CHECK(gemm_names_what_it_uses) {
  const Gemm off({.cublaslt = "off"}), missing({.cublaslt = "/nonexistent/libcublasLt.so"});
  ExpectTrue("Gemm", "switched off", off.name() == "own kernels, without cuBLASLt: switched off");
  ExpectTrue("Gemm", "missing library", missing.name().starts_with("own kernels, without cuBLASLt: "));
}

}  // namespace
}  // namespace kvtier::cuda::check
