#pragma once
#include "sha256.h"

namespace kvtier {

// Only where HasShaInstructions().
void Sha256CompressNi(Sha256State& state, const uint8_t* pieces, size_t count);

}  // namespace kvtier
