// Three small kernels that runtime_check launches.
#pragma once
#include "../gpu/gpu.h"

namespace kvtier::cuda::check {

void LaunchAdd(gpu::Stream&, int32_t* values, int32_t count, int32_t added);  // values[i] += added
void LaunchTriple(gpu::Stream&, int32_t* values, int32_t count);              // values[i] *= 3
void LaunchReverse(gpu::Stream&, int32_t* values, int32_t count);             // one block, 4 count bytes of shared memory

}  // namespace kvtier::cuda::check
