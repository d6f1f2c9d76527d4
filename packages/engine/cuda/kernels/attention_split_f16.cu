// AttentionDecode v2 for f16 activations.
#include "attention_split.cuh"

namespace kvtier::cuda {
template void AttentionSplit<f16>(Stream&, const AttentionArgs&, const Batch&, int32_t max_queries, int multiprocessors);
}
