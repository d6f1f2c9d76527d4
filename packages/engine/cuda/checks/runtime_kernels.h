// Small kernels that runtime_check launches.
#pragma once
#include "../gpu/gpu.h"

namespace kvtier::cuda::check {

void LaunchAdd(gpu::Stream&, int32_t* values, int32_t count, int32_t added);  // values[i] += added
void LaunchTriple(gpu::Stream&, int32_t* values, int32_t count);              // values[i] *= 3
void LaunchReverse(gpu::Stream&, int32_t* values, int32_t count);             // one block, 4 count bytes of shared memory
// target[i] = 10 source[(i + 1) % count] + i % 10, as a dependent launch. `late`: it reads before it has waited.
void LaunchRotate(gpu::Stream&, uint32_t* target, const uint32_t* source, int32_t count, bool late);

}  // namespace kvtier::cuda::check
