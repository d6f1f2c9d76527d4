#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace kvtier {
namespace {

// SplitMix64 of the seed: a counter-based generator, one draw per seed. In [0, 1).
double Uniform(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

struct Candidate {
  float weight;
  int32_t id;
};

}  // namespace

int32_t Sample(const float* logits, int64_t vocab, const Sampling& sampling) {
  int64_t best = 0;
  bool finite = true;
  for (int64_t i = 0; i < vocab; ++i) {
    finite = finite && std::isfinite(logits[i]);
    if (logits[i] > logits[best]) best = i;
  }
  if (!finite) return -1;
  if (!(sampling.temperature > 0) || sampling.top_k == 1) return static_cast<int32_t>(best);

  std::vector<Candidate> candidates(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; ++i) {
    candidates[static_cast<size_t>(i)] = {Exp((logits[i] - logits[best]) / sampling.temperature), static_cast<int32_t>(i)};
  }
  const auto heavier = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
  };
  // Order: top-k, then top-p over what is left, as vLLM and transformers do.
  if (sampling.top_k > 0 && sampling.top_k < vocab) {
    std::nth_element(candidates.begin(), candidates.begin() + sampling.top_k - 1, candidates.end(), heavier);
    candidates.resize(static_cast<size_t>(sampling.top_k));
  }
  double total = 0;
  for (const auto& candidate : candidates) total += candidate.weight;
  if (sampling.top_p < 1) {
    // Tokens below this weight sum to less than 1 - p together, so the nucleus lies among the others: sort only those.
    const double floor = total * (1 - static_cast<double>(sampling.top_p)) / static_cast<double>(candidates.size());
    std::erase_if(candidates, [&](const Candidate& c) { return c.weight < floor; });
    std::sort(candidates.begin(), candidates.end(), heavier);
    double kept = 0;
    size_t count = 0;
    while (count < candidates.size() && (count == 0 || kept < total * sampling.top_p)) kept += candidates[count++].weight;
    candidates.resize(count);
    total = kept;
  }
  const double target = Uniform(sampling.seed) * total;
  double sum = 0;
  for (const auto& candidate : candidates) {
    sum += candidate.weight;
    if (target < sum) return candidate.id;
  }
  return candidates.back().id;
}

}  // namespace kvtier
