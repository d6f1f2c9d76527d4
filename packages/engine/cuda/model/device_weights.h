// A model's weights in GPU memory, in the type that it computes in: one allocation, each matrix at a multiple of 256 bytes.
// The same matrices, stacked and offset in the same way, as LoadWeights makes for the CPU (packages/engine/executor/cc/model.h).
#pragma once
#include <vector>

#include "../gpu/gpu.h"
#include "../gpu/numeric.h"
#include "model.h"
#include "thread_pool.h"

namespace kvtier::cuda {

// Device memory of the weights' type; null where the family has none. Fields as Layer's in model.h.
struct DeviceLayer {
  const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *attention_out_norm, *post_norm, *gate_up, *down,
      *mlp_out_norm;
};

struct DeviceWeights {
  NumberType type;
  const void *embedding, *norm, *lm_head;
  std::vector<DeviceLayer> layers;
  gpu::Buffer memory;
  size_t file_bytes;   // read from files
  double elapsed_us;   // until all of it was on the device
};

// Files -> staging (converted by the pool's threads) -> GPU, in pieces: while one staging buffer is copied the other is
// filled. Numbers are rounded once, to nearest even, after a norm's offset was added in f32. Uses this thread's device.
// Throws std::runtime_error("MODEL: ..." or "GPU: ...").
DeviceWeights LoadDeviceWeights(const WeightPlan& plan, float norm_offset, NumberType type, ThreadPool& pool);

// Which parts a family has beyond Llama's.
struct WeightFeatures {
  bool tied_embeddings = false, qkv_bias = false, o_bias = false, qk_norm = false, out_norms = false;
};
// Random weights made on the GPU, for measuring real shapes without files: norms near 1, matrices of unit gain, so that
// activations keep their size through all layers.
DeviceWeights RandomDeviceWeights(const Shape& shape, const WeightFeatures& features, NumberType type, uint64_t seed);

// Bytes that either takes.
size_t DeviceWeightBytes(const Shape& shape, const WeightFeatures& features, NumberType type);

}  // namespace kvtier::cuda
