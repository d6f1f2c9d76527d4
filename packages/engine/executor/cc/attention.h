// Causal attention of a mixed batch over the paged KV cache: tiles of queries against tiles of keys with an online
// softmax (FlashAttention), so scratch is bounded whatever the context. Keys and values of all tokens, the new ones
// included, are already in the pool.
#pragma once
#include <cstdint>
#include <vector>

#include "kv_pool.h"
#include "thread_pool.h"

namespace kvtier {

// One sequence of a batch; rows of the batch's matrices are [row, row + queries).
struct Sequence {
  int64_t row;
  int64_t queries;
  int64_t computed;  // tokens before the first query
  const int32_t* tables;  // of the first attention group; block 0 stands for blocks that left the window
  int64_t table_stride;   // from one group's table to the next
  const int32_t* table(int64_t group) const { return tables + group * table_stride; }
};

class Attention {
 public:
  Attention(const Shape& shape, const KvPool& pool, int threads);

  // qkv: [rows, shape.qkv_columns()], rotated; out: [rows, shape.q_columns()].
  void Run(int64_t layer, const std::vector<Sequence>& batch, const float* qkv, float* out, ThreadPool& threads);

 private:
  struct Task {
    const Sequence* sequence;
    int64_t first, count;  // queries of the sequence
    int64_t kv_head;
    int64_t cost;
  };
  void Tile(const Task& task, int64_t layer, const float* qkv, float* out, float* scratch) const;

  const Shape& shape_;
  const KvPool& pool_;
  int64_t group_;  // query heads per KV head
  int64_t scratch_floats_;
  Memory scratch_;  // one piece per thread
  std::vector<Task> tasks_;
};

}  // namespace kvtier
