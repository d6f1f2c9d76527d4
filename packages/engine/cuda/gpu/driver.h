// What gpu_driver.cc has besides gpu.h: a library that lives in another program's process, beside its CUDA.
#pragma once
#include <cstdint>
#include <string>

#include "gpu.h"

namespace kvtier::gpu {

// Opens the driver: libcuda.so.1, or what KVTIER_CUDA_DRIVER names. Throws where there is none, in one line.
void OpenDriver();

// Makes the device current on a thread that is not ours, as long as this lives, and leaves what was current before. Meanwhile nothing that the
// thread calls ends a graph's capture; on threads of ours, which call Use, nothing does ever.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int capture_mode_;  // that the thread had
};

// The event fires when all that was put into somebody else's stream (a CUstream) before has ended.
void RecordOn(Event& event, void* stream);

}  // namespace kvtier::gpu
