// How a host waits for a device, whichever interface it has to it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

namespace kvtier::gpu {

// Polls `is_done` until it says so; false: not within `deadline_us`. Pauses grow with the time waited, so that a wait costs little
// of a core and ends within a hundredth of its length: each decode step waits here.
template <class IsDone>
bool PollUntil(const IsDone& is_done, int64_t deadline_us) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (!is_done()) {
    const int64_t waited_us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
    if (waited_us >= deadline_us) return false;
    const int64_t pause_us = std::clamp<int64_t>(waited_us / 128, 5, 500);
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(pause_us, deadline_us - waited_us)));
  }
  return true;
}

}  // namespace kvtier::gpu
