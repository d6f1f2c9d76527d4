#include "paths.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "../gpu/gpu.h"
#include "../kernels/kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int64_t kPathDeadlineUs = 10'000'000;
constexpr int kPathRounds = 3;
constexpr int64_t kGapBytes = 4096;  // between pieces of the host: headers of slots, so that nothing is contiguous
constexpr int64_t kPieceBytes[] = {16 << 10, 64 << 10, 256 << 10, 1 << 20};
constexpr int kMultiprocessors[] = {8, 16};
constexpr size_t kTogether = 256;  // copies, as transfers enqueue them

struct PathTrial {
  explicit PathTrial(int64_t total_bytes)
      : total_bytes(total_bytes),
        device(static_cast<size_t>(total_bytes), "measuring the bus"),
        host(static_cast<size_t>(total_bytes + total_bytes / kPieceBytes[0] * kGapBytes), "measuring the bus"),
        offsets(static_cast<size_t>(2 * 8 * (total_bytes / kPieceBytes[0])), "measuring the bus"),
        staged(offsets.bytes(), "measuring the bus"),
        view(static_cast<uint8_t*>(gpu::DeviceView(host.data()))) {}

  const int64_t total_bytes;
  gpu::Buffer device;
  gpu::PinnedBuffer host;
  gpu::Buffer offsets;
  gpu::PinnedBuffer staged;
  uint8_t* const view;
  gpu::Stream stream;
  gpu::Event from{true}, to{true};
  std::vector<gpu::Stream::Piece> copies;

  // Bytes per second, the best of some rounds; multiprocessors 0: by the copy engine.
  double Rate(int64_t bytes, bool to_host, int multiprocessors) {
    const int64_t pieces = total_bytes / bytes;
    for (int64_t i = 0; i < pieces; ++i) {
      staged.data<int64_t>()[i] = (pieces - 1 - i) * bytes;  // backwards: no two are put together
      staged.data<int64_t>()[pieces + i] = i * (bytes + kGapBytes);
    }
    stream.Copy(offsets.data(), staged.data(), static_cast<size_t>(2 * 8 * pieces));
    const int64_t* pool_offsets = offsets.data<int64_t>();
    double best_us = std::numeric_limits<double>::infinity();
    for (int round = 0; round < kPathRounds; ++round) {
      from.Record(stream);
      if (multiprocessors == 0) {
        copies.clear();
        for (int64_t i = 0; i < pieces; ++i) {
          uint8_t* pool = device.data() + staged.data<int64_t>()[i];
          uint8_t* slot = host.data() + staged.data<int64_t>()[pieces + i];
          copies.push_back({to_host ? slot : pool, to_host ? pool : slot, static_cast<size_t>(bytes)});
          if (copies.size() < kTogether && i + 1 < pieces) continue;
          stream.CopyPieces(copies);
          copies.clear();
        }
      } else if (to_host) {
        GatherPieces(stream, view, device.data(), pool_offsets, pool_offsets + pieces, pieces, bytes, multiprocessors);
      } else {
        ScatterPieces(stream, device.data(), view, pool_offsets, pool_offsets + pieces, pieces, bytes, multiprocessors);
      }
      to.Record(stream);
      if (!to.Wait(kPathDeadlineUs)) {
        gpu::Abandon();
        throw std::runtime_error("GPU: a copy did not end while the bus was measured; reset the device");
      }
      best_us = std::min(best_us, gpu::Event::ElapsedUs(from, to));
    }
    return static_cast<double>(pieces * bytes) / std::max(best_us, 1.0) * 1e6;
  }

  double Both(int64_t bytes, int multiprocessors) {
    return std::min(Rate(bytes, true, multiprocessors), Rate(bytes, false, multiprocessors));
  }
};

}  // namespace

int64_t ChooseThreshold(std::span<const PathRate> rates) {
  int64_t threshold = std::numeric_limits<int64_t>::max();
  for (auto rate = rates.rbegin(); rate != rates.rend() && rate->engine_rate >= 0.95 * rate->kernel_rate; ++rate) {
    threshold = rate->piece_bytes;
  }
  return threshold;
}

PathChoice MeasurePaths(int64_t total_bytes, std::vector<PathRate>* rates) {
  PathTrial trial(total_bytes);
  // The fewest multiprocessors that come near to what most reach.
  double by_count[std::size(kMultiprocessors)];
  for (size_t i = 0; i < std::size(kMultiprocessors); ++i) by_count[i] = trial.Both(kPieceBytes[1], kMultiprocessors[i]);
  const double best = *std::max_element(std::begin(by_count), std::end(by_count));
  size_t chosen = 0;
  while (by_count[chosen] < 0.95 * best) ++chosen;

  std::vector<PathRate> measured;
  for (int64_t bytes : kPieceBytes) {
    measured.push_back({bytes, trial.Both(bytes, 0), trial.Both(bytes, kMultiprocessors[chosen])});
  }
  if (rates != nullptr) *rates = measured;
  return {ChooseThreshold(measured), kMultiprocessors[chosen]};
}

}  // namespace kvtier::cuda
