#include "kernel_loading.h"

#include <stdexcept>

#include "../gpu/gpu.h"
#include "../kernels/kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int64_t kDeadlineUs = 10'000'000;
constexpr int64_t kBytes = 256;  // the least that is hashed

}  // namespace

void LoadTransferKernels() {
  const char* const what = "loading the kernels of copies";
  const gpu::Buffer pool(kBytes, what), places(sizeof(int64_t), what), rows(static_cast<size_t>(HashRowsBytes(1, kBytes)), what);
  const gpu::PinnedBuffer host(kBytes, what), sums(sizeof(uint64_t), what);
  auto* const view = static_cast<uint8_t*>(gpu::DeviceView(host.data()));
  auto* const sum = static_cast<uint64_t*>(gpu::DeviceView(sums.data()));
  auto* const place = places.data<int64_t>();
  host.data<uint64_t>()[0] = 0;
  gpu::Stream stream;
  const gpu::WaitAtEnd ending(stream, kDeadlineUs);
  stream.Copy(place, host.data(), sizeof(int64_t));
  GatherPieces(stream, view, pool.data(), place, place, 1, kBytes, 1);
  ScatterPieces(stream, pool.data(), view, place, place, 1, kBytes, 1);
  HashBlocks(stream, sum, pool.data(), place, 1, kBytes, 1);
  HashBlocksApart(stream, sum, pool.data(), place, 1, kBytes, rows.data<uint64_t>(), 1);
  ExportBlocks(stream, sum, view, pool.data(), place, place, 1, kBytes, 1);
  ImportBlocks(stream, sum, pool.data(), view, place, place, 1, kBytes, 1);
  if (!stream.Synchronize(kDeadlineUs)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: the kernels of copies did not end while they were loaded; reset the device");
  }
}

}  // namespace kvtier::cuda
