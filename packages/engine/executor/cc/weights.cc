#include "gemm.h"
#include "weight_files.h"

namespace kvtier {
namespace {

constexpr uint64_t kAlignElements = 16;  // every matrix starts on a cache line

}  // namespace

Weights LoadWeights(const WeightPlan& plan, const Shape& shape, ThreadPool& pool) {
  const std::vector<WeightFile> files = OpenFiles(plan);
  const WeightPlaces places = PlaceWeights(plan, files, shape.norm_offset, kAlignElements);

  Weights weights{};
  weights.memory = Memory(places.count * sizeof(float), "the model's weights");
  float* base = weights.memory.floats();
  FirstError error;
  pool.For(static_cast<int64_t>(places.pieces.size()), [&](int64_t task, int) {
    error.Catch([&] {
      const WeightPiece& piece = places.pieces[static_cast<size_t>(task)];
      const TensorRef& source = piece.source;
      ForSlices(files[static_cast<size_t>(source.file)], source, [&](const uint8_t* bytes, uint64_t first, uint64_t count) {
        ConvertToFloat(base + piece.target + first, bytes, count, source.dtype, piece.offset);
      });
    });
  });
  error.Rethrow();

  struct Matrix {
    uint64_t start;
    int64_t outputs, inputs;
  };
  std::vector<Matrix> matrices;
  for (const auto& p : places.layers) {
    matrices.push_back({p.qkv, shape.qkv_columns(), shape.hidden});
    matrices.push_back({p.o, shape.hidden, shape.q_columns()});
    matrices.push_back({p.gate_up, 2 * shape.intermediate, shape.hidden});
    matrices.push_back({p.down, shape.hidden, shape.intermediate});
  }
  pool.For(static_cast<int64_t>(matrices.size()), [&](int64_t task, int) {
    const Matrix& matrix = matrices[static_cast<size_t>(task)];
    PackPanels(base + matrix.start, matrix.outputs, matrix.inputs);
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
