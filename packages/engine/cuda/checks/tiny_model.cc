#include "tiny_model.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "check.h"

namespace kvtier::cuda::check {
namespace {

constexpr int64_t kVocab = 130, kHidden = 64, kIntermediate = 96, kMaxTokens = 160;

Dtype FileDtype(NumberType type) {
  return type == NumberType::kF32 ? Dtype::kF32 : type == NumberType::kF16 ? Dtype::kF16 : Dtype::kBf16;
}

void Write(int fd, const void* data, size_t bytes) {
  if (write(fd, data, bytes) != static_cast<ssize_t>(bytes)) throw std::runtime_error("check: a model cannot be written to the temporary folder");
}

}  // namespace

const std::vector<Family>& Families() {
  static const std::vector<Family> families = {
      {.name = "llama", .qkv_bias = true, .o_bias = true},
      {.name = "mistral", .heads = 4, .kv_heads = 1, .windows = {20, 20}},
      {.name = "qwen2", .heads = 7, .kv_heads = 1, .tied = true, .qkv_bias = true},
      {.name = "qwen3", .qk_norm = true, .rope_scale = 1.2f},
      {.name = "gemma3", .tied = true, .qk_norm = true, .gemma = true, .windows = {12, 12, 0, 12}, .logit_cap = 3},
  };
  return families;
}

TinyModel::TinyModel(const Family& f, NumberType file_type) {
  const auto layers = static_cast<int64_t>(f.windows.size());
  shape = {kVocab, kHidden, kIntermediate, layers, f.heads, f.kv_heads, f.head_dim, kMaxTokens, 1e-5f, f.gemma ? 1.0f : 0.0f,
           1 / std::sqrt(static_cast<float>(f.head_dim)), f.gemma ? 8.0f : 1.0f, f.logit_cap, f.gemma, {}, {}, 1, 1, {}};
  for (const float theta : {10000.0f, 500.0f}) {
    RopeTable rope{{}, f.rope_scale};
    for (int64_t i = 0; i < f.head_dim / 2; ++i) {
      rope.freqs.push_back(std::pow(theta, -2.0f * static_cast<float>(i) / static_cast<float>(f.head_dim)));
    }
    shape.ropes.push_back(rope);
    if (!f.gemma) break;
  }
  // One group per layer where kinds are mixed; else one group of all.
  const bool mixed = f.gemma;
  shape.groups = mixed ? layers : 1;
  shape.block_layers = mixed ? 1 : layers;
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t window = f.windows[static_cast<size_t>(l)];
    shape.kinds.push_back({window, f.gemma && window > 0 ? 1 : 0, mixed ? l : 0, mixed ? 0 : l});
    if (mixed || l == 0) shape.group_windows.push_back(window);
  }

  std::string path = TemporaryName("");
  const int fd = mkstemp(path.data());
  if (fd < 0) throw std::runtime_error("check: no temporary file can be made; set TMPDIR");
  plan.files = {{path, fd}};
  uint64_t offset = 0, seed = 100;
  const auto tensor = [&](int64_t outputs, int64_t inputs, float scale, float middle) {
    const int64_t count = outputs * inputs;
    const auto values = RandomFloats(++seed, count, middle - scale, middle + scale);
    const TensorRef ref{0, offset, static_cast<uint64_t>(count), FileDtype(file_type)};
    const size_t bytes = static_cast<size_t>(count * NumberBytes(file_type));
    offset += bytes;
    if (file_type == NumberType::kF32) Write(fd, values.data(), bytes);
    if (file_type == NumberType::kF16) Write(fd, FromFloats<f16>(values).data(), bytes);
    if (file_type == NumberType::kBf16) Write(fd, FromFloats<bf16>(values).data(), bytes);
    return ref;
  };
  const auto matrix = [&](int64_t outputs, int64_t inputs) { return tensor(outputs, inputs, std::sqrt(3.0f / static_cast<float>(inputs)), 0); };
  const auto norm = [&](int64_t size) { return tensor(1, size, 0.2f, 1 - shape.norm_offset); };
  const auto when = [](bool there, auto make) { return there ? make() : TensorStack{}; };
  const int64_t q = shape.q_columns(), kv = shape.kv_columns();
  plan.embedding = {tensor(kVocab, kHidden, 1, 0)};
  plan.norm = {norm(kHidden)};
  plan.lm_head = when(!f.tied, [&] { return TensorStack{matrix(kVocab, kHidden)}; });
  const auto bias = [&](int64_t size) { return tensor(1, size, 0.3f, 0); };
  for (int64_t l = 0; l < layers; ++l) {
    plan.layers.push_back({{norm(kHidden)},
                           {matrix(q, kHidden), matrix(kv, kHidden), matrix(kv, kHidden)},
                           when(f.qkv_bias, [&] { return TensorStack{bias(q), bias(kv), bias(kv)}; }),
                           when(f.qk_norm, [&] { return TensorStack{norm(f.head_dim)}; }),
                           when(f.qk_norm, [&] { return TensorStack{norm(f.head_dim)}; }),
                           {matrix(kHidden, q)},
                           when(f.o_bias, [&] { return TensorStack{bias(kHidden)}; }),
                           when(f.gemma, [&] { return TensorStack{norm(kHidden)}; }),
                           {norm(kHidden)},
                           {matrix(kIntermediate, kHidden), matrix(kIntermediate, kHidden)},
                           {matrix(kHidden, kIntermediate)},
                           when(f.gemma, [&] { return TensorStack{norm(kHidden)}; })});
  }
}

