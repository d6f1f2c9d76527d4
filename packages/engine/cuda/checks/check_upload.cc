// A step's arrays on their way to the GPU.
#include <numeric>
#include <vector>

#include "../kernels/kernels.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

struct Case {
  int64_t rows, words, stride_words;
};

// Naively: each word where it belongs, and nothing beside it touched.
bool Right(const std::vector<Case>& cases) {
  gpu::Stream stream;
  std::vector<gpu::PinnedBuffer> sources;
  std::vector<DeviceArray<int32_t>> targets;
  std::vector<HostArray> arrays;
  std::vector<std::vector<int32_t>> expected;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto [rows, words, stride_words] = cases[i];
    const std::vector<int32_t> content = RandomInts(i + 1, rows * words, INT32_MIN, INT32_MAX);
    sources.emplace_back(content.size() * 4, "a check's array");
    std::copy(content.begin(), content.end(), sources.back().data<int32_t>());
    expected.emplace_back(static_cast<size_t>(rows * stride_words), -7);
    targets.emplace_back(expected.back());
    for (int64_t row = 0; row < rows; ++row) std::copy_n(content.begin() + row * words, words, expected.back().begin() + row * stride_words);
    arrays.push_back({targets.back().data(), gpu::DeviceView(sources.back().data()), stride_words * 4, words * 4, rows});
  }
  Upload(stream, arrays);
  Finish(stream);
  bool right = true;
  for (size_t i = 0; i < cases.size(); ++i) right = right && targets[i].Download() == expected[i];
  return right;
}

KVTIER_CHECK(upload) {
  ExpectTrue("Upload", "a word", Right({{1, 1, 1}}));
  ExpectTrue("Upload", "nothing", Right({}));
  ExpectTrue("Upload", "rows at a distance", Right({{7, 5, 9}}));
  ExpectTrue("Upload", "more words than are in flight", Right({{1, 70'001, 70'001}, {33, 2'049, 3'000}}));
  ExpectTrue("Upload", "more arrays than a launch takes", Right(std::vector<Case>(19, Case{3, 11, 12})));
  std::string refused;
  try {
    gpu::Stream stream;
    const HostArray odd{nullptr, nullptr, 8, 6, 1};
    Upload(stream, {&odd, 1});
  } catch (const std::exception& error) {
    refused = error.what();
  }
  ExpectTrue("Upload", "half a word", refused == "upload: rows of whole words, and less than 8 GiB of them, are needed");
}

}  // namespace
}  // namespace kvtier::cuda::check
