// rows.cu against reference.cc, in all types, at rows that fill a block badly and at the 8B shape. What is allowed is one
// rounding to the type, plus what sums of thousands of f32 lose.
#include "../kernels/reference.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

constexpr NumberType kTypes[] = {NumberType::kF32, NumberType::kF16, NumberType::kBf16};
constexpr float kEps = 1e-5f;

struct RowsShape {
  int64_t rows, columns;
};
constexpr RowsShape kShapes[] = {{3, 8}, {5, 896}, {2, 4096}, {2, 5376}, {1, 16384}};

std::string Case(NumberType type, const RowsShape& s, const char* more = "") {
  return std::string(Name(type)) + " " + std::to_string(s.rows) + "x" + std::to_string(s.columns) + more;
}
double Allowed(NumberType type) { return 2 * Epsilon(type) + 2e-6; }

// Sources as the kernel will see them.
std::vector<float> Inputs(NumberType type, uint64_t seed, int64_t count, float high = 2) {
  return RoundedAs(type, RandomFloats(seed, count, -high, high));
}

template <class Fn>
void ForAll(const Fn& fn) {
  for (const NumberType type : kTypes) {
    for (const RowsShape& shape : kShapes) fn(type, shape);
  }
}

KVTIER_CHECK(embed) {
  ForAll([](NumberType type, const RowsShape& s) {
    gpu::Stream stream;
    const auto table = Inputs(type, 1, 50 * s.columns);
    const auto ids = RandomInts(2, s.rows, 0, 49);
    const DeviceArray<uint8_t> source = UploadAs(type, table), target = UploadAs(type, std::vector<float>(static_cast<size_t>(s.rows * s.columns)));
    const DeviceArray<int32_t> index(ids);
    Embed(stream, type, target.data(), source.data(), index.data(), s.rows, s.columns, 8.5f);
    Finish(stream);
    Expect("Embed", Case(type, s), MaxRelativeError(DownloadAs(type, target), reference::GatherRows(table, ids, s.columns, 8.5f)), Allowed(type));
    GatherRows(stream, type, target.data(), source.data(), index.data(), s.rows, s.columns);
    Finish(stream);
    Expect("GatherRows", Case(type, s), MaxError(DownloadAs(type, target), reference::GatherRows(table, ids, s.columns, 1)), 0);
  });
}

KVTIER_CHECK(rms_norm) {
  ForAll([](NumberType type, const RowsShape& s) {
    gpu::Stream stream;
    const auto x = Inputs(type, 3, s.rows * s.columns), w = Inputs(type, 4, s.columns);
    const DeviceArray<uint8_t> source = UploadAs(type, x), weight = UploadAs(type, w);
    RmsNorm(stream, type, source.data(), source.data(), weight.data(), s.rows, s.columns, kEps);  // in place
    Finish(stream);
    Expect("RmsNorm", Case(type, s), MaxRelativeError(DownloadAs(type, source), reference::RmsNorm(x, w, kEps)), Allowed(type));
  });
}

KVTIER_CHECK(add_rms_norm) {
  ForAll([](NumberType type, const RowsShape& s) {
    for (const bool with_bias : {false, true}) {
      gpu::Stream stream;
      auto r = Inputs(type, 5, s.rows * s.columns, 20);
      const auto x = Inputs(type, 6, s.rows * s.columns), w = Inputs(type, 7, s.columns);
      const auto b = with_bias ? Inputs(type, 8, s.columns) : std::vector<float>{};
      const DeviceArray<uint8_t> residual = UploadAs(type, r), added = UploadAs(type, x), weight = UploadAs(type, w);
      const DeviceArray<uint8_t> bias = UploadAs(type, b), target = UploadAs(type, x);
      AddRmsNorm(stream, type, target.data(), residual.data(), added.data(), with_bias ? bias.data() : nullptr, weight.data(), s.rows,
                 s.columns, kEps);
      Finish(stream);
      const auto normed = reference::AddRmsNorm(r, x, b, w, kEps, type);
      const char* more = with_bias ? " bias" : "";
      Expect("AddRmsNorm", Case(type, s, more), MaxRelativeError(DownloadAs(type, target), normed), Allowed(type));
      Expect("AddRmsNorm", Case(type, s, more) + ", residual", MaxError(DownloadAs(type, residual), r), 0);
    }
  });
}

KVTIER_CHECK(norm_add) {
  ForAll([](NumberType type, const RowsShape& s) {
    for (const bool with_bias : {false, true}) {
      gpu::Stream stream;
      auto r = Inputs(type, 9, s.rows * s.columns, 20);
      const auto x = Inputs(type, 10, s.rows * s.columns), w = Inputs(type, 11, s.columns);
      const auto b = with_bias ? Inputs(type, 12, s.columns) : std::vector<float>{};
      const DeviceArray<uint8_t> residual = UploadAs(type, r), added = UploadAs(type, x), weight = UploadAs(type, w), bias = UploadAs(type, b);
      NormAdd(stream, type, residual.data(), added.data(), with_bias ? bias.data() : nullptr, weight.data(), s.rows, s.columns, kEps);
      Finish(stream);
      reference::NormAdd(r, x, b, w, kEps);
      Expect("NormAdd", Case(type, s, with_bias ? " bias" : ""), MaxRelativeError(DownloadAs(type, residual), r), Allowed(type));
    }
  });
}

KVTIER_CHECK(gated_activation) {
  ForAll([](NumberType type, const RowsShape& s) {
    for (const bool gelu : {false, true}) {
      gpu::Stream stream;
      auto x = Inputs(type, 13, 2 * s.rows * s.columns, 8);
      x[0] = RoundedAs(type, {-200.0f})[0];  // e^200 is no f32
      x[1] = RoundedAs(type, {200.0f})[0];
      const DeviceArray<uint8_t> source = UploadAs(type, x), target = UploadAs(type, std::vector<float>(x.size() / 2));
      GatedActivation(stream, type, target.data(), source.data(), s.rows, s.columns, gelu);
      Finish(stream);
      Expect("GatedActivation", Case(type, s, gelu ? " gelu" : " silu"),
             MaxRelativeError(DownloadAs(type, target), reference::GatedActivation(x, s.columns, gelu)), Allowed(type));
    }
  });
}

KVTIER_CHECK(rows_refuse) {
  gpu::Stream stream;
  const auto refuses = [](const auto& work) {
    try {
      work();
      return false;
    } catch (const std::invalid_argument&) {
      return true;
    }
  };
  ExpectTrue("RmsNorm", "refuses 12 columns of bf16",
             refuses([&] { RmsNorm(stream, NumberType::kBf16, nullptr, nullptr, nullptr, 1, 12, kEps); }));
  ExpectTrue("RmsNorm", "refuses e4m3", refuses([&] { RmsNorm(stream, NumberType::kE4m3, nullptr, nullptr, nullptr, 1, 16, kEps); }));
}

}  // namespace
}  // namespace kvtier::cuda::check
