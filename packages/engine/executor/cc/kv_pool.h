// The paged KV cache: `blocks` blocks, one block contiguous as [layer][K,V][kv head][token][head dim], f32. Each block
// belongs to one attention group at a time and holds the layers of that group, so that groups share one pool.
#pragma once
#include <cstdint>

#include "memory.h"
#include "model.h"

namespace kvtier {

struct KvPool {
  KvPool(const Shape& shape, int64_t block_tokens, int64_t blocks)
      : block_tokens(block_tokens),
        blocks(blocks),
        head_floats(block_tokens * shape.head_dim),
        kv_heads(shape.kv_heads),
        block_bytes(static_cast<size_t>(shape.block_layers * 2 * shape.kv_heads * block_tokens * shape.head_dim) * 4),
        memory(block_bytes * static_cast<size_t>(blocks), "the KV cache") {}

  uint8_t* block(int64_t id) const { return memory.data() + static_cast<size_t>(id) * block_bytes; }
  // [block_tokens, head_dim] of one head; layer: its slot in the group; kv: 0 keys, 1 values.
  float* head(int64_t id, int64_t layer, int64_t kv, int64_t kv_head) const {
    return reinterpret_cast<float*>(block(id)) + ((layer * 2 + kv) * kv_heads + kv_head) * head_floats;
  }

  const int64_t block_tokens, blocks, head_floats, kv_heads;
  const size_t block_bytes;
  Memory memory;
};

}  // namespace kvtier
