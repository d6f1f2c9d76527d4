// Registration, comparison and the main function of kernel_check and runtime_check: `kernel_check [--list | --mutate] [NAME...]`
// runs the checks that an argument names, or whose name contains one that names none (--mutate: mutate.h). Exit code 0 when every line is ok, 2
// when there is no GPU.
#include "check.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "../json.h"
#include "mutate.h"

namespace kvtier::cuda::check {
namespace {

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
int expected = 0, failed = 0;
bool end_at_failure = false;
int64_t finish_us = 60'000'000;

std::string Number(double value) {  // JSON has no NaN and no infinity
  if (!std::isfinite(value)) return "null";
  char text[40];
  snprintf(text, sizeof text, "%.9g", value);
  return text;
}

void Line(const std::string& kernel, const std::string& name, double error, double allowed, bool ok, const std::string& why = "") {
  ++expected;
  failed += ok ? 0 : 1;
  printf("{\"kernel\":%s,\"case\":%s,\"maxError\":%s,\"allowed\":%s,\"ok\":%s%s}\n", Quoted(kernel).c_str(), Quoted(name).c_str(),
         Number(error).c_str(), Number(allowed).c_str(), ok ? "true" : "false", why.empty() ? "" : (",\"error\":" + Quoted(why)).c_str());
  fflush(stdout);
  if (!ok && end_at_failure) _exit(1);
}

uint64_t SplitMix(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

template <class Difference>
double Largest(const std::vector<float>& a, const std::vector<float>& b, const Difference& difference) {
  if (a.size() != b.size()) return std::nan("");
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (a[i] == b[i]) continue;  // infinities too
    const double one = difference(static_cast<double>(a[i]), static_cast<double>(b[i]));
    if (std::isnan(one)) return one;
    largest = std::max(largest, one);
  }
  return largest;
}

// fn(T{}) with the type that `type` names.
template <class Fn>
auto WithType(NumberType type, const Fn& fn) {
  switch (type) {
    case NumberType::kF32: return fn(float{});
    case NumberType::kF16: return fn(f16{});
    case NumberType::kBf16: return fn(bf16{});
    case NumberType::kE4m3: return fn(e4m3{});
  }
  throw std::logic_error("no such type");
}

bool Selected(const Case& one, const std::vector<std::string>& wanted) {
  if (wanted.empty()) return true;
  return std::ranges::any_of(wanted, [&](const std::string& part) {
    const bool is_name = std::ranges::any_of(cases(), [&](const Case& each) { return part == each.name; });
    return is_name ? part == one.name : strstr(one.name, part.c_str()) != nullptr;
  });
}

int Run(const std::vector<std::string>& wanted) {
  std::string why;
  if (gpu::DeviceCount(&why) == 0) {
    fprintf(stderr, "no GPU: %s\n", why.c_str());
    return 2;
  }
  gpu::Use(0);
  const gpu::DeviceInfo info = gpu::Info();
  fprintf(stderr, "device: %s, compute capability %d.%d, %d multiprocessors\n", info.name.c_str(), info.compute_capability / 10,
          info.compute_capability % 10, info.multiprocessors);
  for (const Case& one : cases()) {
    if (!Selected(one, wanted)) continue;
    const int before = expected;
    const auto start = std::chrono::steady_clock::now();
    try {
#if defined(KVTIER_EMULATED)
      gpu::ForgetKernels();  // each check passes by itself, too
#endif
      one.run();
      if (expected == before) throw std::logic_error("this check expects nothing");
    } catch (const std::exception& error) {
      Line(one.name, "threw", std::nan(""), 0, false, error.what());
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    fprintf(stderr, "%-32s %6.2f s\n", one.name, elapsed.count());
  }
  fprintf(stderr, "%d of %d ok\n", expected - failed, expected);
  return failed == 0 && expected > 0 ? 0 : 1;
}

}  // namespace

Registration::Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }

void EndAtFailure() {
  end_at_failure = true;
  finish_us = int64_t{3600} * 1'000'000;  // who gives up waiting on a busy machine has compared nothing
}

std::string TemporaryName(const std::string& kind) {
  const char* folder = std::getenv("TMPDIR");
  return std::string(folder != nullptr ? folder : "/tmp") + "/kvtier-check-" + kind + "XXXXXX";
}

void Expect(const std::string& kernel, const std::string& name, double max_error, double allowed) {
  Line(kernel, name, max_error, allowed, max_error <= allowed);
}

void Finish(gpu::Stream& stream) {
  if (!stream.Synchronize(finish_us)) throw std::runtime_error("a kernel did not end within " + std::to_string(finish_us / 1'000'000) + " s");
}

std::vector<float> RandomFloats(uint64_t seed, int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = low + (high - low) * (static_cast<float>(SplitMix(seed) >> 40) * 0x1p-24f);
  return values;
}

std::vector<int32_t> RandomInts(uint64_t seed, int64_t count, int32_t low, int32_t high) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  const auto choices = static_cast<uint64_t>(int64_t{high} - low + 1);
  for (int32_t& value : values) value = static_cast<int32_t>(low + static_cast<int64_t>(SplitMix(seed) % choices));
  return values;
}

double MaxError(const std::vector<float>& a, const std::vector<float>& b) {
  return Largest(a, b, [](double x, double y) { return std::abs(x - y); });
}
double MaxRelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  return Largest(a, b, [](double x, double y) { return std::abs(x - y) / std::max(1.0, std::abs(y)); });
}

const char* Name(NumberType type) {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "e4m3"};
  return kNames[static_cast<size_t>(type)];
}

void CopyNow(void* target, const void* source, size_t bytes) {
  if (bytes == 0) return;
  gpu::Stream stream;
  stream.Copy(target, source, bytes);
  Finish(stream);
}

DeviceArray<uint8_t> UploadAs(NumberType type, const std::vector<float>& values) {
  return WithType(type, [&](auto zero) {
    const auto converted = FromFloats<decltype(zero)>(values);
    std::vector<uint8_t> bytes(converted.size() * sizeof zero);
    memcpy(bytes.data(), converted.data(), bytes.size());
    return DeviceArray<uint8_t>(bytes);
  });
}

std::vector<float> DownloadAs(NumberType type, const DeviceArray<uint8_t>& array) {
  const std::vector<uint8_t> bytes = array.Download();
  return WithType(type, [&](auto zero) {
    std::vector<decltype(zero)> values(bytes.size() / sizeof zero);
    memcpy(values.data(), bytes.data(), bytes.size());
    return ToFloats(values);
  });
}

std::vector<float> RoundedAs(NumberType type, const std::vector<float>& values) {
  return WithType(type, [&](auto zero) { return Rounded<decltype(zero)>(values); });
}

}  // namespace kvtier::cuda::check

int main(int count, char** arguments) {
  using namespace kvtier::cuda::check;
  std::vector<std::string> wanted(arguments + 1, arguments + count);
  if (!wanted.empty() && wanted[0] == "--list") {
    for (const auto& one : cases()) printf("%s\n", one.name);
    return 0;
  }
#if defined(KVTIER_EMULATED)
  if (!wanted.empty() && wanted[0] == "--mutate") {
    wanted.erase(wanted.begin());
    std::vector<std::string> names;
    for (const auto& one : cases()) {
      if (Selected(one, wanted)) names.push_back(one.name);
    }
    return Mutate(names, [](const std::string& name) { return Run({name}); });
  }
#endif
  return Run(wanted);
}
