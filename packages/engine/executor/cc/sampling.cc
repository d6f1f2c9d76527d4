#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace kvtier {
namespace {

// SplitMix64 of the seed: a counter-based generator, one draw per seed. 53 random bits.
uint64_t Random53(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) >> 11;
}

// A weight in (0, 1] as a whole number: sums are exact in any order, so that every backend draws the same token.
uint64_t Mass(float weight) { return static_cast<uint64_t>(std::llrint(weight * 0x1p44f)); }

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
  const bool filtered = candidates.size() < static_cast<size_t>(vocab) || sampling.top_p < 1;
  uint64_t total = 0;
  for (const auto& candidate : candidates) total += Mass(candidate.weight);
  if (sampling.top_p < 1) {
    const auto limit = static_cast<uint64_t>(std::ceil(static_cast<double>(total) * static_cast<double>(sampling.top_p)));
    // Tokens below this mass sum to less than 1 - p together, so the nucleus lies among the others: sort only those.
    const double floor = 0.999 * static_cast<double>(total - limit) / static_cast<double>(candidates.size());
    std::erase_if(candidates, [&](const Candidate& c) { return static_cast<double>(Mass(c.weight)) < floor; });
    std::sort(candidates.begin(), candidates.end(), heavier);
    size_t count = 0;
    total = 0;
    while (count < candidates.size() && total < limit) total += Mass(candidates[count++].weight);
    candidates.resize(count);
  }
  // The draw walks the ids in order.
  if (filtered) std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  const auto target = static_cast<uint64_t>((static_cast<unsigned __int128>(Random53(sampling.seed)) * total) >> 53);
  uint64_t sum = 0;
  for (const auto& candidate : candidates) {
    sum += Mass(candidate.weight);
    if (target < sum) return candidate.id;
  }
  return static_cast<int32_t>(best);  // not reached: target < total
}

}  // namespace kvtier
