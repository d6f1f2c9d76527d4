// Pieces of KV blocks between GPU memory and mapped host memory, by a kernel. The copy engine takes a microsecond or more per
// piece, whatever its size; a warp takes a piece of 4 KiB at a time and many are in flight, so small pieces reach the bus's
// speed. It costs multiprocessors: the caller says how many, a few are enough (a PCIe 5 bus is filled by about 130 KiB in
// flight, one multiprocessor holds 64 KiB).
//
//   tile t of all pieces ──▶ warp t mod warps      piece t / tiles, bytes [4096 (t % tiles), ...) of it
//   lane l               ──▶ 8 vectors of 16 bytes at 16 l + 512 i: each of the 8 is one coalesced 512-byte access
#include "../gpu/device.h"
#include "kernels.h"
#include "transfer_kernels.h"

namespace kvtier::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kTileVectors = 8;  // per lane
constexpr int64_t kTileBytes = kTileVectors * 32 * 16;

#if !defined(KVTIER_DRIVER)
// kToHost: written once, over the bus, and not read here again: stores pass the caches. Into the pool they stay in L2, where
// the hash that follows finds them.
template <bool kToHost>
__device__ __forceinline__ void CopyPieces(uint8_t* target, const uint8_t* source, const int64_t* target_offsets,
                                           const int64_t* source_offsets, int64_t pieces, int64_t bytes) {
  const unsigned lane = threadIdx.x % 32;
  const int64_t tiles = (bytes + kTileBytes - 1) / kTileBytes;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; tile < pieces * tiles; tile += warps) {
    const int64_t piece = tile / tiles;
    const int64_t first = tile % tiles * kTileBytes + lane * 16;
    const uint8_t* from = source + source_offsets[piece];
    uint8_t* to = target + target_offsets[piece];
    uint4 vectors[kTileVectors];
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      if (first + i * 512 < bytes) vectors[i] = gpu::LoadStreaming(reinterpret_cast<const uint4*>(from + first + i * 512));
    }
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      if (first + i * 512 >= bytes) continue;
      auto* place = reinterpret_cast<uint4*>(to + first + i * 512);
      if constexpr (kToHost) {
        gpu::StoreStreaming(place, vectors[i]);
      } else {
        *place = vectors[i];
      }
    }
  }
}
#endif

unsigned Grid(int64_t pieces, int64_t bytes, int multiprocessors) {
  const int64_t tiles = pieces * ((bytes + kTileBytes - 1) / kTileBytes);
  const int64_t wanted = (tiles + kWarps - 1) / kWarps;
  return static_cast<unsigned>(wanted < multiprocessors ? wanted : multiprocessors);
}

}  // namespace

#if !defined(KVTIER_DRIVER)
extern "C" {

__global__ void __launch_bounds__(32 * kWarps) kvtier_gather_pieces(uint8_t* target, const uint8_t* source, const int64_t* target_offsets,
                                                                    const int64_t* source_offsets, int64_t pieces, int64_t bytes) {
  CopyPieces<true>(target, source, target_offsets, source_offsets, pieces, bytes);
}

__global__ void __launch_bounds__(32 * kWarps) kvtier_scatter_pieces(uint8_t* target, const uint8_t* source, const int64_t* target_offsets,
                                                                     const int64_t* source_offsets, int64_t pieces, int64_t bytes) {
  CopyPieces<false>(target, source, target_offsets, source_offsets, pieces, bytes);
}

}  // extern "C"
#endif

void GatherPieces(Stream& stream, uint8_t* host, const uint8_t* pool, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t pieces, int64_t bytes, int multiprocessors) {
  if (pieces == 0) return;
  gpu::Launch(stream, "gather_pieces", kvtier_gather_pieces, {Grid(pieces, bytes, multiprocessors)}, {32 * kWarps}, 0, host, pool,
              host_offsets, pool_offsets, pieces, bytes);
}

void ScatterPieces(Stream& stream, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets, const int64_t* host_offsets,
                   int64_t pieces, int64_t bytes, int multiprocessors) {
  if (pieces == 0) return;
  gpu::Launch(stream, "scatter_pieces", kvtier_scatter_pieces, {Grid(pieces, bytes, multiprocessors)}, {32 * kWarps}, 0, pool, host,
              pool_offsets, host_offsets, pieces, bytes);
}

}  // namespace kvtier::cuda
