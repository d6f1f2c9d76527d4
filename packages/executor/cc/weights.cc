#include "weight_files.h"

namespace kvtier {
namespace {

constexpr uint64_t kAlignElements = 16;  // every matrix starts on a cache line

}  // namespace

Weights LoadWeights(const WeightPlan& plan, float norm_offset, ThreadPool& pool) {
  const std::vector<MappedFile> files = MapFiles(plan);
  const WeightPlaces places = PlaceWeights(plan, files, norm_offset, kAlignElements);

  Weights weights{};
  weights.memory = Memory(places.count * sizeof(float), "the model's weights");
  float* base = weights.memory.floats();
  pool.For(static_cast<int64_t>(places.pieces.size()), [&](int64_t task, int) {
    const auto& [target, source, offset] = places.pieces[static_cast<size_t>(task)];
    ConvertToFloat(base + target, files[static_cast<size_t>(source.file)].data() + source.offset, source.count, source.dtype,
                   offset);
  });

  const auto at = [&](uint64_t start) -> const float* { return start == WeightPlaces::kNone ? nullptr : base + start; };
  weights.embedding = at(places.embedding);
  weights.norm = at(places.norm);
  weights.lm_head = at(places.lm_head);
  for (const auto& p : places.layers) {
    weights.layers.push_back({at(p.input_norm), at(p.qkv), at(p.qkv_bias), at(p.q_norm), at(p.k_norm), at(p.o), at(p.o_bias),
                              at(p.attention_out_norm), at(p.post_norm), at(p.gate_up), at(p.down), at(p.mlp_out_norm)});
  }
  return weights;
}

}  // namespace kvtier
