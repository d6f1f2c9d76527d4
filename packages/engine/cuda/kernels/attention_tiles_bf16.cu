// Attention over large tiles for bf16 activations.
#include "attention_tiles.cuh"

namespace kvtier::cuda {
template void AttentionTiles<bf16>(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&);
}
