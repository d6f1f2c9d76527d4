// The two ways of a piece over the bus, and which is faster for its size on this device: measured at start, not assumed.
//
//   copy engine   no multiprocessor is taken, full speed for large pieces; a microsecond or two for each
//   kernel        any number of small pieces at full speed; takes a few multiprocessors, and what it writes over the bus fills the memory's
//                 queues: for whole blocks only while no step of the model runs (TransferOptions::alone)
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::cuda {

struct PathRate {
  int64_t piece_bytes;
  double engine_rate, kernel_rate;  // bytes per second, the slower direction of the two
};

struct PathChoice {
  // Pieces of at least this many bytes go by the copy engine.
  int64_t threshold_bytes = 256 << 10;
  // What the kernel takes.
  int multiprocessors = 8;
};

// The smallest size from which on the copy engine is as fast, to 5 %: a tie is its, as it leaves the multiprocessors alone.
// `rates` by ascending size. INT64_MAX when it never is.
int64_t ChooseThreshold(std::span<const PathRate> rates);

// Measures both paths between buffers of its own; `total_bytes` per measurement, some tens of measurements.
// Leaves the rates in `rates` when it is given.
PathChoice MeasurePaths(int64_t total_bytes, std::vector<PathRate>* rates = nullptr);

}  // namespace kvtier::cuda
