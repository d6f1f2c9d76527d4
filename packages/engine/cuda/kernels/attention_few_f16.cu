// Attention over tiles of few rows for f16 activations.
#include "attention_few.cuh"

namespace kvtier::cuda {
template void AttentionFew<f16>(Stream&, const AttentionArgs&, const Batch&, const AttentionUnits&, int32_t blocks);
}
