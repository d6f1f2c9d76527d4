// rope.cu against reference.cc: rotated queries in place, keys and values at their places in the pool and nowhere else.
#include <cmath>
#include <cstring>

#include "../kernels/reference.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

struct RopeShape {
  int32_t heads, kv_heads, head_dim, block_tokens;
  bool bias, norms;
  std::vector<int32_t> computed, queries;  // per sequence
};

std::vector<float> Freqs(int32_t half, double theta) {
  std::vector<float> freqs;
  for (int32_t i = 0; i < half; ++i) freqs.push_back(static_cast<float>(std::pow(theta, -i / static_cast<double>(half))));
  return freqs;
}

size_t Index(int64_t i) { return static_cast<size_t>(i); }

// One step of one layer; `kv_type` of the pool.
void RunRope(NumberType type, NumberType kv_type, const RopeShape& s, const std::string& name) {
  const int64_t dim = s.head_dim, columns = (s.heads + 2 * s.kv_heads) * dim;
  std::vector<int32_t> start{0}, row_sequence, tables;
  int32_t blocks = 1, most_blocks = 0;
  for (size_t i = 0; i < s.queries.size(); ++i) {
    start.push_back(start.back() + s.queries[i]);
    row_sequence.insert(row_sequence.end(), Index(s.queries[i]), static_cast<int32_t>(i));
    most_blocks = std::max(most_blocks, (s.computed[i] + s.queries[i] + s.block_tokens - 1) / s.block_tokens);
  }
  // Only blocks that new tokens fall into are real; in reverse order, so that nothing is where a mistake would put it.
  const auto sequences = static_cast<int32_t>(s.queries.size());
  tables.assign(Index(sequences * most_blocks), 0);
  for (int32_t i = sequences - 1; i >= 0; --i) {
    const int32_t last = (s.computed[Index(i)] + s.queries[Index(i)] - 1) / s.block_tokens;
    for (int32_t b = last; b >= s.computed[Index(i)] / s.block_tokens; --b) tables[Index(i * most_blocks + b)] = blocks++;
  }
  const int64_t rows = start.back(), number_bytes = NumberBytes(kv_type);
  const int64_t layer_bytes = 2 * s.kv_heads * s.block_tokens * dim * number_bytes, block_bytes = 3 * layer_bytes;  // layer 1 of 3

  const auto inputs = [&](uint64_t seed, int64_t count) { return RoundedAs(type, RandomFloats(seed, count, -2, 2)); };
  auto qkv = inputs(1, rows * columns);
  reference::RopeRow rope{s.heads, s.kv_heads, dim, {}, {}, {}, Freqs(s.head_dim / 2, 10000), 1e-6f, 1.25f};
  if (s.bias) rope.bias = inputs(2, columns);
  if (s.norms) rope.q_norm = inputs(3, dim), rope.k_norm = inputs(4, dim);

  const DeviceArray<uint8_t> device_qkv = UploadAs(type, qkv), bias = UploadAs(type, rope.bias), q_norm = UploadAs(type, rope.q_norm),
                             k_norm = UploadAs(type, rope.k_norm);
  const DeviceArray<float> freqs(rope.freqs);
  const DeviceArray<int32_t> query_start(start), computed(s.computed), device_rows(row_sequence), table(tables);
  const DeviceArray<uint8_t> pool(std::vector<uint8_t>(Index(blocks * block_bytes), 0));
  const Batch batch{sequences, static_cast<int32_t>(rows), query_start.data(), computed.data(), device_rows.data(), table.data(), most_blocks};
  const PagedKv kv{pool.data(), block_bytes, layer_bytes, blocks, s.block_tokens, s.kv_heads, s.head_dim, kv_type};
  gpu::Stream stream;
  RopeAndStore(stream, type,
               {device_qkv.data(), s.bias ? bias.data() : nullptr, s.norms ? q_norm.data() : nullptr, s.norms ? k_norm.data() : nullptr,
                rope.eps, freqs.data(), rope.scale, s.heads, kv, table.data()},
               batch);
  Finish(stream);

  std::vector<float> expected_pool(Index(blocks * block_bytes / number_bytes), 0);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t sequence = row_sequence[Index(row)];
    const int64_t position = s.computed[Index(sequence)] + row - start[Index(sequence)];
    float* one = qkv.data() + row * columns;
    reference::Rope(one, rope, position);
    const int64_t block = tables[Index(sequence * most_blocks + position / s.block_tokens)];
    for (int64_t head = 0; head < 2 * s.kv_heads; ++head) {
      float* place = expected_pool.data() + (block * block_bytes + layer_bytes) / number_bytes +
                     (head * s.block_tokens + position % s.block_tokens) * dim;
      std::copy_n(one + (s.heads + head) * dim, dim, place);
    }
  }
  const auto got = DownloadAs(type, device_qkv);
  std::vector<float> queries, expected_queries;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < s.heads * dim; ++i) {
      queries.push_back(got[Index(row * columns + i)]);
      expected_queries.push_back(qkv[Index(row * columns + i)]);
    }
  }
  Expect("RopeAndStore", name + ", queries", MaxRelativeError(queries, expected_queries), 2 * Epsilon(type) + 1e-5);
  Expect("RopeAndStore", name + ", pool", MaxRelativeError(DownloadAs(kv_type, pool), expected_pool), 2 * Epsilon(kv_type) + 1e-5);
}

KVTIER_CHECK(rope) {
  const RopeShape mixed{4, 2, 64, 16, true, true, {0, 30, 17}, {20, 1, 5}};
  for (const NumberType type : {NumberType::kF32, NumberType::kF16, NumberType::kBf16}) {
    for (const NumberType kv : {NumberType::kF32, NumberType::kF16, NumberType::kBf16, NumberType::kE4m3}) {
      RunRope(type, kv, mixed, std::string(Name(type)) + " -> " + Name(kv));
    }
    for (const int32_t dim : {32, 80, 96, 128, 256}) {
      RopeShape shape = mixed;
      shape.head_dim = dim;
      shape.norms = dim % 64 == 0;
      shape.bias = dim == 80;
      RunRope(type, type, shape, std::string(Name(type)) + " dim " + std::to_string(dim));
    }
  }
  // The 8B shape: more heads than one block has groups for in f32.
  RunRope(NumberType::kF32, NumberType::kF32, {32, 8, 128, 16, false, false, {100, 5}, {3, 2}}, "f32 8B");
  RunRope(NumberType::kBf16, NumberType::kE4m3, {32, 8, 128, 16, false, false, {100, 5}, {3, 2}}, "bf16 8B, e4m3");
  // Multi-query attention, blocks of one token.
  RunRope(NumberType::kBf16, NumberType::kBf16, {3, 1, 32, 1, false, true, {7}, {4}}, "bf16 one KV head");
}

// Angles of thousands of turns: the product is rounded to f32 as in the CPU backend, and the sine is of that.
KVTIER_CHECK(rope_far) {
  for (const int32_t position : {4095, 32767, 65535, 131070, 1'000'000}) {
    RunRope(NumberType::kF32, NumberType::kF32, {2, 1, 128, 16, false, false, {position}, {2}}, "f32 at " + std::to_string(position));
  }
}

}  // namespace
}  // namespace kvtier::cuda::check
