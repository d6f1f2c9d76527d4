// Attention: which kernels run, and v1, one warp per query and head for any type, which is the
// reference on the device and what f32 models use.
//
// v1: the lanes of a warp take 32 keys at a time, one each, and then 32 dims at a time for the values. FLOPs 4 x head_dim per
// key; each warp reads all K/V that its query sees, so it is bound by L2.
#include <stdexcept>
#include <string>

#include "attention.cuh"

namespace kvtier::cuda {

namespace {

constexpr int kV1Warps = 4, kV1MaxDim = 256;

template <class T, class Kv>
__global__ void __launch_bounds__(32 * kV1Warps) AttentionWarpKernel(AttentionArgs a, Batch b) {
  __shared__ float queries[kV1Warps][kV1MaxDim];
  __shared__ float probabilities[kV1Warps][2][32];  // by turns: who is behind still reads the others
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int32_t row = static_cast<int32_t>(blockIdx.x) * kV1Warps + warp, head = static_cast<int32_t>(blockIdx.y);
  if (row >= b.rows) return;
  const SequenceView view(a, b, b.row_sequence[row]);
  const int32_t head_dim = a.kv.head_dim, position = view.computed + row - view.row;
  const int32_t first = view.window == 0 ? 0 : max(0, position - view.window + 1), end = position + 1;
  const uint8_t* const pool = static_cast<const uint8_t*>(a.kv.pool);
  const auto row_of = [&](int32_t kv, int32_t key) {
    const int64_t block = view.table[key / a.kv.block_tokens];
    return reinterpret_cast<const Kv*>(pool + block * a.kv.block_bytes + a.kv.layer_offset +
                                       a.kv.Row(kv, head / view.group, key % a.kv.block_tokens));
  };

  float* const q = queries[warp];
  const T* const source = static_cast<const T*>(a.q) + row * a.q_stride + head * head_dim;
  for (int i = Lane(); i < head_dim; i += 32) q[i] = ToFloat(source[i]) * a.scale;
  __syncwarp();
  float out[kV1MaxDim / 32] = {}, max = kNoScore, sum = 0;
  for (int32_t base = first; base < end; base += 32) {
    float score = kNoScore;
    if (base + Lane() < end) {
      const Kv* const key = row_of(0, base + Lane());
      float dot = 0;
      for (int i = 0; i < head_dim; ++i) dot += q[i] * ToFloat(key[i]);
      score = a.soft_cap > 0 ? a.soft_cap * tanhf(dot / a.soft_cap) : dot;
    }
    const float top = fmaxf(max, gpu::WarpMax(score));
    const float shrink = expf(max - top), probability = expf(score - top);
    max = top;
    sum = sum * shrink + probability;
    float* const p = probabilities[warp][((base - first) / 32) & 1];
    p[Lane()] = probability;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kV1MaxDim / 32; ++j) out[j] *= shrink;
    for (int32_t i = 0; i < min(32, end - base); ++i) {
      const Kv* const value = row_of(1, base + i);
#pragma unroll
      for (int j = 0; j < kV1MaxDim / 32; ++j) {
        if (Lane() + 32 * j < head_dim) out[j] += p[i] * ToFloat(value[Lane() + 32 * j]);
      }
    }
  }
  const float inverse = 1 / gpu::WarpSum(sum);
  T* const target = static_cast<T*>(a.out) + static_cast<int64_t>(row) * a.heads * head_dim + head * head_dim;
#pragma unroll
  for (int j = 0; j < kV1MaxDim / 32; ++j) {
    if (Lane() + 32 * j < head_dim) target[Lane() + 32 * j] = FromFloat<T>(out[j] * inverse);
  }
}

template <class T>
void LaunchWarps(Stream& stream, const AttentionArgs& a, const Batch& b) {
  const gpu::Dim grid{static_cast<unsigned>((b.rows + kV1Warps - 1) / kV1Warps), static_cast<unsigned>(a.heads)};
  if (a.kv.type == NumberType::kE4m3) {
    gpu::Launch(stream, "attention v1", AttentionWarpKernel<T, e4m3>, grid, {32 * kV1Warps}, 0, a, b);
  } else {
    gpu::Launch(stream, "attention v1", AttentionWarpKernel<T, T>, grid, {32 * kV1Warps}, 0, a, b);
  }
}

[[noreturn]] void Refuse(const std::string& what, const std::string& mend) {
  throw std::invalid_argument("GPU: attention: " + what + "; " + mend);
}

}  // namespace

