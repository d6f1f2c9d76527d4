// Which way each matrix product goes, once it was measured: kept in a file for this GPU, this cuBLASLt and these kernels, so that
// every process chooses alike, and only the first one measures.
//
// Invariant: what another process has written meanwhile wins over what this one found.
#pragma once
#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../gpu/numeric.h"
#include "kept_file.h"

namespace kvtier::cuda {

constexpr int kOurs = -1;

// A product of so many rows: 1, 2, 4, then multiples of 8, as decode steps are padded to.
struct ProductShape {
  NumberType type;
  int64_t rows, outputs, inputs;
  bool target_f32;
  auto operator<=>(const ProductShape&) const = default;
};

class Choices {
 public:
  // `folder`: is made where it is missing; empty: nothing is kept. `of`: names GPU, library and kernels.
  Choices(const std::string& folder, const std::string& of);

  // kOurs, or the number of the library's algorithm; null: not measured yet.
  const int* Find(const ProductShape& shape) const;
  // What counts from now on: `choice`, or what another process has kept before.
  int Keep(const ProductShape& shape, int choice);

 private:
  void Read();
  std::vector<std::string> Lines() const;

  KeptFile file_;
  std::map<ProductShape, int> choices_;
};

}  // namespace kvtier::cuda
