// Benches at real shapes, each figure beside its limit measured in the same run. A bench reports how long a launch took and the bytes or
// FLOPs that the work needs at least; main (bench.cc) measures the limits and prints each figure at once, one line of JSON on stdout.
// A case runs in a process of its own: one that throws, hangs or loses the device costs itself only, and is a line with its error.
// The emulator runs the same cases at a 64th of the size: that they run, not how fast.
//
//   KVTIER_BENCH(rms_norm) {
//     ...
//     ReportBytes("RmsNorm", "bf16 8192x4096", TimeUs(stream, [&] { RmsNorm(stream, ...); }), 2 * rows * columns * 2);
//   }
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../gpu/gpu.h"

namespace kvtier::cuda::bench {

#if defined(KVTIER_EMULATED)
constexpr bool kTiny = true;
#else
constexpr bool kTiny = false;
#endif
// A number of tokens, rows or blocks, brought down to what the emulator runs in a moment.
constexpr int64_t Scaled(int64_t count) { return kTiny ? std::max<int64_t>(1, count / 64) : count; }
constexpr int Rounds(int count) { return kTiny ? 1 : count; }

// The 8B Llama whose shapes all benches use.
constexpr int64_t kHidden = kTiny ? 256 : 4096, kHeads = kTiny ? 4 : 32, kKvHeads = kTiny ? 2 : 8, kHeadDim = kTiny ? 64 : 128;
constexpr int64_t kIntermediate = kTiny ? 512 : 14336, kVocab = kTiny ? 1024 : 128256, kLayers = kTiny ? 4 : 32;

// Microseconds of what `enqueue` puts into the stream: the median of `repeats`, each from a cold L2 cache, after one that warms up.
// Events on the device, so that launches hide behind the flush.
double TimeUs(gpu::Stream& stream, const std::function<void()>& enqueue, int repeats = 21);
// Microseconds by the clock on the wall.
template <class Work>
double WallUs(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}
double Median(std::vector<double> values);
void Finish(gpu::Stream& stream);  // throws after 60 s

// Against the bandwidth of a device-to-device copy (read + write counted), measured in the same run.
void ReportBytes(const std::string& kernel, const std::string& shape, double us, double bytes);
// Against the rate of an 8192^3 product in bf16, that of the fastest of cuBLASLt's algorithms where it is found, measured in the same run.
void ReportFlops(const std::string& kernel, const std::string& shape, double us, double flops);
// Against a peer that the bench itself has timed, smaller is better.
void ReportUs(const std::string& kernel, const std::string& shape, double us, double limit_us, const std::string& limit_name);
// How many of how many.
void ReportCount(const std::string& what, double count, double of, const std::string& of_name);
// FLOPs per second of matrix products, and of what; bench_gemm.cc measures it.
struct GemmRate {
  double fastest, favourite;  // of the algorithms that the library names: what it names first need not be the fastest
  std::string name;
};
GemmRate MeasuredGemmRate();

struct Registration {
  Registration(const char* name, void (*run)());
};
#define KVTIER_BENCH(name)                                                                   \
  static void Bench_##name();                                                                \
  static const ::kvtier::cuda::bench::Registration bench_registration_##name(#name, Bench_##name); \
  static void Bench_##name()

}  // namespace kvtier::cuda::bench
