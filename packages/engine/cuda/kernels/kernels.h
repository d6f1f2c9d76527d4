// All kernels of the CUDA backend: what each computes, on which shapes, and what it moves. Functions enqueue on a stream and
// return; pointers are device memory unless said otherwise. Types are given at run time, as the model's files decide them:
// activations and weights share one type (f32, f16 or bf16), KV may be e4m3 beside it. Each kernel has a reference in
// kernels/reference.h that computes the same in f32 on the CPU, and cases in checks/ that compare the two.
//
// Rows are tokens of a mixed batch, prefill chunks and decodes one after another.
#pragma once
#include <cstdint>
#include <span>

#include "../gpu/gpu.h"

namespace kvtier::cuda {

using gpu::Stream;
struct AttentionWork;

// One attention group's view of the paged KV pool, for one layer. A block is contiguous: [layer][K,V][kv head][token][dim].
struct PagedKv {
  void* pool;
  int64_t block_bytes;
  int64_t layer_offset;  // bytes from a block's start to this layer's keys; its values follow after all heads' keys
  int32_t blocks, block_tokens, kv_heads, head_dim;
  NumberType type;
  // Bytes from a block's layer_offset to the row of one token of one head; kv: 0 keys, 1 values.
  KVTIER_HD int64_t Row(int32_t kv, int32_t head, int32_t token) const {
    return ((static_cast<int64_t>(kv) * kv_heads + head) * block_tokens + token) * head_dim * NumberBytes(type);
  }
};

// Device arrays that describe a step; written once per step, read by all layers.
struct Batch {
  int32_t sequences, rows;
  const int32_t* query_start;  // [sequences + 1] first row of each
  const int32_t* computed;     // [sequences] tokens before the first query
  const int32_t* row_sequence; // [rows]
  const int32_t* tables;       // [groups][sequences][table_stride] block ids
  int64_t table_stride;        // ids per sequence
  const int32_t* group_table(int64_t group) const { return tables + group * sequences * table_stride; }
};

// -- a step's arrays (upload.cu) -------------------------------------------------------------------------------------------

// Rows of `row_bytes` (whole words of 4), one after another as the GPU sees them in pinned host memory, to rows at a distance of `target_stride`
// on the device.
struct HostArray {
  void* target;
  const void* source;
  int64_t target_stride, row_bytes, rows;
};
// Without a copy engine: what holds these up (imports, exports) does not hold up a step.
void Upload(Stream&, std::span<const HostArray> arrays);

// -- rows (rows.cu) -------------------------------------------------------------------------------------------------

// hidden[row] = embedding[token_ids[row]] * scale.   Moves rows x hidden, twice.
void Embed(Stream&, NumberType, void* hidden, const void* embedding, const int32_t* token_ids, int64_t rows, int64_t columns, float scale);
// target[row] = source[row] / rms(source[row]) * weight; weight already holds the family's offset. In place is allowed.
void RmsNorm(Stream&, NumberType, void* target, const void* source, const void* weight, int64_t rows, int64_t columns, float eps);
// residual[row] += added[row] (+ bias); target[row] = norm of the new residual. bias may be null. One pass over memory.
void AddRmsNorm(Stream&, NumberType, void* target, void* residual, const void* added, const void* bias, const void* weight,
                int64_t rows, int64_t columns, float eps);
// residual[row] += norm(added[row] (+ bias)): what Gemma 3 does after attention and feed-forward.
void NormAdd(Stream&, NumberType, void* residual, const void* added, const void* bias, const void* weight, int64_t rows,
             int64_t columns, float eps);
// gate_up: [rows][2 columns]; target[row][i] = act(gate) * up, act = SiLU or tanh-approximated GELU.
void GatedActivation(Stream&, NumberType, void* target, const void* gate_up, int64_t rows, int64_t columns, bool gelu);
// target[i] = source[rows_index[i]]: the rows that are sampled.
void GatherRows(Stream&, NumberType, void* target, const void* source, const int32_t* rows_index, int64_t rows, int64_t columns);

// -- attention inputs (rope.cu) ---------------------------------------------------------------------------------------

struct RopeArgs {
  void* qkv;          // [rows][(heads + 2 kv_heads) x head_dim]; q is rotated in place
  const void* bias;   // of qkv, or null
  const void* q_norm; // [head_dim] or null
  const void* k_norm;
  float eps;
  const float* freqs;  // [head_dim / 2] radians per position: all kinds of scaling are in them (packages/engine/model/src/rope.ts)
  float scale;         // multiplies cos and sin
  int32_t heads;
  PagedKv kv;
  const int32_t* table;  // of this layer's attention group
};
// Bias, q/k norm and rotation (Hugging Face's half split) of each row; its key and value go to their place in the pool.
// One kernel: qkv is read once. The angle is position x freq rounded to f32, as on the CPU; equal to it within 1e-5 at all
// positions. head_dim: a multiple of 16 (f32: 8), up to 512 (f32: 256).
void RopeAndStore(Stream&, NumberType, const RopeArgs&, const Batch&);

// -- attention (attention.cu, attention_tiles.cuh, attention_few.cuh, attention_merge.cu) ------------------------------------------

struct AttentionArgs {
  const void* q;     // [rows][q_stride], heads x head_dim first
  void* out;         // [rows][heads x head_dim]
  int64_t q_stride;  // elements
  int32_t heads;
  float scale;
  int32_t window;    // a query at p sees keys > p - window; 0 = all
  float soft_cap;    // scores are cap * tanh(s / cap); 0 = off
  PagedKv kv;
  const int32_t* table;  // of this layer's attention group; 0 (the null block) only where the window has moved on
  void* workspace;       // AttentionWorkspaceBytes, zeroed once; v1: null
  const AttentionWork* work;  // of this layer's window (attention_plan.h), read before the call returns; v1: null
};
// Scratch of the parts of keys, and of the atomics that count them, for plans of that many rows (AttentionWorkspaceRows).
int64_t AttentionWorkspaceBytes(int64_t workspace_rows, int64_t head_dim);
// Shared memory of a thread block that each GPU of compute capability 8.0 and newer grants, and what heads of more than 128 take.
constexpr size_t kLeastSharedBytes = 99 << 10, kWideHeadsSharedBytes = 128 << 10;
// Any batch. head_dim 16, 32, 64, 80, 96, 128, 256. v1: one warp per query, any type, the reference on the device; v2: tensor
// cores (f16, bf16; KV of the same type or e4m3), tiles of queries of all heads that share a KV head, against parts of their keys,
// as the plan says: equal bits in any company. `version` 0: the best. A plan for captured launches depends on bounds only.
void Attention(Stream&, NumberType, const AttentionArgs&, const Batch&, int version = 0);

// -- sampling (sampling.cu) -------------------------------------------------------------------------------------------

struct SamplingArgs {
  const float* temperature;  // [rows]; 0: greedy, the lowest id among equals
  const int32_t* top_k;      // 0: off
  const float* top_p;        // 1: off
  const uint64_t* seed;
};
// logits: [rows][vocab] f32, soft-capped in place when soft_cap > 0. token_ids[row]: -1 when they are not finite numbers.
// Draws as packages/engine/executor/cc/sampling.cc does: the same settings, seed and logits give the same token. workspace:
// SamplingWorkspaceBytes.
int64_t SamplingWorkspaceBytes(int64_t rows, int64_t vocab);
void Sample(Stream&, float* logits, int64_t rows, int64_t vocab, float soft_cap, const SamplingArgs&, int32_t* token_ids, void* workspace);

// -- matrix products (../gemm/gemm.h: cuBLASLt or these; gemm_tensor.cu) --------------------------------------------------

// target[rows, outputs] = source[rows, inputs] x weight[outputs, inputs]^T (+ target when accumulate). Row-major; target f32
// when target_f32 (logits), else the same type. v1: plain tiles, any type; v2: tensor cores, pipelined (f16, bf16); v3: the same, and 9 to
// 64 rows are shared by more outputs; up to 64 rows, v2 and v3 give the same bits. `version` 0: the best.
struct GemmArgs {
  void* target;
  const void* source;
  const void* weight;
  int64_t rows, outputs, inputs;
  int64_t target_stride, source_stride;  // elements
  bool accumulate, target_f32;
};
void GemmOurs(Stream&, NumberType, const GemmArgs&, int version = 0);

// -- random numbers (fill.cu) -------------------------------------------------------------------------------------------

// target[i] = uniform in [-1, 1) of (seed, i) * scale + offset; f32, f16 or bf16.
void FillRandom(Stream&, NumberType, void* target, int64_t count, uint64_t seed, float scale, float offset);

// -- blocks (block_copy.cu, xxh3.cu, xxh3_apart.cu) ---------------------------------------------------------------------

// Pieces of a KV pool <-> pieces of mapped host memory or staging, by a kernel: for pieces too small for the copy engine.
// pool_offsets and host_offsets: device arrays, bytes, multiples of 16; each piece `bytes`. To host: streaming stores.
void GatherPieces(Stream&, uint8_t* host, const uint8_t* pool, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t pieces, int64_t bytes, int multiprocessors);
void ScatterPieces(Stream&, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets, const int64_t* host_offsets,
                   int64_t pieces, int64_t bytes, int multiprocessors);
// XXH3-64 (seed 0) of each block of the pool as it lies in GPU memory, one thread block each, at most `grid` at a time: what
// arrived is what is hashed. bytes > 240 and a multiple of 16.
void HashBlocks(Stream&, uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes, int grid = 16);
// The same of large blocks, by all of the GPU for a few microseconds, whose sums of each KiB one warp a block then chains. A thread block that
// stays keeps a multiprocessor from the model's kernels, which costs them more than its bytes. rows: HashRowsBytes of device memory.
int64_t HashRowsBytes(int64_t blocks, int64_t bytes);
void HashBlocksApart(Stream&, uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes, uint64_t* rows,
                     int multiprocessors);
// Whole blocks between pool and mapped host memory, hashed as they pass: each byte is read once. A pool block by one thread block, at most
// `grid` at a time, each with 32 KiB in flight.
void ExportBlocks(Stream&, uint64_t* sums, uint8_t* host, const uint8_t* pool, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t blocks, int64_t bytes, int grid);
void ImportBlocks(Stream&, uint64_t* sums, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets, const int64_t* host_offsets,
                  int64_t blocks, int64_t bytes, int grid);

}  // namespace kvtier::cuda
