// All layers of a model over one step's rows, enqueued on a stream: which kernel follows which, on which buffer.
//
//   hidden [rows][hidden]  the residual           gate_up [rows][2 x intermediate]
//   normed [rows][hidden]  what a matrix reads    active  [rows][intermediate]
//   added  [rows][hidden]  what a block adds      mixed   [rows][heads x head dim]  attention's result
//   qkv    [rows][q, k, v]                        logits  [sampled][vocab] f32
//
// From the last layer's attention on only rows that are sampled are computed: keys and values are stored by then, and
// nobody asks for the others.
#pragma once
#include <array>
#include <functional>
#include <vector>

#include "../gemm/gemm.h"
#include "device_weights.h"
#include "step_inputs.h"

namespace kvtier::cuda {

class Forward {
 public:
  // `scratch_bytes`: the device memory that this takes, without its gemm's workspace.
  Forward(const Shape& shape, const Limits& limits, const DeviceWeights& weights, const PagedKv& kv, const GemmOptions& gemm,
          int multiprocessors);
  static size_t ScratchBytes(const Shape& shape, const Limits& limits, NumberType type, int multiprocessors);

  // From inputs on the device to token ids. Captures as it runs.
  void Run(Stream& stream, const StepInputs::Sent& sent, const std::function<void(int64_t, Stream&)>& before_layer);

  // [sampled], in the host's memory: written there as they are drawn, since a copy engine may have a gigabyte of exports to do first.
  const int32_t* token_ids() const { return token_ids_.data<int32_t>(); }
  const float* logits() const { return logits_.data<float>(); }            // [sampled][vocab]
  const Gemm& gemm() const { return gemm_; }

 private:
  void Attend(Stream& stream, int64_t layer, const StepInputs::Sent& sent);
  // The residual takes what was added; the next matrix's input is normed with `norm`. `out_norm` may be null: Gemma 3's.
  void Add(Stream& stream, void* residual, const void* bias, const void* out_norm, const void* norm, int64_t rows);
  // By the matrix `which` of layer `layer`.
  void Product(Stream& stream, void* target, const void* source, size_t which, int64_t layer, int64_t rows, int64_t outputs, int64_t inputs);

  const Shape& shape_;
  const DeviceWeights& weights_;
  const PagedKv kv_;
  const NumberType type_;
  Gemm gemm_;
  std::array<std::vector<const void*>, 4> matrices_;  // kQkv..kDown, of all layers
  gpu::Buffer hidden_, normed_, added_, qkv_, mixed_, gate_up_, active_, last_hidden_, last_mixed_, logits_, freqs_, attention_,
      sampling_;
  gpu::PinnedBuffer token_ids_;
  int32_t* token_ids_view_ = nullptr;  // the GPU's
};

}  // namespace kvtier::cuda
