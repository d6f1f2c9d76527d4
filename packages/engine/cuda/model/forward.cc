#include "forward.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace kvtier::cuda {
namespace {

constexpr int64_t kUploadDeadlineUs = 60'000'000;
constexpr size_t kQkv = 0, kO = 1, kGateUp = 2, kDown = 3;

// All buffers, in the order of Forward's members from hidden_ to sampling_.
std::array<size_t, 13> BufferBytes(const Shape& s, const Limits& limits, NumberType type, int multiprocessors) {
  const int64_t rows = std::max(limits.max_step_tokens, limits.max_step_sequences), sampled = limits.max_step_sequences;
  const int64_t bytes = NumberBytes(type);
  const int64_t wanted[] = {rows * s.hidden * bytes,
                            rows * s.hidden * bytes,
                            rows * s.hidden * bytes,
                            rows * s.qkv_columns() * bytes,
                            rows * s.q_columns() * bytes,
                            rows * 2 * s.intermediate * bytes,
                            rows * s.intermediate * bytes,
                            sampled * s.hidden * bytes,
                            sampled * s.q_columns() * bytes,
                            sampled * s.vocab * 4,
                            static_cast<int64_t>(s.ropes.size()) * s.head_dim / 2 * 4,
                            AttentionWorkspaceBytes(AttentionWorkspaceRows(s.heads, multiprocessors), s.head_dim),
                            SamplingWorkspaceBytes(sampled, s.vocab)};
  std::array<size_t, 13> sizes{};
  std::transform(std::begin(wanted), std::end(wanted), sizes.begin(), [](int64_t count) { return static_cast<size_t>(count); });
  return sizes;
}

}  // namespace

size_t Forward::ScratchBytes(const Shape& shape, const Limits& limits, NumberType type, int multiprocessors) {
  size_t sum = 0;
  for (const size_t bytes : BufferBytes(shape, limits, type, multiprocessors)) sum += (bytes + 511) / 512 * 512;
  return sum;
}

Forward::Forward(const Shape& shape, const Limits& limits, const DeviceWeights& weights, const PagedKv& kv,
                 const GemmOptions& gemm, int multiprocessors)
    : shape_(shape), weights_(weights), kv_(kv), type_(weights.type), gemm_(gemm) {
  for (const DeviceLayer& layer : weights.layers) {
    const void* const of[] = {layer.qkv, layer.o, layer.gate_up, layer.down};
    for (size_t which = 0; which < matrices_.size(); ++which) matrices_[which].push_back(of[which]);
  }
  gpu::Buffer* const buffers[] = {&hidden_, &normed_, &added_, &qkv_, &mixed_, &gate_up_, &active_, &last_hidden_, &last_mixed_,
                                  &logits_, &freqs_, &attention_, &sampling_};
  const auto sizes = BufferBytes(shape, limits, type_, multiprocessors);
  for (size_t i = 0; i < sizes.size(); ++i) *buffers[i] = gpu::Buffer(sizes[i], "a step's activations");

  token_ids_ = gpu::PinnedBuffer(static_cast<size_t>(limits.max_step_sequences) * sizeof(int32_t), "a step's token ids");
  token_ids_view_ = static_cast<int32_t*>(gpu::DeviceView(token_ids_.data()));

  gpu::PinnedBuffer staging(freqs_.bytes(), "rotary frequencies");
  float* target = staging.data<float>();
  for (const auto& rope : shape_.ropes) target = std::copy(rope.freqs.begin(), rope.freqs.end(), target);
  Stream stream;
  const gpu::WaitAtEnd ending(stream, kUploadDeadlineUs);
  stream.Copy(freqs_.data(), staging.data(), freqs_.bytes());
  if (attention_.bytes() > 0) stream.Set(attention_.data(), 0, attention_.bytes());
  if (!stream.Synchronize(kUploadDeadlineUs)) {
    gpu::Abandon();
    throw std::runtime_error("GPU: the device did not take its first copy within 60 s; restart the worker");
  }
}

void Forward::Product(Stream& stream, void* target, const void* source, size_t which, int64_t layer, int64_t rows, int64_t outputs,
                      int64_t inputs) {
  const void* weight = matrices_[which][static_cast<size_t>(layer)];
  gemm_.Run(stream, type_, {target, source, weight, rows, outputs, inputs, outputs, inputs, false, false}, matrices_[which]);
}

