#include "transformer.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "gemm.h"
#include "kernels.h"

namespace kvtier {
namespace {

constexpr int64_t kRowsPerTask = 16;

Memory Floats(int64_t count) { return Memory(static_cast<size_t>(count) * 4, "a step's activations"); }

// Rows in pieces over the pool: fn(row).
template <class Fn>
void ForRows(ThreadPool& threads, int64_t rows, const Fn& fn) {
  threads.For((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    for (int64_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); ++row) fn(row);
  });
}

}  // namespace

Transformer::Transformer(Shape shape, const WeightPlan& plan, const Limits& limits)
    : shape_(std::move(shape)),
      limits_(limits),
      threads_(static_cast<int>(limits.threads)),
      weights_(LoadWeights(plan, shape_, threads_)),
      pool_(shape_, limits.block_tokens, limits.blocks),
      attention_(shape_, pool_, static_cast<int>(limits.threads)),
      hidden_(Floats(limits.max_step_tokens * shape_.hidden)),
      normed_(Floats(limits.max_step_tokens * shape_.hidden)),
      qkv_(Floats(limits.max_step_tokens * shape_.qkv_columns())),
      mixed_(Floats(limits.max_step_tokens * shape_.q_columns())),
      gate_up_(Floats(limits.max_step_tokens * 2 * shape_.intermediate)),
      logits_(Floats(limits.max_step_sequences * shape_.vocab)),
      cos_(Floats(limits.max_step_tokens * rope_columns())),
      sin_(Floats(limits.max_step_tokens * rope_columns())),
      row_sequence_(static_cast<size_t>(limits.max_step_tokens)) {
  // The pool is promised memory: take it now, so that too little shows at start, and no request pays for page faults.
  constexpr size_t kPiece = 64 << 20;
  threads_.For(static_cast<int64_t>((pool_.memory.bytes() + kPiece - 1) / kPiece), [&](int64_t task, int) {
    const size_t start = static_cast<size_t>(task) * kPiece;
    Populate(pool_.memory.data() + start, std::min(kPiece, pool_.memory.bytes() - start));
  });
}

StepResult Transformer::Run(const Step& step) {
  const auto start = std::chrono::steady_clock::now();
  const auto sequences = static_cast<int64_t>(step.query_tokens.size());
  const auto rows = static_cast<int64_t>(step.token_ids.size());
  std::vector<Sequence> batch;
  for (int64_t i = 0, row = 0; i < sequences; ++i) {
    const auto index = static_cast<size_t>(i);
    const Sequence sequence{row, step.query_tokens[index], step.computed_tokens[index],
                            step.block_tables.data() + i * step.block_table_stride, sequences * step.block_table_stride};
    std::fill_n(row_sequence_.begin() + row, sequence.queries, static_cast<int32_t>(i));
    row += sequence.queries;
    batch.push_back(sequence);
  }

  const int64_t half = shape_.head_dim / 2, columns = rope_columns();
  ForRows(threads_, rows, [&](int64_t row) {
    const auto& sequence = batch[static_cast<size_t>(row_sequence_[static_cast<size_t>(row)])];
    memcpy(hidden_.floats() + row * shape_.hidden,
           weights_.embedding + step.token_ids[static_cast<size_t>(row)] * shape_.hidden,
           static_cast<size_t>(shape_.hidden) * 4);
    if (shape_.embedding_scale != 1.0f) {
      float* hidden = hidden_.floats() + row * shape_.hidden;
      for (int64_t i = 0; i < shape_.hidden; ++i) hidden[i] *= shape_.embedding_scale;
    }
    const auto position = static_cast<float>(sequence.computed + row - sequence.row);
    for (int64_t column = 0; column < columns; ++column) {
      const auto& rope = shape_.ropes[static_cast<size_t>(column / half)];
      const float angle = position * rope.freqs[static_cast<size_t>(column % half)];
      cos_.floats()[row * columns + column] = std::cos(angle) * rope.scale;
      sin_.floats()[row * columns + column] = std::sin(angle) * rope.scale;
    }
  });

  Layers(batch, rows);

  // Only rows that are sampled go through the LM head; their norms are gathered to the top of normed_.
  StepResult result;
  result.token_ids.assign(static_cast<size_t>(sequences), -1);
  std::vector<int64_t> sampled;
  for (int64_t i = 0; i < sequences; ++i) {
    if (step.sample[static_cast<size_t>(i)] == 0) continue;
    const auto& sequence = batch[static_cast<size_t>(i)];
    RmsNorm(normed_.floats() + static_cast<int64_t>(sampled.size()) * shape_.hidden,
            hidden_.floats() + (sequence.row + sequence.queries - 1) * shape_.hidden, weights_.norm, shape_.hidden,
            shape_.rms_eps);
    sampled.push_back(i);
  }
  const auto count = static_cast<int64_t>(sampled.size());
  if (count > 0) {
    GemmOfRows({logits_.floats(), shape_.vocab, normed_.floats(), shape_.hidden, weights_.lm_head, count, shape_.vocab,
                shape_.hidden, false},
               threads_);
    threads_.For(count, [&](int64_t task, int) {
      const auto index = static_cast<size_t>(sampled[static_cast<size_t>(task)]);
      if (shape_.logit_cap > 0) SoftCap(logits_.floats() + task * shape_.vocab, shape_.logit_cap, shape_.vocab);
      const int32_t token = Sample(logits_.floats() + task * shape_.vocab, shape_.vocab, step.sampling[index]);
      result.token_ids[index] = token;
    });
    if (step.want_logits) result.logits.assign(logits_.floats(), logits_.floats() + count * shape_.vocab);
  }
  result.elapsed_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  return result;
}

