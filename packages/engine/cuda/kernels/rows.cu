// Row kernels of a Llama layer: embedding, norms with the residual folded in, gated activation, gathering. All are limited by
// memory: every tensor is read once in 16-byte accesses and stays in registers between the sum and the scaling; sums are f32.
// Idea of the fused residual and norm: one pass over both tensors instead of two kernels with three.
#include "kernels.h"
#include "vector.cuh"

namespace kvtier::cuda {
namespace {

constexpr unsigned kMaxRowThreads = 1024;
constexpr int kMostPacks = 4;  // per thread, in registers

enum class NormKind { kPlain, kAddThenNorm, kNormThenAdd };

struct NormArgs {
  void* target;    // kPlain, kAddThenNorm: where the norm goes
  void* residual;  // kAddThenNorm, kNormThenAdd: read and written
  const void* source;
  const void* bias;
  const void* weight;
  int32_t columns;
  float eps;
};

// One row per block; each thread holds kPacks packs, blockDim.x packs apart.
template <class T, NormKind kKind, int kPacks>
__global__ void __launch_bounds__(kMaxRowThreads) NormKernel(NormArgs a) {
  constexpr int kCount = kPack<T>;
  __shared__ float partial[32];
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.columns;
  const T* source = static_cast<const T*>(a.source) + row;
  const T* bias = static_cast<const T*>(a.bias);
  const T* weight = static_cast<const T*>(a.weight);
  T* residual = static_cast<T*>(a.residual) + row;
  const auto column = [&](int pack) {
    return static_cast<int32_t>((static_cast<unsigned>(pack) * blockDim.x + threadIdx.x) * static_cast<unsigned>(kCount));
  };

  // The residual, packed, for registers; where these do not suffice it is read when it is added.
  constexpr bool kHoldsResidual = kKind != NormKind::kPlain && kPacks < kMostPacks;
  Pack<T> x[kPacks];
  uint4 old[kPacks];
  const auto read_residual = [&](int pack) { return gpu::LoadWide(residual + column(pack)); };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column(p) >= a.columns) continue;
    x[p] = LoadPack(source + column(p));
    if constexpr (kHoldsResidual) old[p] = read_residual(p);
  }
  float sum = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column(p) >= a.columns) continue;
    if constexpr (kKind != NormKind::kPlain) {
      if (bias != nullptr) {
        const Pack<T> b = LoadPack(bias + column(p));
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[p].v[i] += b.v[i];
      }
    }
    if constexpr (kKind == NormKind::kAddThenNorm) {
      const Pack<T> before = Unpack<T>(kHoldsResidual ? old[p] : read_residual(p));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[p].v[i] += before.v[i];
      const uint4 rounded = RoundPack<T>(x[p]);
      gpu::StoreWide(residual + column(p), rounded);
      x[p] = Unpack<T>(rounded);  // the norm is of what is stored
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += x[p].v[i] * x[p].v[i];
  }
  const float scale = rsqrtf(BlockSum(sum, partial) / static_cast<float>(a.columns) + a.eps);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column(p) >= a.columns) continue;
    const Pack<T> w = LoadPack(weight + column(p));
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[p].v[i] = x[p].v[i] * scale * w.v[i];
    if constexpr (kKind == NormKind::kNormThenAdd) {
      const Pack<T> before = Unpack<T>(kHoldsResidual ? old[p] : read_residual(p));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[p].v[i] += before.v[i];
    }
    T* target = kKind == NormKind::kNormThenAdd ? residual : static_cast<T*>(a.target) + row;
    StorePack(target + column(p), x[p]);
  }
}

// target[row] = source[index[row]] * scale
template <class T>
__global__ void GatherKernel(T* target, const T* source, const int32_t* index, int32_t columns, float scale) {
  gpu::LetNextStart();
  const T* from = source + static_cast<int64_t>(index[blockIdx.x]) * columns;
  T* to = target + static_cast<int64_t>(blockIdx.x) * columns;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) * kPack<T>; i < columns; i += static_cast<int32_t>(blockDim.x) * kPack<T>) {
    Pack<T> x = LoadPack(from + i);
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) x.v[j] *= scale;
    StorePack(to + i, x);
  }
}

// x / (1 + e^-y): SiLU for y = x; the tanh form of GELU for y = 2 sqrt(2/pi) (x + 0.044715 x^3), as 0.5 (1 + tanh u) is the
// logistic function of 2u.
template <bool kGelu>
__device__ __forceinline__ float Activate(float x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216f;
  const float y = kGelu ? kTwoSqrt2OverPi * (x + 0.044715f * x * x * x) : x;
  return __fdividef(x, 1.0f + __expf(-y));
}

// One pack per thread; rows in y.
template <class T, bool kGelu>
__global__ void GatedActivationKernel(T* target, const T* gate_up, int64_t rows, int32_t columns) {
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int32_t column = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x) * kPack<T>;
  if (column >= columns) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* gate = gate_up + row * 2 * columns + column;
    Pack<T> g = LoadPack(gate);
    const Pack<T> up = LoadPack(gate + columns);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) g.v[i] = Activate<kGelu>(g.v[i]) * up.v[i];
    StorePack(target + row * columns + column, g);
  }
}

