#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "tile.h"

namespace kvtier {
namespace {

constexpr int64_t kQueryTile = 128;  // tokens; rows of a tile are tokens x heads of the group
constexpr int64_t kKeyTile = 256;    // tokens; a tile of keys and one of values stay in L2
constexpr int64_t kFewRows = 8;      // below, values are read where they lie
constexpr float kNothing = -std::numeric_limits<float>::infinity();

}  // namespace

Attention::Attention(const Shape& shape, const KvPool& pool, int threads)
    : shape_(shape), pool_(pool), group_(shape.heads / shape.kv_heads) {
  const int64_t rows = kQueryTile * group_;
  // queries, outputs [rows, dim]; keys, values [tile, dim]; scores [rows, tile]; max, sum [rows]
  scratch_floats_ = 2 * rows * shape.head_dim + 2 * kKeyTile * shape.head_dim + rows * kKeyTile + 2 * rows;
  scratch_floats_ = (scratch_floats_ + 1023) & ~1023;
  scratch_ = Memory(static_cast<size_t>(scratch_floats_ * threads) * 4, "attention");
}

void Attention::Run(int64_t layer, const std::vector<Sequence>& batch, const float* qkv, float* out,
                    ThreadPool& threads) {
  tasks_.clear();
  const int64_t window = shape_.kinds[static_cast<size_t>(layer)].window;
  for (const auto& sequence : batch) {
    for (int64_t first = 0; first < sequence.queries; first += kQueryTile) {
      const int64_t count = std::min(kQueryTile, sequence.queries - first);
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        const int64_t before = sequence.computed + first;
        tasks_.push_back({&sequence, first, count, head, count * ((window == 0 ? before : std::min(before, window)) + count)});
      }
    }
  }
  // Longest first: the short ones fill the gaps at the end.
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  threads.For(static_cast<int64_t>(tasks_.size()), [&](int64_t task, int thread) {
    Tile(tasks_[static_cast<size_t>(task)], layer, qkv, out, scratch_.floats() + thread * scratch_floats_);
  });
}

void Attention::Tile(const Task& task, int64_t layer, const float* qkv, float* out, float* scratch) const {
  const int64_t dim = shape_.head_dim, columns = shape_.qkv_columns(), out_columns = shape_.q_columns();
  const int64_t rows = task.count * group_;
  float* queries = scratch;
  float* result = queries + kQueryTile * group_ * dim;
  float* keys = result + kQueryTile * group_ * dim;
  float* values = keys + kKeyTile * dim;
  float* scores = values + kKeyTile * dim;
  float* maxima = scores + kQueryTile * group_ * kKeyTile;
  float* sums = maxima + kQueryTile * group_;

  // Row = token * group + head, scaled here once instead of every score.
  const float scale = shape_.attention_scale;
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = qkv + (task.sequence->row + task.first + row / group_) * columns +
                          (task.kv_head * group_ + row % group_) * dim;
    for (int64_t i = 0; i < dim; ++i) queries[row * dim + i] = source[i] * scale;
    maxima[row] = kNothing;
    sums[row] = 0;
  }
  std::fill(result, result + rows * dim, 0.0f);

  const bool few = rows <= kFewRows;
  const int64_t first_position = task.sequence->computed + task.first;
  const int64_t end = first_position + task.count;
  const auto& kind = shape_.kinds[static_cast<size_t>(layer)];
  const int64_t window = kind.window;
  const int32_t* table = task.sequence->table(kind.group);
  const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, first_position - window + 1);

  for (int64_t tile = begin / kKeyTile * kKeyTile; tile < end; tile += kKeyTile) {
    const int64_t tokens = std::min(kKeyTile, end - tile);
    // The tile lies in pieces of up to one block, each contiguous [token][dim]: fn(first token, count, piece).
    const auto for_pieces = [&](int64_t kv, const auto& fn) {
      for (int64_t token = 0; token < tokens;) {
        const int64_t position = tile + token, slot = position % pool_.block_tokens;
        const int64_t count = std::min(pool_.block_tokens - slot, tokens - token);
        const int64_t block = table[position / pool_.block_tokens];
        fn(token, count, pool_.head(block, kind.slot, kv, task.kv_head) + slot * dim);
        token += count;
      }
    };
    for_pieces(0, [&](int64_t token, int64_t count, const float* piece) {
      for (int64_t done = 0; done < count;) {  // into panels of 16 keys
        const int64_t lane = (token + done) % kPanel, part = std::min(kPanel - lane, count - done);
        Transpose(piece + done * dim, part, dim, keys + (token + done) / kPanel * kPanel * dim + lane);
        done += part;
      }
    });
    // Scores beyond the last token are never read; what their keys hold is old, and finite.
    Tiles<Into::kReplace>({queries, dim, keys, kPanel, kPanel * dim, dim, scores, kKeyTile}, rows,
                          (tokens + kPanel - 1) / kPanel * kPanel);
    for (int64_t row = 0; row < rows; ++row) {
      float* score = scores + row * kKeyTile;
      const int64_t position = first_position + row / group_;
      // Keys of this tile that the query sees: [low, high).
      const int64_t high = std::clamp<int64_t>(position + 1 - tile, 0, tokens);
      const int64_t low = window == 0 ? 0 : std::clamp<int64_t>(position - window + 1 - tile, 0, high);
      if (low >= high) {
        std::fill(score, score + tokens, 0.0f);
        continue;
      }
      const float max = std::max(maxima[row], Max(score + low, high - low));
      const float shrink = Exp(maxima[row] - max);
      std::fill(score, score + low, 0.0f);
      std::fill(score + high, score + tokens, 0.0f);
      sums[row] = sums[row] * shrink + ExpSum(score + low, max, high - low);
      maxima[row] = max;
      if (shrink != 1.0f) {
        for (int64_t i = 0; i < dim; ++i) result[row * dim + i] *= shrink;
      }
    }
    if (few) {
      for_pieces(1, [&](int64_t token, int64_t count, const float* piece) {
        Tiles<Into::kContinue>({scores + token, kKeyTile, piece, dim, kPanel, count, result, dim}, rows, dim);
      });
    } else {
      for_pieces(1, [&](int64_t token, int64_t count, const float* piece) {
        memcpy(values + token * dim, piece, static_cast<size_t>(count * dim) * 4);
      });
      Tiles<Into::kContinue>({scores, kKeyTile, values, dim, kPanel, tokens, result, dim}, rows, dim);
    }
  }

  for (int64_t row = 0; row < rows; ++row) {
    float* target = out + (task.sequence->row + task.first + row / group_) * out_columns +
                    (task.kv_head * group_ + row % group_) * dim;
    const float inverse = 1.0f / sums[row];
    for (int64_t i = 0; i < dim; ++i) target[i] = result[row * dim + i] * inverse;
  }
}

}  // namespace kvtier