TinyModel::~TinyModel() {
  close(plan.files[0].fd);
  unlink(plan.files[0].path.c_str());
}

int64_t Sequences::Add(std::vector<int32_t> tokens) {
  all_.push_back({std::move(tokens), 0, std::vector<std::vector<int32_t>>(static_cast<size_t>(shape_.groups))});
  return static_cast<int64_t>(all_.size()) - 1;
}

// 1, 2, 3, ... scattered: multiplied by what has no divisor in common with the number of blocks.
int32_t Sequences::NextBlock() {
  const int64_t usable = limits_.blocks - 1;
  if (taken_ >= usable) throw std::runtime_error("check: the pool is too small for its sequences");
  int64_t step = usable / 2 + 1;
  while (std::gcd(step, usable) != 1) ++step;
  return static_cast<int32_t>(1 + taken_++ * step % usable);
}

Step Sequences::Next(const std::vector<Part>& parts, bool want_logits) {
  Step step{};
  step.want_logits = want_logits;
  step.block_table_stride = (shape_.max_tokens + limits_.block_tokens - 1) / limits_.block_tokens;
  for (const auto& [index, tokens, sample] : parts) {
    One& one = all_[static_cast<size_t>(index)];
    const auto first = one.tokens.begin() + one.computed;
    step.token_ids.insert(step.token_ids.end(), first, first + tokens);
    step.query_tokens.push_back(static_cast<int32_t>(tokens));
    step.computed_tokens.push_back(static_cast<int32_t>(one.computed));
    step.sample.push_back(sample ? 1 : 0);
    const auto seed = static_cast<uint64_t>(one.computed * 1000 + index);
    step.sampling.push_back(index % 2 == 0 ? Sampling{0, 0, 1, 0} : Sampling{0.9f, 40, 0.95f, seed});
    const int64_t blocks = (one.computed + tokens + limits_.block_tokens - 1) / limits_.block_tokens;
    for (auto& table : one.blocks) {
      while (static_cast<int64_t>(table.size()) < blocks) table.push_back(NextBlock());
    }
  }
  for (int64_t group = 0; group < shape_.groups; ++group) {
    const int64_t window = shape_.group_windows[static_cast<size_t>(group)];
    for (const auto& [index, tokens, sample] : parts) {
      One& one = all_[static_cast<size_t>(index)];
      auto table = one.blocks[static_cast<size_t>(group)];
      const int64_t left = window == 0 ? 0 : std::max<int64_t>(0, one.computed - window + 1) / limits_.block_tokens;
      std::fill_n(table.begin(), left, 0);
      table.resize(static_cast<size_t>(step.block_table_stride), 0x7fffffff);  // never read
      step.block_tables.insert(step.block_tables.end(), table.begin(), table.end());
    }
  }
  for (const auto& [index, tokens, sample] : parts) all_[static_cast<size_t>(index)].computed += tokens;
  return step;
}

}  // namespace kvtier::cuda::check
