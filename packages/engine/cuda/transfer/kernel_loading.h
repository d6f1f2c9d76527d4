// CUDA loads a kernel by its first launch, which waits, with whoever launches it, for all that the device has to do: for a model's steps, and
// for ever where these wait for the caller. So the kernels of transfers are launched once before there is anything else.
#pragma once

namespace kvtier::cuda {

// On the current device. Throws std::runtime_error when it does not answer.
void LoadTransferKernels();

}  // namespace kvtier::cuda
