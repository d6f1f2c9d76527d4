// AttentionDecode v2 for bf16 activations.
#include "attention_split.cuh"

namespace kvtier::cuda {
template void AttentionSplit<bf16>(Stream&, const AttentionArgs&, const Batch&, int32_t max_queries, int multiprocessors);
}