void Transformer::Layers(const std::vector<Sequence>& batch, int64_t rows) {
  const int64_t hidden = shape_.hidden, inter = shape_.intermediate;
  const auto norm = [&](const float* weight) {
    ForRows(threads_, rows, [&](int64_t row) {
      RmsNorm(normed_.floats() + row * hidden, hidden_.floats() + row * hidden, weight, hidden, shape_.rms_eps);
    });
  };
  for (int64_t l = 0; l < shape_.layers; ++l) {
    const Layer& layer = weights_.layers[static_cast<size_t>(l)];
    norm(layer.input_norm);
    Gemm({qkv_.floats(), shape_.qkv_columns(), normed_.floats(), hidden, layer.qkv, rows, shape_.qkv_columns(), hidden,
          false},
         threads_);
    RotateAndStore(l, batch, rows);
    attention_.Run(l, batch, qkv_.floats(), mixed_.floats(), threads_);
    // What a norm follows goes to normed_, which is free until then; all else is added to the residual at once.
    float* attended = layer.attention_out_norm == nullptr ? hidden_.floats() : normed_.floats();
    Gemm({attended, hidden, mixed_.floats(), shape_.q_columns(), layer.o, rows, hidden, shape_.q_columns(),
          layer.attention_out_norm == nullptr},
         threads_);
    if (layer.o_bias != nullptr) {
      ForRows(threads_, rows, [&](int64_t row) { AddBias(attended + row * hidden, layer.o_bias, hidden); });
    }
    if (layer.attention_out_norm != nullptr) AddNormed(layer.attention_out_norm, rows);
    norm(layer.post_norm);
    Gemm({gate_up_.floats(), 2 * inter, normed_.floats(), hidden, layer.gate_up, rows, 2 * inter, hidden, false}, threads_);
    ForRows(threads_, rows, [&](int64_t row) {
      float* gate = gate_up_.floats() + row * 2 * inter;
      if (shape_.gelu) {
        GeGlu(gate, gate + inter, inter);
      } else {
        SwiGlu(gate, gate + inter, inter);
      }
    });
    const bool plain = layer.mlp_out_norm == nullptr;
    Gemm({plain ? hidden_.floats() : normed_.floats(), hidden, gate_up_.floats(), 2 * inter, layer.down, rows, hidden,
          inter, plain},
         threads_);
    if (!plain) AddNormed(layer.mlp_out_norm, rows);
  }
}

void Transformer::AddNormed(const float* weight, int64_t rows) {
  const int64_t hidden = shape_.hidden;
  ForRows(threads_, rows, [&](int64_t row) {
    float* added = normed_.floats() + row * hidden;
    RmsNorm(added, added, weight, hidden, shape_.rms_eps);
    AddBias(hidden_.floats() + row * hidden, added, hidden);
  });
}

// Bias, q/k norm and rotation of each row's heads; then its key and value go to their place in the pool.
void Transformer::RotateAndStore(int64_t l, const std::vector<Sequence>& batch, int64_t rows) {
  const Layer& layer = weights_.layers[static_cast<size_t>(l)];
  const int64_t dim = shape_.head_dim, half = dim / 2;
  const LayerKind& kind = shape_.kinds[static_cast<size_t>(l)];
  ForRows(threads_, rows, [&](int64_t row) {
    const auto& sequence = batch[static_cast<size_t>(row_sequence_[static_cast<size_t>(row)])];
    float* qkv = qkv_.floats() + row * shape_.qkv_columns();
    if (layer.qkv_bias != nullptr) AddBias(qkv, layer.qkv_bias, shape_.qkv_columns());
    for (int64_t head = 0; head < shape_.heads + shape_.kv_heads; ++head) {
      float* vector = qkv + head * dim;
      const float* weight = head < shape_.heads ? layer.q_norm : layer.k_norm;
      if (weight != nullptr) RmsNorm(vector, vector, weight, dim, shape_.rms_eps);
      const int64_t at = row * rope_columns() + kind.rope * half;
      Rope(vector, cos_.floats() + at, sin_.floats() + at, half);
    }
    const int64_t position = sequence.computed + row - sequence.row;
    const int64_t block = sequence.table(kind.group)[position / pool_.block_tokens], slot = position % pool_.block_tokens;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const size_t bytes = static_cast<size_t>(dim) * 4;
      const float* key = qkv + shape_.q_columns() + head * dim;
      memcpy(pool_.head(block, kind.slot, 0, head) + slot * dim, key, bytes);
      memcpy(pool_.head(block, kind.slot, 1, head) + slot * dim, key + shape_.kv_columns(), bytes);
    }
  });
}

}  // namespace kvtier
