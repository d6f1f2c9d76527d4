// What to do where the system refuses to pin host memory. The driver pins: RLIMIT_MEMLOCK has no say in it.
#pragma once

namespace kvtier::gpu {

constexpr int kPinningNotSupported = 801;

// By CUDA's number of the refusal, which is the same in the runtime's API and in the driver's.
inline const char* PinRemedy(int status) {
  switch (status) {
    case 1:
      return "keep it on a tmpfs or on hugetlbfs: files of other file systems cannot be pinned";
    case 2:
      return "raise the container's memory limit (cgroup), or make the arena smaller";
    case 712:
      return "unregister it first";
    case kPinningNotSupported:
      return "this GPU or driver does not do it, as under confidential computing: copies go through buffers";
    default:
      return "nvidia-smi shows the GPU's state";
  }
}

}  // namespace kvtier::gpu
