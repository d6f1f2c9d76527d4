// Checks of the GPU side as one executable without Node: on the CPU by the emulator in every test run, on a GPU by
// `npm run test:gpu`. A check makes inputs from a seed, runs kernels through gpu.h, computes the same naively on the CPU and
// hands the largest difference to Expect. Each Expect prints one JSON line.
//
//   KVTIER_CHECK(rms_norm) {
//     gpu::Stream stream;
//     DeviceArray<float> x(RandomFloats(1, rows * columns, -2, 2));
//     ...
//     Finish(stream);
//     Expect("RmsNorm", "f32 7x4096", MaxError(x.Download(), reference), 1e-5);
//   }
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "../gpu/gpu.h"
#include "../gpu/numeric.h"

namespace kvtier::cuda::check {

inline constexpr NumberType kF32 = NumberType::kF32, kF16 = NumberType::kF16, kBf16 = NumberType::kBf16, kE4m3 = NumberType::kE4m3;

// Fails when `max_error` is above `allowed` or not a number. `kernel`: the function of kernels.h; `name`: type and shape.
void Expect(const std::string& kernel, const std::string& name, double max_error, double allowed);
// The same for what is either so or not.
inline void ExpectTrue(const std::string& kernel, const std::string& name, bool holds) { Expect(kernel, name, holds ? 0 : 1, 0); }

// The name of a file or folder to make, for mkstemp and mkdtemp: below TMPDIR, and so gone with it.
std::string TemporaryName(const std::string& kind);

// From now on the first comparison that fails ends the process, with exit code 1.
void EndAtFailure();

// Waits for all of the stream; throws when that takes longer than a minute.
void Finish(gpu::Stream& stream);

// Deterministic, the same on every machine: SplitMix64 of the seed.
std::vector<float> RandomFloats(uint64_t seed, int64_t count, float low, float high);
std::vector<int32_t> RandomInts(uint64_t seed, int64_t count, int32_t low, int32_t high);  // [low, high]
// The largest |a - b|; NaN when the lengths differ or a number is NaN on one side only.
double MaxError(const std::vector<float>& a, const std::vector<float>& b);
// The largest |a - b| / max(1, |b|).
double MaxRelativeError(const std::vector<float>& a, const std::vector<float>& b);

// Floats <-> a storage type. Rounding floats through T makes inputs that the kernel sees exactly.
template <class T>
std::vector<T> FromFloats(const std::vector<float>& values) {
  std::vector<T> converted(values.size());
  for (size_t i = 0; i < values.size(); ++i) converted[i] = FromFloat<T>(values[i]);
  return converted;
}
template <class T>
std::vector<float> ToFloats(const std::vector<T>& values) {
  std::vector<float> converted(values.size());
  for (size_t i = 0; i < values.size(); ++i) converted[i] = ToFloat(values[i]);
  return converted;
}
template <class T>
std::vector<float> Rounded(const std::vector<float>& values) {
  return ToFloats(FromFloats<T>(values));
}
// What one rounding to T may change, relative to the value: half a unit in the last place.
constexpr double Epsilon(NumberType type) {
  return type == NumberType::kF32 ? 0x1p-24 : type == NumberType::kF16 ? 0x1p-11 : type == NumberType::kBf16 ? 0x1p-8 : 0x1p-4;
}
const char* Name(NumberType type);

// An array in device memory, filled from or read back to the host by waiting copies.
void CopyNow(void* target, const void* source, size_t bytes);
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count), buffer_(count * sizeof(T), "a check's array") {}
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Upload(values); }
  void Upload(const std::vector<T>& values) { CopyNow(data(), values.data(), values.size() * sizeof(T)); }
  std::vector<T> Download() const {
    std::vector<T> values(count_);
    CopyNow(values.data(), data(), count_ * sizeof(T));
    return values;
  }
  T* data() const { return buffer_.template data<T>(); }
  size_t count() const { return count_; }

 private:
  size_t count_ = 0;
  gpu::Buffer buffer_;
};

// A float vector as device memory of the given type, and back.
DeviceArray<uint8_t> UploadAs(NumberType type, const std::vector<float>& values);
std::vector<float> DownloadAs(NumberType type, const DeviceArray<uint8_t>& array);
std::vector<float> RoundedAs(NumberType type, const std::vector<float>& values);

struct Registration {
  Registration(const char* name, void (*run)());
};
#define KVTIER_CHECK(name)                                                          \
  static void Check_##name();                                                       \
  static const ::kvtier::cuda::check::Registration registration_##name(#name, Check_##name); \
  static void Check_##name()

// True as soon as the condition holds; false after a minute.
template <class Condition>
bool Eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace kvtier::cuda::check
