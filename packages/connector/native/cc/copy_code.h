// The copying code for the CPU that this runs on: block_copy.cc, compiled for each width of registers.
#pragma once
#include "block_copy.h"

namespace kvtier {

using CopyCode = uint64_t (*)(const CopyPiece* pieces, size_t count);

struct ChosenCode {
  CopyCode copy;
  const char* name;
};

const ChosenCode& ChooseCopyCode();

}  // namespace kvtier
