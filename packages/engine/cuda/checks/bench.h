// Benches of kernels at real shapes, on a GPU only: each figure beside its limit measured in the same run. A bench reports
// how long a launch took and the bytes or FLOPs that the work needs at least; main (bench.cc) measures the limits and prints
// the project's figures as one line of JSON on stdout.
//
//   KVTIER_BENCH(rms_norm) {
//     ...
//     ReportBytes("RmsNorm", "bf16 8192x4096", TimeUs(stream, [&] { RmsNorm(stream, ...); }), 2 * rows * columns * 2);
//   }
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "../gpu/gpu.h"

namespace kvtier::cuda::bench {

// The 8B Llama whose shapes all benches use.
constexpr int64_t kHidden = 4096, kHeads = 32, kKvHeads = 8, kHeadDim = 128, kIntermediate = 14336, kVocab = 128256;

// Microseconds of what `enqueue` puts into the stream: the median of `repeats`, each from a cold L2 cache, after one that warms up.
// Events on the device, so that launches hide behind the flush.
double TimeUs(gpu::Stream& stream, const std::function<void()>& enqueue, int repeats = 21);

// Against the bandwidth of a device-to-device copy (read + write counted), measured in the same run.
void ReportBytes(const std::string& kernel, const std::string& shape, double us, double bytes);
// Against the bf16 matrix rate of this run: the best that RecordGemmRate was told.
void ReportFlops(const std::string& kernel, const std::string& shape, double us, double flops);
// Against a peer that the bench itself has timed, smaller is better.
void ReportUs(const std::string& kernel, const std::string& shape, double us, double limit_us, const std::string& limit_name);
// The GEMM bench tells the highest FLOP/s it saw and of what ("cuBLASLt bf16 8192^3"); all figures are printed at the end.
void RecordGemmRate(double flops_per_second, const std::string& name);

struct Registration {
  Registration(const char* name, void (*run)());
};
#define KVTIER_BENCH(name)                                                                   \
  static void Bench_##name();                                                                \
  static const ::kvtier::cuda::bench::Registration bench_registration_##name(#name, Bench_##name); \
  static void Bench_##name()

}  // namespace kvtier::cuda::bench
