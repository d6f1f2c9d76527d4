// Timing, limits and the main function of kernel_bench: `kernel_bench [--list] [NAME...]`. Exit code 2 when there is no GPU.
#include "bench.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../gemm/cublaslt.h"

namespace kvtier::cuda::bench {
namespace {

constexpr size_t kFlushBytes = 256 << 20;  // several times the L2 of any GPU there is
constexpr size_t kCopyBytes = size_t{1} << 30;
constexpr int64_t kDeadlineUs = 60'000'000;

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Figure {
  std::string name, unit;
  double value;
  double limit;  // 0: one that all figures of this unit share
  std::string limit_name;
};
std::vector<Figure>& figures() {
  static std::vector<Figure> all;
  return all;
}

double gemm_flops = 0;
std::string gemm_name = "no GEMM was measured";

void Print(const Figure& figure, double limit, const std::string& limit_name, double ratio, bool last) {
  char numbers[200];
  snprintf(numbers, sizeof numbers, "\"value\":%.6g,\"unit\":\"%s\",\"limit\":%.6g,\"limitName\":\"", figure.value,
           figure.unit.c_str(), limit);
  printf("{\"name\":\"%s\",%s%s\",\"ratio\":%.4g}%s", figure.name.c_str(), numbers, limit_name.c_str(), ratio, last ? "" : ",");
  fprintf(stderr, "%-56s %10.4g %-8s %5.1f %% of %s\n", figure.name.c_str(), figure.value, figure.unit.c_str(), 100 * ratio,
          limit_name.c_str());
}

double CopyRate(gpu::Stream& stream) {
  const gpu::Buffer a(kCopyBytes, "copy source"), b(kCopyBytes, "copy target");
  stream.Set(a.data(), 1, kCopyBytes);
  const double us = TimeUs(stream, [&] { stream.Copy(b.data(), a.data(), kCopyBytes); });
  return 2.0 * kCopyBytes / us / 1000;  // GB/s
}

void PrintAll(double copy_gb_per_s) {
  printf("{\"suite\":\"gpu-kernels\",\"figures\":[");
  const auto& all = figures();
  for (size_t i = 0; i < all.size(); ++i) {
    const Figure& figure = all[i];
    const bool last = i + 1 == all.size();
    if (figure.limit > 0) {
      Print(figure, figure.limit, figure.limit_name, figure.limit / figure.value, last);
    } else if (figure.unit == "GB/s") {
      Print(figure, copy_gb_per_s, "device memcpy", figure.value / copy_gb_per_s, last);
    } else {
      Print(figure, gemm_flops / 1e12, gemm_name, gemm_flops > 0 ? figure.value * 1e12 / gemm_flops : 0, last);
    }
  }
  printf("]}\n");
}

int Run(const std::vector<std::string>& wanted) {
  std::string why;
  if (gpu::DeviceCount(&why) == 0) {
    fprintf(stderr, "no GPU: %s\n", why.c_str());
    return 2;
  }
  gpu::Use(0);
  fprintf(stderr, "device: %s\n", gpu::Info().name.c_str());
  std::string cublaslt = "not found: ";
  if (const auto library = CublasLt::Load("", &cublaslt)) cublaslt = library->name();
  fprintf(stderr, "cuBLASLt: %s\n", cublaslt.c_str());
  gpu::Stream stream;
  const double copy_gb_per_s = CopyRate(stream);
  for (const Case& one : cases()) {
    bool selected = wanted.empty();
    for (const std::string& part : wanted) selected = selected || strstr(one.name, part.c_str()) != nullptr;
    if (selected) one.run();
  }
  PrintAll(copy_gb_per_s);
  return 0;
}

}  // namespace

Registration::Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }

double TimeUs(gpu::Stream& stream, const std::function<void()>& enqueue, int repeats) {
  const gpu::Buffer flush(kFlushBytes, "what flushes the L2 cache");
  std::vector<double> times;
  for (int i = 0; i <= repeats; ++i) {
    gpu::Event from(true), to(true);
    stream.Set(flush.data(), static_cast<uint8_t>(i), kFlushBytes);
    from.Record(stream);
    enqueue();
    to.Record(stream);
    if (!to.Wait(kDeadlineUs)) throw std::runtime_error("a kernel did not end within 60 s");
    if (i > 0) times.push_back(gpu::Event::ElapsedUs(from, to));
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)];
}

void ReportBytes(const std::string& kernel, const std::string& shape, double us, double bytes) {
  figures().push_back({kernel + " " + shape, "GB/s", bytes / us / 1000, 0, ""});
}
void ReportFlops(const std::string& kernel, const std::string& shape, double us, double flops) {
  figures().push_back({kernel + " " + shape, "TFLOP/s", flops / us / 1e6, 0, ""});
}
void ReportUs(const std::string& kernel, const std::string& shape, double us, double limit_us, const std::string& limit_name) {
  figures().push_back({kernel + " " + shape, "us", us, limit_us, limit_name});
}
void RecordGemmRate(double flops_per_second, const std::string& name) {
  if (flops_per_second <= gemm_flops) return;
  gemm_flops = flops_per_second;
  gemm_name = name;
}

}  // namespace kvtier::cuda::bench

int main(int count, char** arguments) {
  using namespace kvtier::cuda::bench;
  const std::vector<std::string> wanted(arguments + 1, arguments + count);
  if (!wanted.empty() && wanted[0] == "--list") {
    for (const auto& one : cases()) printf("%s\n", one.name);
    return 0;
  }
  try {
    return Run(wanted);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