void Forward::Attend(Stream& stream, int64_t l, const StepInputs::Sent& sent) {
  const DeviceLayer& layer = weights_.layers[static_cast<size_t>(l)];
  const LayerKind& kind = shape_.kinds[static_cast<size_t>(l)];
  const RopeTable& rope = shape_.ropes[static_cast<size_t>(kind.rope)];
  PagedKv kv = kv_;
  kv.layer_offset = kind.slot * 2 * kv.kv_heads * kv.block_tokens * kv.head_dim * NumberBytes(kv.type);
  const int32_t* table = sent.batch.group_table(kind.group);
  const auto heads = static_cast<int32_t>(shape_.heads);
  RopeAndStore(stream, type_,
               {qkv_.data(), layer.qkv_bias, layer.q_norm, layer.k_norm, shape_.rms_eps,
                freqs_.data<float>() + kind.rope * shape_.head_dim / 2, rope.scale, heads, kv, table},
               sent.batch);
  const AttentionArgs args{qkv_.data(), mixed_.data(), shape_.qkv_columns(), heads, shape_.attention_scale,
                           static_cast<int32_t>(kind.window), 0, kv, table, attention_.data(),
                           &sent.attention[static_cast<size_t>(kind.group)]};
  Attention(stream, type_, args, sent.batch);
}

void Forward::Add(Stream& stream, void* residual, const void* bias, const void* out_norm, const void* norm, int64_t rows) {
  const int64_t hidden = shape_.hidden;
  if (out_norm == nullptr) {
    AddRmsNorm(stream, type_, normed_.data(), residual, added_.data(), bias, norm, rows, hidden, shape_.rms_eps);
    return;
  }
  NormAdd(stream, type_, residual, added_.data(), bias, out_norm, rows, hidden, shape_.rms_eps);
  RmsNorm(stream, type_, normed_.data(), residual, norm, rows, hidden, shape_.rms_eps);
}

void Forward::Run(Stream& stream, const StepInputs::Sent& sent, const std::function<void(int64_t, Stream&)>& before_layer) {
  const int64_t hidden = shape_.hidden, inner = shape_.intermediate;
  int64_t rows = sent.batch.rows;
  void *residual = hidden_.data(), *mixed = mixed_.data();
  Embed(stream, type_, residual, weights_.embedding, sent.token_ids, rows, hidden, shape_.embedding_scale);
  RmsNorm(stream, type_, normed_.data(), residual, weights_.layers[0].input_norm, rows, hidden, shape_.rms_eps);

  for (int64_t l = 0; l < shape_.layers; ++l) {
    const DeviceLayer& layer = weights_.layers[static_cast<size_t>(l)];
    const bool last = l + 1 == shape_.layers;
    if (before_layer) before_layer(l, stream);
    Product(stream, qkv_.data(), normed_.data(), kQkv, l, rows, shape_.qkv_columns(), hidden);
    Attend(stream, l, sent);
    if (last && sent.sampled < rows) {
      if (sent.sampled == 0) return;
      rows = sent.sampled;
      GatherRows(stream, type_, last_mixed_.data(), mixed, sent.sampled_rows, rows, shape_.q_columns());
      GatherRows(stream, type_, last_hidden_.data(), residual, sent.sampled_rows, rows, hidden);
      residual = last_hidden_.data();
      mixed = last_mixed_.data();
    }
    Product(stream, added_.data(), mixed, kO, l, rows, hidden, shape_.q_columns());
    Add(stream, residual, layer.o_bias, layer.attention_out_norm, layer.post_norm, rows);
    Product(stream, gate_up_.data(), normed_.data(), kGateUp, l, rows, 2 * inner, hidden);
    GatedActivation(stream, type_, active_.data(), gate_up_.data(), rows, inner, shape_.gelu);
    Product(stream, added_.data(), active_.data(), kDown, l, rows, hidden, inner);
    const void* next_norm = last ? weights_.norm : weights_.layers[static_cast<size_t>(l + 1)].input_norm;
    Add(stream, residual, nullptr, layer.mlp_out_norm, next_norm, rows);
  }

  gemm_.Run(stream, type_, {logits_.data(), normed_.data(), weights_.lm_head, rows, shape_.vocab, hidden, shape_.vocab, hidden, false, true});
  Sample(stream, logits_.data<float>(), rows, shape_.vocab, shape_.logit_cap, sent.sampling, token_ids_view_, sampling_.data());
}

}  // namespace kvtier::cuda
