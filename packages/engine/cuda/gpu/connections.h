// How many of a device's hardware queues a process gets. By default eight: with more streams than that some share one, and what
// waits in one stream (for an event, for a host function) holds up the kernels of another that come after it.
#pragma once
#include <cstdlib>

namespace kvtier::gpu {

constexpr int kMostConnections = 32, kDefaultConnections = 8;
constexpr const char* kConnectionsVariable = "CUDA_DEVICE_MAX_CONNECTIONS";

// Before the first call of the runtime, which reads it once; a number that is set already stays.
inline void AskForConnections() {
  static const bool asked = setenv(kConnectionsVariable, "32", 0) == 0;
  (void)asked;
}

}  // namespace kvtier::gpu
