// The parts of large tiles become their results: softmax over all keys from each part's maximum, sum and output (log-sum-exp), in the parts'
// order. A warp takes a row; 16 rows a block, so that a few tiles spread over the GPU. Moves the parts once.
#include "attention.cuh"

namespace kvtier::cuda {

namespace {

constexpr int kMergeWarps = 4, kBlockRows = 16;

template <class T, int kDimension>
__global__ void __launch_bounds__(32 * kMergeWarps) AttentionMergeKernel(AttentionArgs a, Batch b, AttentionUnits units) {
  __shared__ float weights[kBlockRows][kMostParts];
  const AttentionItem item = units.items[static_cast<int32_t>(blockIdx.x) / a.kv.kv_heads];
  const SequenceView view(a, b, item.sequence);
  const Parts<T, kDimension> parts(a, units, item, view, static_cast<int32_t>(blockIdx.x) % a.kv.kv_heads);
  const float scale_log2 = (a.soft_cap > 0 ? 1.0f : a.scale) * kLog2E;
  for (int row = static_cast<int>(threadIdx.x / 32); row < kBlockRows; row += kMergeWarps) {
    const int32_t of_tile = static_cast<int32_t>(blockIdx.y) * kBlockRows + row;
    if (of_tile < item.rows) parts.Merge(a, of_tile, weights[row], scale_log2);
  }
}

}  // namespace

template <class T>
void AttentionMerge(Stream& stream, const AttentionArgs& a, const Batch& b, const AttentionUnits& units) {
  ForAttentionShape<T>(a.kv, [&]<class Kv, int kDim>() {
    const gpu::Dim grid{static_cast<unsigned>(units.count * a.kv.kv_heads), static_cast<unsigned>(AttentionTileRows(kDim) / kBlockRows)};
    gpu::Launch(stream, "attention merge", AttentionMergeKernel<T, kDim>, grid, {32 * kMergeWarps}, 0, a, b, units);
  });
}

template void AttentionMerge<f16>(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);
template void AttentionMerge<bf16>(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);

}  // namespace kvtier::cuda
