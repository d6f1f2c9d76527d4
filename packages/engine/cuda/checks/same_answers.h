// Whether two computations of the same prompt agree. Where keys and values, kernels and their order are the same, so must every bit be.
// Where only the math is the same (a prompt in one piece, and its tail over a cached prefix), each number is rounded elsewhere: logits
// differ by rounding, and of two that are as close as that either may be the larger one. That is a tie, and no error.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "../gpu/numeric.h"

namespace kvtier::cuda {

struct Agreement {
  enum class Kind {
    kEqual,  // the same greedy token
    kTie,    // another one, from two that rounding cannot tell apart
    kWrong,  // logits that rounding does not explain, or a token that it does not
  };
  Kind kind;
  double distance;  // |got - expected| / |expected|
  double gap;       // between the two tokens' logits, in units of the noise (the rms of got - expected); 0 where the token is the same
};

// What roundings to `type` add up to, some eight in each layer, each independent of the others.
inline double RoundingTolerance(NumberType type, int64_t layers) {
  const double half_unit = type == NumberType::kF32 ? 0x1p-24 : type == NumberType::kF16 ? 0x1p-11 : 0x1p-8;
  return half_unit * std::sqrt(8.0 * static_cast<double>(layers));
}

// Two logits differ by the noise of both: the gap of a tie is below this many times that of one, once in a hundred million.
constexpr double kTieGap = 8;

inline Agreement CompareAnswers(std::span<const float> expected, std::span<const float> got, double tolerance) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < expected.size() && i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - expected[i];
    difference += d * d;
    size += static_cast<double>(expected[i]) * expected[i];
  }
  Agreement answer{Agreement::Kind::kWrong, std::sqrt(difference / size), 0};
  if (expected.empty() || expected.size() != got.size()) return answer;
  const auto best = std::max_element(expected.begin(), expected.end()) - expected.begin();
  const auto other = std::max_element(got.begin(), got.end()) - got.begin();
  const double noise = std::sqrt(difference / static_cast<double>(expected.size()));
  if (best != other) answer.gap = (static_cast<double>(expected[static_cast<size_t>(best)]) - expected[static_cast<size_t>(other)]) / noise;
  if (!(answer.distance <= tolerance)) return answer;  // NaN, too
  answer.kind = best == other ? Agreement::Kind::kEqual : answer.gap <= kTieGap ? Agreement::Kind::kTie : Agreement::Kind::kWrong;
  return answer;
}

}  // namespace kvtier::cuda
