// sampling.cu against the CPU backend's own sampling.cc: the same token for the same logits, settings and seed, always.
#include "../../executor/cc/sampling.h"

#include <cmath>
#include <limits>

#include "../../executor/cc/kernels.h"
#include "../kernels/kernels.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

// All settings over the same logits, one row each; the number of rows whose token differs.
int Differences(const std::vector<float>& logits, float soft_cap, const std::vector<Sampling>& settings) {
  const auto rows = settings.size(), vocab = logits.size();
  std::vector<float> all, temperature, top_p;
  std::vector<int32_t> top_k;
  std::vector<uint64_t> seed;
  for (const Sampling& one : settings) {
    all.insert(all.end(), logits.begin(), logits.end());
    temperature.push_back(one.temperature);
    top_k.push_back(one.top_k);
    top_p.push_back(one.top_p);
    seed.push_back(one.seed);
  }
  const DeviceArray<float> device_logits(all), device_temperature(temperature), device_top_p(top_p);
  const DeviceArray<int32_t> device_top_k(top_k), tokens(std::vector<int32_t>(rows, -7));
  const DeviceArray<uint64_t> device_seed(seed);
  const DeviceArray<uint8_t> workspace(static_cast<size_t>(SamplingWorkspaceBytes(static_cast<int64_t>(rows), static_cast<int64_t>(vocab))));
  gpu::Stream stream;
  Sample(stream, device_logits.data(), static_cast<int64_t>(rows), static_cast<int64_t>(vocab), soft_cap,
         {device_temperature.data(), device_top_k.data(), device_top_p.data(), device_seed.data()}, tokens.data(), workspace.data());
  Finish(stream);
  std::vector<float> capped = logits;
  if (soft_cap > 0) SoftCap(capped.data(), soft_cap, static_cast<int64_t>(vocab));
  const auto got = tokens.Download();
  int differences = 0;
  for (size_t i = 0; i < rows; ++i) {
    const int32_t expected = kvtier::Sample(capped.data(), static_cast<int64_t>(vocab), settings[i]);
    if (got[i] == expected) continue;
    ++differences;
    fprintf(stderr, "temperature %g, top-k %d, top-p %g, seed %llu: %d, the CPU draws %d\n", static_cast<double>(temperature[i]), top_k[i],
            static_cast<double>(top_p[i]), static_cast<unsigned long long>(seed[i]), got[i], expected);
  }
  return differences;
}

std::vector<Sampling> Settings(int32_t vocab) {
  std::vector<Sampling> all{{0, 0, 1, 1}, {1, 1, 1, 2}};
  uint64_t seed = 3;
  for (const float temperature : {0.5f, 4.0f}) {
    for (const int32_t top_k : {0, 2, 40, vocab - 1, 2 * vocab}) {
      for (const float top_p : {1.0f, 0.9f, 1e-6f}) all.push_back({temperature, top_k, top_p, seed++ * 0x9e3779b9ull});
    }
  }
  return all;
}

void Compare(const std::string& name, const std::vector<float>& logits, float soft_cap = 0) {
  Expect("Sample", name, Differences(logits, soft_cap, Settings(static_cast<int32_t>(logits.size()))), 0);
}

// Logits as a model has them: many small, few large.
std::vector<float> Peaked(uint64_t seed, int64_t vocab) {
  auto logits = RandomFloats(seed, vocab, 0.001f, 1);
  for (float& value : logits) value = -3 * std::log(value);
  return logits;
}

KVTIER_CHECK(sampling_settings) {
  Compare("3 tokens", {0.5f, -1, 0.25f});
  Compare("1000 tokens", Peaked(1, 1000));
  Compare("4097 tokens", Peaked(2, 4097));  // a tile and one more
  Compare("12011 tokens", RandomFloats(3, 12011, -4, 4));
  Compare("6011 tokens, soft cap", RandomFloats(4, 6011, -60, 60), 30);
  // Ties: whole numbers only, then all equal, then zeros of either sign.
  auto ties = RandomFloats(5, 9000, -3, 3);
  for (float& value : ties) value = std::round(value);
  Compare("9000 tokens, ties", ties);
  Compare("5000 tokens, all equal", std::vector<float>(5000, 1.5f));
  std::vector<float> zeros(100, 0.0f);
  zeros[0] = -0.0f;
  Compare("zeros of either sign", zeros);
  // One token has everything.
  std::vector<float> certain(6000, -1000.0f);
  certain[4999] = 100;
  Compare("6000 tokens, one certain", certain);
}

KVTIER_CHECK(sampling_8b) {
  const auto logits = Peaked(6, 128256);
  Expect("Sample", "128256 tokens", Differences(logits, 0, {{0, 0, 1, 1}, {0.8f, 0, 1, 2}, {0.8f, 50, 0.9f, 3}, {1.5f, 0, 0.99f, 4}}), 0);
}

// Nothing but the seed differs.
KVTIER_CHECK(sampling_draws) {
  const std::vector<float> logits{std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  std::vector<Sampling> settings;
  for (uint64_t seed = 0; seed < 40; ++seed) settings.push_back({1, 0, 1, seed});
  Expect("Sample", "40 seeds", Differences(logits, 0, settings), 0);
}

KVTIER_CHECK(sampling_damaged) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    auto logits = RandomFloats(7, 5000, -1, 1);
    logits[4200] = bad;
    Expect("Sample", "not finite: " + std::to_string(bad), Differences(logits, 0, {{0, 0, 1, 1}, {1, 0, 1, 2}, {1, 5, 0.5f, 3}}), 0);
  }
}

}  // namespace
}  // namespace kvtier::cuda::check