void CheckAttention(NumberType type, const AttentionArgs& a, const Batch& b) {
  const PagedKv& kv = a.kv;
  const int32_t d = kv.head_dim;
  if (d != 16 && d != 32 && d != 64 && d != 80 && d != 96 && d != 128 && d != 256) {
    Refuse("head_dim " + std::to_string(d), "known are 16, 32, 64, 80, 96, 128 and 256");
  }
  if (kv.block_tokens < 8 || kv.block_tokens % 8 != 0) {
    Refuse("blocks of " + std::to_string(kv.block_tokens) + " tokens", "take a multiple of 8");
  }
  if (kv.kv_heads < 1 || a.heads % kv.kv_heads != 0) {
    Refuse(std::to_string(a.heads) + " heads over " + std::to_string(kv.kv_heads) + " KV heads", "one must divide the other");
  }
  if (kv.type != type && kv.type != NumberType::kE4m3) {
    Refuse("KV of another type than the queries", "store it in the same type or as e4m3");
  }
  if (!(a.scale > 0) || a.window < 0 || a.soft_cap < 0) Refuse("scale, window or soft cap below 0", "give a positive scale");
  if (a.q_stride % 8 != 0 || kv.block_bytes % 128 != 0 || kv.layer_offset % 128 != 0) {
    Refuse("q_stride, blocks or layers that are not aligned", "align them to 8 elements, 128 bytes, 128 bytes");
  }
  if (b.sequences < 1 || b.rows < b.sequences || b.sequences > 65535) {
    Refuse("a batch of " + std::to_string(b.sequences) + " sequences", "take 1 to 65535, each with a query");
  }
}

void AttentionWarp(Stream& stream, NumberType type, const AttentionArgs& a, const Batch& b) {
  if (type == NumberType::kF32) {
    LaunchWarps<float>(stream, a, b);
  } else if (type == NumberType::kF16) {
    LaunchWarps<f16>(stream, a, b);
  } else {
    LaunchWarps<bf16>(stream, a, b);
  }
}

int64_t AttentionWorkspaceBytes(int64_t workspace_rows, int64_t head_dim) {
  return PartsWorkspace::Bytes(workspace_rows, head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 256);
}

void Attention(Stream& stream, NumberType type, const AttentionArgs& a, const Batch& b, int version) {
  CheckAttention(type, a, b);
  if (type == NumberType::kF32 || version == 1) {
    AttentionWarp(stream, type, a, b);
    return;
  }
  if (a.work == nullptr || a.workspace == nullptr) Refuse("no plan or no workspace", "make them with PlanAttention and AttentionWorkspaceBytes");
  static const int32_t few_blocks = kFewBlocksEach * gpu::Info().multiprocessors;  // one process, one device
  const AttentionWork& work = *a.work;
  const auto units = [&](int32_t at, int32_t count) { return AttentionUnits{work.items + at, nullptr, count, work.workspace_rows}; };
  const auto run = [&]<class T>(T) {
    if (work.few_count != nullptr) {
      AttentionFew<T>(stream, a, b, {work.items, work.few_count, 0, work.workspace_rows}, few_blocks);
      return;
    }
    for (const AttentionRound& round : work.plan->rounds) {
      if (round.tiles > 0) AttentionTiles<T>(stream, a, b, units(round.tiles_at, round.tiles));
      if (round.few > 0) AttentionFew<T>(stream, a, b, units(round.few_at, round.few), few_blocks);
      if (round.merges > 0) AttentionMerge<T>(stream, a, b, units(round.merges_at, round.merges));
    }
  };
  if (type == NumberType::kF16) {
    run(f16{});
  } else {
    run(bf16{});
  }
}

}  // namespace kvtier::cuda
