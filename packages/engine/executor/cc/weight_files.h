// What loading weights has in common on all backends: the model's files, read and never mapped, because a file that is cut
// short under a mapping kills the process; where each matrix lies in one piece of memory; and the pieces of work that fill it.
// Invariant: stacked tensors follow one another without a gap, and every matrix starts on a multiple of `align` elements.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "model.h"

namespace kvtier {

class WeightFile {
 public:
  // Throws std::runtime_error("MODEL: ..."), as Read does.
  explicit WeightFile(const PlanFile& file);
  uint64_t bytes() const { return bytes_; }
  // May be called by many threads at once. Throws when the file ends before.
  void Read(uint64_t offset, void* target, uint64_t bytes) const;

 private:
  PlanFile file_;
  uint64_t bytes_ = 0;
};

// The first thing that tasks of a parallel loop, which must not throw, failed with.
class FirstError {
 public:
  template <class Fn>
  void Catch(const Fn& task) noexcept {
    if (taken_.load(std::memory_order_relaxed)) return;  // what is loaded will not be used
    try {
      task();
    } catch (...) {
      if (!taken_.exchange(true)) error_ = std::current_exception();
    }
  }
  // Once all tasks have ended.
  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr error_;
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
WeightPlaces PlaceWeights(const WeightPlan& plan, const std::vector<WeightFile>& files, float norm_offset, uint64_t align);
std::vector<WeightFile> OpenFiles(const WeightPlan& plan);

// Calls fn(bytes, first element, elements) for all of a piece's elements, slice by slice.
constexpr uint64_t kSliceBytes = 256 << 10;  // stays in the second cache
template <class Fn>
void ForSlices(const WeightFile& file, const TensorRef& source, const Fn& fn) {
  thread_local std::vector<uint8_t> slice(kSliceBytes);
  const uint64_t most = kSliceBytes / ElementBytes(source.dtype);
  for (uint64_t done = 0; done < source.count; done += most) {
    const uint64_t count = source.count - done < most ? source.count - done : most;
    file.Read(source.offset + done * ElementBytes(source.dtype), slice.data(), count * ElementBytes(source.dtype));
    fn(static_cast<const uint8_t*>(slice.data()), done, count);
  }
}

// Elements of a file as floats, `offset` added.
void ConvertToFloat(float* target, const uint8_t* source, uint64_t count, Dtype dtype, float offset);

}  // namespace kvtier
