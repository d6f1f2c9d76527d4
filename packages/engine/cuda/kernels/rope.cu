// Between the qkv product and attention: bias, q/k norm, rotation, and keys and values into the paged pool, in one kernel that
// reads qkv once. One block per row; a head is held by a group of lanes, each with one pack of the first half of the dimensions
// and the pack half a head further on, which Hugging Face's rotation pairs with it. Angles are computed once per row.
#include <bit>

#include "kernels.h"
#include "vector.cuh"

namespace kvtier::cuda {
namespace {

constexpr int32_t kMaxHalf = 256;  // of a head's dimensions
constexpr unsigned kMaxRopeThreads = 512;

// One pack of a head at its place in the pool.
template <class T, class Kv>
__device__ __forceinline__ void StoreKv(Kv* address, const Pack<T>& pack) {
  if constexpr (sizeof(Kv) == sizeof(T)) {  // T is Kv, or both are 16 bits wide
    StorePack<Kv>(address, reinterpret_cast<const Pack<Kv>&>(pack));
  } else {
    constexpr int kWords = kPack<T> * static_cast<int>(sizeof(Kv)) / 4;
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Kv));
    auto* words = reinterpret_cast<uint32_t*>(address);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t word = 0;
      if constexpr (sizeof(Kv) == 4) {
        word = FloatToBits(pack.v[w]);
      } else if constexpr (sizeof(Kv) == 2) {
        word = gpu::PackFloats<Kv>(pack.v[2 * w], pack.v[2 * w + 1]);
      } else {
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          word |= static_cast<uint32_t>(FromFloat<Kv>(pack.v[kPerWord * w + i]).bits) << (8 * i);
        }
      }
      words[w] = word;
    }
  }
}

// group: lanes per head, a power of two; lanes beyond the head's packs only take part in shuffles.
template <class T, class Kv>
__global__ void __launch_bounds__(kMaxRopeThreads) RopeAndStoreKernel(RopeArgs a, Batch batch, int32_t group) {
  constexpr int kCount = kPack<T>;
  __shared__ float cosine[kMaxHalf], sine[kMaxHalf];
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t dim = a.kv.head_dim, half = dim / 2, heads = a.heads + 2 * a.kv.kv_heads;
  T* const qkv = static_cast<T*>(a.qkv) + static_cast<int64_t>(row) * heads * dim;
  const int32_t at = thread % group * kCount;  // of this lane's first pack, from the head's start
  const int32_t stride = static_cast<int32_t>(blockDim.x) / group;  // heads per turn

  int32_t head = thread / group;
  Pack<T> x1{}, x2{};
  const auto load = [&] {
    if (head >= heads || at >= half) return;
    x1 = LoadPack(qkv + head * dim + at);
    x2 = LoadPack(qkv + head * dim + at + half);
  };
  load();  // in flight while the angles are computed

  const int32_t sequence = batch.row_sequence[row];
  const int32_t position = batch.computed[sequence] + row - batch.query_start[sequence];
  const int64_t block = a.table[sequence * batch.table_stride + position / a.kv.block_tokens];
  for (int32_t i = thread; i < half; i += static_cast<int32_t>(blockDim.x)) {
    float s, c;
    sincosf(static_cast<float>(position) * a.freqs[i], &s, &c);
    cosine[i] = c * a.scale;
    sine[i] = s * a.scale;
  }
  __syncthreads();

  uint8_t* const layer = static_cast<uint8_t*>(a.kv.pool) + block * a.kv.block_bytes + a.kv.layer_offset;
  const bool normed = a.q_norm != nullptr || a.k_norm != nullptr;
  // As many turns in every thread: shuffles need all lanes.
  for (int32_t first = 0; first < heads; first += stride, head += stride, load()) {
    const bool active = head < heads && at < half;
    T* const from = qkv + head * dim + at;
    if (active && a.bias != nullptr) {
      const T* bias = static_cast<const T*>(a.bias) + head * dim + at;
      const Pack<T> b1 = LoadPack(bias), b2 = LoadPack(bias + half);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x1.v[i] += b1.v[i];
        x2.v[i] += b2.v[i];
      }
    }
    if (normed) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum += x1.v[i] * x1.v[i] + x2.v[i] * x2.v[i];
      for (int32_t offset = group / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(gpu::kAllLanes, sum, offset);
      const T* weight = static_cast<const T*>(head < a.heads ? a.q_norm : head < a.heads + a.kv.kv_heads ? a.k_norm : nullptr);
      if (active && weight != nullptr) {
        const float scale = rsqrtf(sum / static_cast<float>(dim) + a.eps);
        const Pack<T> w1 = LoadPack(weight + at), w2 = LoadPack(weight + at + half);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          x1.v[i] *= scale * w1.v[i];
          x2.v[i] *= scale * w2.v[i];
        }
      }
    }
    if (!active) continue;
    if (head < a.heads + a.kv.kv_heads) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float c = cosine[at + i], s = sine[at + i], left = x1.v[i], right = x2.v[i];
        x1.v[i] = left * c - right * s;
        x2.v[i] = right * c + left * s;
      }
    }
    if (head < a.heads) {
      StorePack(from, x1);
      StorePack(from + half, x2);
    } else {
      const int32_t kv = head < a.heads + a.kv.kv_heads ? 0 : 1, kv_head = (head - a.heads) % a.kv.kv_heads;
      Kv* to = reinterpret_cast<Kv*>(layer + a.kv.Row(kv, kv_head, position % a.kv.block_tokens)) + at;
      StoreKv<T, Kv>(to, x1);
      StoreKv<T, Kv>(to + half, x2);
    }
  }
}

// fn(Kv{}) with the pool's type: any.
template <class Fn>
void WithKvType(NumberType type, const Fn& fn) {
  if (type == NumberType::kE4m3) return fn(e4m3{});
  WithFloatType(type, "RopeAndStore", fn);
}

}  // namespace

void RopeAndStore(Stream& stream, NumberType type, const RopeArgs& args, const Batch& batch) {
  if (batch.rows == 0) return;
  WithFloatType(type, "RopeAndStore", [&](auto zero) {
    using T = decltype(zero);
    const int32_t half = args.kv.head_dim / 2, packs = half / kPack<T>;
    if (args.kv.head_dim % (2 * kPack<T>) != 0 || half > kMaxHalf || packs > 32) {
      throw std::invalid_argument("RopeAndStore: heads of " + std::to_string(args.kv.head_dim) + " dimensions; a multiple of " +
                                  std::to_string(2 * kPack<T>) + " up to 512 (f32: 256) is needed");
    }
    const auto group = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(packs)));
    const auto lanes = static_cast<unsigned>((args.heads + 2 * args.kv.kv_heads) * group);
    const unsigned threads = std::min(kMaxRopeThreads, (lanes + 31) / 32 * 32);
    WithKvType(args.kv.type, [&](auto kv_zero) {
      gpu::LaunchDependent(stream, "RopeAndStore", RopeAndStoreKernel<T, decltype(kv_zero)>, {static_cast<unsigned>(batch.rows)}, {threads},
                           0, args, batch, group);
    });
  });
}

}  // namespace kvtier::cuda