// Packs of a row; refuses what cannot be read in packs.
template <class T>
int64_t Packs(const char* what, int64_t columns) {
  if (columns <= 0 || columns % kPack<T> != 0) {
    throw std::invalid_argument(std::string(what) + ": rows of " + std::to_string(columns) + " numbers; a multiple of " +
                                std::to_string(kPack<T>) + " is needed");
  }
  return columns / kPack<T>;
}

unsigned RoundUp32(int64_t count) { return static_cast<unsigned>((count + 31) / 32 * 32); }

template <NormKind kKind>
void Norm(Stream& stream, const char* name, NumberType type, int64_t rows, const NormArgs& args) {
  if (rows == 0) return;
  WithFloatType(type, name, [&](auto zero) {
    using T = decltype(zero);
    const int64_t packs = Packs<T>(name, args.columns);
    if (packs > kMostPacks * int64_t{kMaxRowThreads}) {
      throw std::invalid_argument(std::string(name) + ": rows of " + std::to_string(args.columns) + " numbers are too long");
    }
    const gpu::Dim grid{static_cast<unsigned>(rows)};
    // Two loads in flight per thread and tensor hide more latency than twice the threads.
    if (packs <= 2 * int64_t{kMaxRowThreads}) {
      gpu::LaunchDependent(stream, name, NormKernel<T, kKind, 2>, grid, {RoundUp32((packs + 1) / 2)}, 0, args);
    } else {
      gpu::LaunchDependent(stream, name, NormKernel<T, kKind, kMostPacks>, grid, {kMaxRowThreads}, 0, args);
    }
  });
}

void Gather(Stream& stream, const char* name, NumberType type, void* target, const void* source, const int32_t* index, int64_t rows,
            int64_t columns, float scale) {
  if (rows == 0) return;
  WithFloatType(type, name, [&](auto zero) {
    using T = decltype(zero);
    const unsigned threads = std::min(256u, RoundUp32(Packs<T>(name, columns)));
    gpu::Launch(stream, name, GatherKernel<T>, {static_cast<unsigned>(rows)}, {threads}, 0, static_cast<T*>(target),
                static_cast<const T*>(source), index, static_cast<int32_t>(columns), scale);
  });
}

}  // namespace

void Embed(Stream& stream, NumberType type, void* hidden, const void* embedding, const int32_t* token_ids, int64_t rows,
           int64_t columns, float scale) {
  Gather(stream, "Embed", type, hidden, embedding, token_ids, rows, columns, scale);
}

void GatherRows(Stream& stream, NumberType type, void* target, const void* source, const int32_t* rows_index, int64_t rows,
                int64_t columns) {
  Gather(stream, "GatherRows", type, target, source, rows_index, rows, columns, 1.0f);
}

void RmsNorm(Stream& stream, NumberType type, void* target, const void* source, const void* weight, int64_t rows, int64_t columns,
             float eps) {
  Norm<NormKind::kPlain>(stream, "RmsNorm", type, rows,
                         {target, nullptr, source, nullptr, weight, static_cast<int32_t>(columns), eps});
}

void AddRmsNorm(Stream& stream, NumberType type, void* target, void* residual, const void* added, const void* bias,
                const void* weight, int64_t rows, int64_t columns, float eps) {
  Norm<NormKind::kAddThenNorm>(stream, "AddRmsNorm", type, rows,
                               {target, residual, added, bias, weight, static_cast<int32_t>(columns), eps});
}

void NormAdd(Stream& stream, NumberType type, void* residual, const void* added, const void* bias, const void* weight, int64_t rows,
             int64_t columns, float eps) {
  Norm<NormKind::kNormThenAdd>(stream, "NormAdd", type, rows,
                               {nullptr, residual, added, bias, weight, static_cast<int32_t>(columns), eps});
}

void GatedActivation(Stream& stream, NumberType type, void* target, const void* gate_up, int64_t rows, int64_t columns, bool gelu) {
  if (rows == 0) return;
  WithFloatType(type, "GatedActivation", [&](auto zero) {
    using T = decltype(zero);
    const int64_t packs = Packs<T>("GatedActivation", columns);
    const unsigned threads = std::min(256u, RoundUp32(packs));
    const gpu::Dim grid{static_cast<unsigned>((packs + threads - 1) / threads), static_cast<unsigned>(std::min<int64_t>(rows, 65535))};
    const auto kernel = gelu ? GatedActivationKernel<T, true> : GatedActivationKernel<T, false>;
    gpu::LaunchDependent(stream, "GatedActivation", kernel, grid, {threads}, 0, static_cast<T*>(target), static_cast<const T*>(gate_up),
                         rows, static_cast<int32_t>(columns));
  });
}

}  // namespace kvtier::cuda
