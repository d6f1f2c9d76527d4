// Attention over large tiles for f16 activations.
#include "attention_tiles.cuh"

namespace kvtier::cuda {
template void AttentionTiles<f16>(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);
}
