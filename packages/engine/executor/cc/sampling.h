// One token out of one row of logits. A draw depends on nothing but the logits, the settings and its seed.
#pragma once
#include <cstdint>

namespace kvtier {

struct Sampling {
  float temperature;  // 0: greedy, the lowest id among equals
  int32_t top_k;      // 0: off
  float top_p;        // 1: off
  uint64_t seed;
};

// Returns the token id, or -1 when the logits are not finite numbers (an activation overflowed, or the weights are damaged).
int32_t Sample(const float* logits, int64_t vocab, const Sampling& sampling);

}  // namespace kvtier
