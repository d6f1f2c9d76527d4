// Our matrix products, and which of them a shape takes (GemmOurs in kernels.h). cuBLASLt, where it is there, does better on
// large tiles of Hopper; these need nothing but the driver.
//
//   version 1   gemm_plain.cuh   any type, any size
//   version 2   gemm_few.cuh     up to 64 rows: memory is the limit
//               gemm_tiles.cuh   more rows: tensor cores are
//   version 3   gemm_shared.cuh  9 to 64 rows, where there are outputs enough for every multiprocessor; else version 2, of the same bits
#include <stdexcept>

#include "gemm_few.cuh"
#include "gemm_plain.cuh"
#include "gemm_shared.cuh"
#include "gemm_tiles.cuh"

namespace kvtier::cuda {
namespace {

int64_t Pieces(int64_t count, int64_t piece) { return (count + piece - 1) / piece; }

unsigned Size(int64_t count) { return static_cast<unsigned>(count); }

template <class T>
void Plain(Stream& stream, const GemmArgs& a) {
  gpu::Launch(stream, "gemm plain", GemmPlain<T>, {Size(Pieces(a.outputs, kPlainTile)), Size(Pieces(a.rows, kPlainTile))},
              {kPlainThreads}, 0, a);
}

template <class T, int RowTiles, int OutputTiles>
void Few(Stream& stream, const GemmArgs& a) {
  constexpr size_t kSharedBytes = static_cast<size_t>(kFewWarps) * RowTiles * OutputTiles * 128 * sizeof(float);
  static_assert(kSharedBytes <= kLeastSharedBytes);
  gpu::LaunchDependent(stream, "gemm few", GemmFew<T, RowTiles, OutputTiles>,
              {Size(Pieces(a.outputs, 16 * OutputTiles)), Size(Pieces(a.rows, 8 * RowTiles))}, {kFewWarps * 32}, kSharedBytes, a);
}

template <class T, int RowTiles>
void Shared(Stream& stream, const GemmArgs& a) {
  static_assert(RowTiles == 8 || SharedRowsBytes<RowTiles>() <= kLeastSharedBytes);
  gpu::LaunchDependent(stream, "gemm shared", GemmShared<T, RowTiles>, {Size(Pieces(a.outputs, kSharedOutputs))}, {kSharedThreads},
                       SharedRowsBytes<RowTiles>(), a);
}

template <class T, int Rows, int Outputs, int WarpRows, int WarpOutputs>
void Tiles(Stream& stream, const GemmArgs& a) {
  static_assert(TileSharedBytes<Rows, Outputs>() <= kLeastSharedBytes);
  const int64_t row_tiles = Pieces(a.rows, Rows), output_tiles = Pieces(a.outputs, Outputs);
  gpu::Launch(stream, "gemm tiles", GemmTiles<T, Rows, Outputs, WarpRows, WarpOutputs>, {Size(row_tiles * output_tiles)},
              {Rows / WarpRows * (Outputs / WarpOutputs) * 32}, TileSharedBytes<Rows, Outputs>(), a, row_tiles, output_tiles);
}

template <class T>
void Tensor(Stream& stream, const GemmArgs& a, bool share) {
  static const int64_t multiprocessors = gpu::Info().multiprocessors;
  static const size_t shared_bytes = gpu::Info().shared_bytes_per_block;
  if (a.rows <= 8) return Few<T, 1, 1>(stream, a);
  const bool small = a.outputs * (a.inputs / 8) <= UINT32_MAX;
  // 64 rows are more than the smaller GPUs (compute capability 8.6, 8.9, 12) grant to a block: there the same bits come from few rows each.
  const int64_t most = SharedRowsBytes<8>() <= shared_bytes ? 64 : 32;
  if (share && small && a.rows <= most && Pieces(a.outputs, kSharedOutputs) >= multiprocessors) {
    return a.rows <= 16 ? Shared<T, 2>(stream, a) : a.rows <= 32 ? Shared<T, 4>(stream, a) : Shared<T, 8>(stream, a);
  }
  if (a.rows <= 16) return Few<T, 2, 1>(stream, a);
  if (a.rows <= 32) return Few<T, 4, 2>(stream, a);
  if (a.rows <= 64) return Few<T, 8, 2>(stream, a);
  // The largest tile that still gives every multiprocessor something to do.
  const auto tiles = [&](int64_t rows, int64_t outputs) { return Pieces(a.rows, rows) * Pieces(a.outputs, outputs); };
  if (tiles(128, 256) >= 2 * multiprocessors) return Tiles<T, 128, 256, 64, 64>(stream, a);
  if (tiles(128, 128) >= multiprocessors) return Tiles<T, 128, 128, 64, 32>(stream, a);
  Tiles<T, 64, 64, 32, 32>(stream, a);
}

// Whole 16-byte chunks at 16-byte addresses: what version 2 loads.
bool Aligned(const GemmArgs& a) {
  const auto bits = reinterpret_cast<uintptr_t>(a.source) | reinterpret_cast<uintptr_t>(a.weight);
  return a.inputs % 8 == 0 && a.source_stride % 8 == 0 && bits % 16 == 0 && reinterpret_cast<uintptr_t>(a.target) % 4 == 0;
}

}  // namespace

void GemmOurs(Stream& stream, NumberType type, const GemmArgs& a, int version) {
  if (a.rows == 0 || a.outputs == 0) return;
  const bool tensor = version != 1 && type != NumberType::kF32 && Aligned(a);
  switch (type) {
    case NumberType::kF32:
      return Plain<float>(stream, a);
    case NumberType::kF16:
      return tensor ? Tensor<f16>(stream, a, version != 2) : Plain<f16>(stream, a);
    case NumberType::kBf16:
      return tensor ? Tensor<bf16>(stream, a, version != 2) : Plain<bf16>(stream, a);
    case NumberType::kE4m3:
      break;
  }
  throw std::invalid_argument("gemm: weights and activations are f32, f16 or bf16");
}

}  // namespace kvtier::cuda
