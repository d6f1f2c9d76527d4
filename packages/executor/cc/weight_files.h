// What loading weights has in common on all backends: the model's files, mapped; where each matrix lies in one piece of
// memory; and the pieces of work that fill it. Invariant: stacked tensors follow one another without a gap, and every
// matrix starts on a multiple of `align` elements.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace kvtier {

class MappedFile {
 public:
  // Throws std::runtime_error("MODEL: ...").
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();
  const uint8_t* data() const { return static_cast<const uint8_t*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

inline uint64_t ElementBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// source.count elements of a file to the elements that start at `target`.
struct WeightPiece {
  uint64_t target;
  TensorRef source;
  float offset;  // added to each element
};

// First elements of all matrices; kNone where the family has none. Pieces ascend by target.
struct WeightPlaces {
  static constexpr uint64_t kNone = ~0ull;
  struct LayerPlaces {
    uint64_t input_norm, qkv, qkv_bias, q_norm, k_norm, o, o_bias, attention_out_norm, post_norm, gate_up, down, mlp_out_norm;
  };
  uint64_t embedding, norm, lm_head;
  std::vector<LayerPlaces> layers;
  std::vector<WeightPiece> pieces;
  uint64_t count = 0;  // elements in all
};

// `norm_offset` is added to the weights of all norms. Throws for a tensor that ends past its file.
WeightPlaces PlaceWeights(const WeightPlan& plan, const std::vector<MappedFile>& files, float norm_offset, uint64_t align);
std::vector<MappedFile> MapFiles(const WeightPlan& plan);

// Elements of a file as floats, `offset` added.
void ConvertToFloat(float* target, const uint8_t* source, uint64_t count, Dtype dtype, float offset);

}  // namespace kvtier
