// One token per row of logits, the same that cc/sampling.cc draws: weights e^((l - best) / temperature) by the same polynomial,
// then whole-number masses, whose sums are exact in any order. The tokens that top-k and top-p leave are those above a cut in the
// order (weight down, id up); the cut is found by radix selection on the weights' bits, 10 to 12 at a time, without a sort.
//
//   SampleScan    a block per tile of a row: soft cap, arg max, are all finite
//   SampleWeigh   a block per tile: weights, and their mass per tile; nothing for rows that are greedy
//   SampleDraw    a block per row: the cut, the draw
#include "kernels.h"
#include "vector.cuh"

namespace kvtier::cuda {
namespace {

using u64 = unsigned long long;

constexpr int32_t kTile = 4096;
constexpr unsigned kTileThreads = 256, kDrawThreads = 1024;
constexpr int32_t kMaxTiles = 1024;  // of a row
constexpr int kBins = 1024;
static_assert(kBins == kDrawThreads && kMaxTiles == kDrawThreads, "a thread per bin and per tile");

// The best logit of a tile or row, and whether all are finite.
struct Best {
  float value;
  int32_t id;
  int32_t finite;
};

struct Workspace {
  Best* best;      // [rows][tiles]
  u64* masses;     // [rows][tiles]
  float* weights;  // [rows][vocab]
};

__device__ __forceinline__ Best Better(const Best& a, const Best& b) {
  const bool second = b.value > a.value || (b.value == a.value && b.id < a.id);
  return {second ? b.value : a.value, second ? b.id : a.id, a.finite & b.finite};
}

// Of the block; every thread gets it.
__device__ __forceinline__ Best BlockBest(Best mine) {
  __shared__ Best shared[32];
  for (int offset = 16; offset > 0; offset /= 2) {
    mine = Better(mine, {__shfl_xor_sync(gpu::kAllLanes, mine.value, offset), __shfl_xor_sync(gpu::kAllLanes, mine.id, offset),
                         __shfl_xor_sync(gpu::kAllLanes, mine.finite, offset)});
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  Best best = shared[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) best = Better(best, shared[i]);
  return best;
}

constexpr Best kNothing{-INFINITY, 0x7fffffff, 1};

__device__ __forceinline__ Best BestOfRow(const Best* tiles, int32_t count) {
  Best mine = kNothing;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) mine = Better(mine, tiles[i]);
  return BlockBest(mine);
}

// Exp of cc/kernels.h, operation by operation as the host compiler contracts it: the same bits.
__device__ __forceinline__ float Exp(float x) {
  const float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float n = floorf(fmaf(clamped, 1.44269504f, 0.5f));
  const float r = fmaf(n, 2.12194440e-4f, fmaf(-n, 0.693359375f, clamped));
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p * r, r, r) + 1.0f;
  return x < -87.0f ? 0.0f : p * BitsToFloat(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

__device__ __forceinline__ u64 Mass(float weight) { return static_cast<u64>(llrintf(weight * 0x1p44f)); }

__device__ __forceinline__ bool Greedy(const SamplingArgs& a, int64_t row) { return !(a.temperature[row] > 0) || a.top_k[row] == 1; }

__global__ void SampleScan(float* logits, int32_t vocab, float soft_cap, Workspace workspace) {
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int64_t row = blockIdx.y;
  float* const values = logits + row * vocab;
  const auto start = static_cast<int32_t>(blockIdx.x) * kTile;
  Best mine = kNothing;
#pragma unroll 8
  for (int32_t i = start + static_cast<int32_t>(threadIdx.x); i < min(start + kTile, vocab); i += static_cast<int32_t>(kTileThreads)) {
    float value = values[i];
    if (soft_cap > 0) {
      value = soft_cap * (1.0f - 2.0f / (Exp(2.0f * (value / soft_cap)) + 1.0f));
      values[i] = value;
    }
    mine = Better(mine, {value, i, (FloatToBits(value) & 0x7f800000u) != 0x7f800000u});
  }
  const Best best = BlockBest(mine);
  if (threadIdx.x == 0) workspace.best[row * gridDim.x + blockIdx.x] = best;
}

__global__ void SampleWeigh(const float* logits, int32_t vocab, SamplingArgs a, Workspace workspace) {
  __shared__ u64 mass;
  gpu::LetNextStart();
  gpu::WaitForPrevious();
  const int64_t row = blockIdx.y;
  if (Greedy(a, row)) return;
  if (threadIdx.x == 0) mass = 0;
  const Best best = BestOfRow(workspace.best + row * gridDim.x, static_cast<int32_t>(gridDim.x));
  if (best.finite == 0) return;
  const float temperature = a.temperature[row];
  const auto start = static_cast<int32_t>(blockIdx.x) * kTile;
  u64 sum = 0;
#pragma unroll 8
  for (int32_t i = start + static_cast<int32_t>(threadIdx.x); i < min(start + kTile, vocab); i += static_cast<int32_t>(kTileThreads)) {
    const float weight = Exp((logits[row * vocab + i] - best.value) / temperature);
    workspace.weights[row * vocab + i] = weight;
    sum += Mass(weight);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(gpu::kAllLanes, sum, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(&mass, sum);
  __syncthreads();
  if (threadIdx.x == 0) workspace.masses[row * gridDim.x + blockIdx.x] = mass;
}

// Where a number falls when the threads' shares stand one after another; thread -1: behind all.
struct Place {
  int32_t thread;
  u64 before, other_before;  // the sums of both shares of the threads before it
  u64 value, other;          // that thread's own
};

struct Shared {
  u64 mass[kBins];  // per bin or per tile
  unsigned count[kBins];
  u64 totals[2][32];
  Place place;
  int32_t id;
};

// Sum of the values of the threads before this one; `totals`: 32 numbers of the block's own.
__device__ __forceinline__ u64 Exclusive(u64 value, u64* totals) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 inclusive = value;
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const u64 below = __shfl_up_sync(gpu::kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == 31) totals[warp] = inclusive;
  __syncthreads();
  u64 before = inclusive - value;
  for (unsigned i = 0; i < warp; ++i) before += totals[i];
  return before;
}

__device__ __forceinline__ Place Find(u64 value, u64 other, u64 target, Shared& s) {
  const u64 before = Exclusive(value, s.totals[0]), other_before = Exclusive(other, s.totals[1]);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x == kDrawThreads - 1 && before + value <= target) s.place = {-1, before + value, other_before + other, 0, 0};
  if (before <= target && target - before < value) s.place = {thread, before, other_before, value, other};
  __syncthreads();
  return s.place;  // the next one is written behind the barriers of the next sums
}

// fn(weight) for all of the row, loads ahead of use.
template <class Fn>
__device__ __forceinline__ void ForEach(const float* weights, int32_t vocab, const Fn& fn) {
  constexpr int kAhead = 8;
  for (int32_t base = 0; base < vocab; base += kAhead * static_cast<int32_t>(kDrawThreads)) {
    float ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int32_t i = base + j * static_cast<int32_t>(kDrawThreads) + static_cast<int32_t>(threadIdx.x);
      ahead[j] = i < vocab ? weights[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) fn(ahead[j]);
  }
}

// A weight, and what is heavier. bits 0: there are fewer than asked for, `above` is all.
struct Cut {
  uint32_t bits;
  u64 above_mass, above_count;
  u64 ties;
};

// The weight at which the count (or the mass) from the heaviest down reaches `needed`. Tokens without mass do not count.
__device__ Cut Select(const float* weights, int32_t vocab, bool by_mass, u64 needed, Shared& s) {
  Cut cut{0, 0, 0, 0};
  for (int shift = 20; shift >= 0; shift -= 10) {
    s.mass[threadIdx.x] = 0;
    s.count[threadIdx.x] = 0;
    __syncthreads();
    ForEach(weights, vocab, [&](float weight) {
      const uint32_t bits = FloatToBits(weight);
      const u64 mass = Mass(weight);
      if (mass == 0 || (shift < 20 && bits >> (shift + 10) != cut.bits)) return;
      atomicAdd(&s.mass[(bits >> shift) % kBins], mass);  // weights are at most 1: bits >> 20 is below kBins
      atomicAdd(&s.count[(bits >> shift) % kBins], 1u);
    });
    __syncthreads();
    const int bin = kBins - 1 - static_cast<int>(threadIdx.x);  // the heaviest first
    const u64 mass = s.mass[bin], count = s.count[bin];
    const u64 target = needed - 1 - (by_mass ? cut.above_mass : cut.above_count);
    const Place place = by_mass ? Find(mass, count, target, s) : Find(count, mass, target, s);
    cut.above_mass += by_mass ? place.before : place.other_before;
    cut.above_count += by_mass ? place.other_before : place.before;
    if (place.thread < 0) return {0, cut.above_mass, cut.above_count, 0};
    const int found = kBins - 1 - place.thread;
    cut.bits = cut.bits << 10 | static_cast<uint32_t>(found);
    cut.ties = by_mass ? place.other : place.value;
  }
  return cut;
}

// The id at which the sum of share(weight, id), in the order of ids, passes `target`. tile_sums: the shares of whole tiles, or null.
template <class Share>
__device__ int32_t FindId(const float* weights, int32_t vocab, const u64* tile_sums, u64 target, Shared& s, const Share& share) {
  const int32_t tiles = (vocab + kTile - 1) / kTile, thread = static_cast<int32_t>(threadIdx.x);
  s.mass[thread] = tile_sums != nullptr && thread < tiles ? tile_sums[thread] : 0;
  __syncthreads();
  for (int32_t tile = 0; tile < tiles && tile_sums == nullptr; ++tile) {
    u64 sum = 0;
#pragma unroll
    for (int32_t j = 0; j < kTile / static_cast<int32_t>(kDrawThreads); ++j) {
      const int32_t i = tile * kTile + j * static_cast<int32_t>(kDrawThreads) + thread;
      if (i < vocab) sum += share(weights[i], i);
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(gpu::kAllLanes, sum, offset);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&s.mass[tile], sum);
  }
  __syncthreads();
  const Place tile = Find(s.mass[thread], 0, target, s);
  constexpr int32_t kEach = kTile / static_cast<int32_t>(kDrawThreads);
  const int32_t first = tile.thread * kTile + thread * kEach;
  u64 mine = 0;
  for (int32_t i = first; i < min(first + kEach, vocab); ++i) mine += share(weights[i], i);
  const Place place = Find(mine, 0, target - tile.before, s);
  if (thread == place.thread) {
    u64 before = tile.before + place.before;
    int32_t i = first;
    for (u64 one; before + (one = share(weights[i], i)) <= target; ++i) before += one;
    s.id = i;
  }
  __syncthreads();
  return s.id;
}

// SplitMix64 of the seed; the draw in [0, total).
__device__ __forceinline__ u64 Target(uint64_t seed, u64 total) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return __umul64hi((z ^ (z >> 31)) & ~2047ull, total);  // the upper 53 bits x total / 2^53
}

__global__ void __launch_bounds__(kDrawThreads, 1) SampleDraw(int32_t vocab, SamplingArgs a, Workspace workspace, int32_t* token_ids) {
  __shared__ Shared s;
  gpu::WaitForPrevious();
  const int64_t row = blockIdx.x;
  const int32_t tiles = (vocab + kTile - 1) / kTile, thread = static_cast<int32_t>(threadIdx.x);
  const Best best = BestOfRow(workspace.best + row * tiles, tiles);
  if (best.finite == 0 || Greedy(a, row)) {
    if (thread == 0) token_ids[row] = best.finite == 0 ? -1 : best.id;
    return;
  }
  const float* const weights = workspace.weights + row * vocab;
  const u64* const masses = workspace.masses + row * tiles;
  const int32_t top_k = a.top_k[row];
  const float top_p = a.top_p[row];
  const bool by_count = top_k > 0 && top_k < vocab, by_mass = top_p < 1;

  Cut cut{0, 0, 0, 0};
  u64 total = 0, kept_ties = 0;
  if (by_count) {
    cut = Select(weights, vocab, false, static_cast<u64>(top_k), s);
    kept_ties = cut.bits == 0 ? 0 : static_cast<u64>(top_k) - cut.above_count;
    total = cut.above_mass + kept_ties * Mass(BitsToFloat(cut.bits));
  } else {
    total = Find(thread < tiles ? masses[thread] : 0, 0, ~0ull, s).before;
  }
  if (by_mass) {  // what top-k left is the heaviest, so that the cut by mass lies above that by count
    const u64 limit = static_cast<u64>(ceil(static_cast<double>(total) * static_cast<double>(top_p)));
    cut = Select(weights, vocab, true, limit, s);
    const u64 mass = Mass(BitsToFloat(cut.bits));
    kept_ties = (limit - cut.above_mass + mass - 1) / mass;
    total = cut.above_mass + kept_ties * mass;
  }
  int32_t last_tie = vocab;
  if (kept_ties < cut.ties) {
    last_tie = FindId(weights, vocab, nullptr, kept_ties - 1, s, [&](float weight, int32_t) -> u64 { return FloatToBits(weight) == cut.bits; });
  }
  const auto share = [&](float weight, int32_t id) -> u64 {
    const uint32_t bits = FloatToBits(weight);
    return bits > cut.bits || (bits == cut.bits && id <= last_tie) ? Mass(weight) : 0;
  };
  const int32_t id = FindId(weights, vocab, by_count || by_mass ? nullptr : masses, Target(a.seed[row], total), s, share);
  if (thread == 0) token_ids[row] = id;
}

struct Layout {
  int64_t tiles, masses_at, weights_at, bytes;
};
Layout LayoutOf(int64_t rows, int64_t vocab) {
  const int64_t tiles = (vocab + kTile - 1) / kTile;
  const int64_t masses_at = (rows * tiles * static_cast<int64_t>(sizeof(Best)) + 15) / 16 * 16;
  const int64_t weights_at = (masses_at + rows * tiles * 8 + 15) / 16 * 16;
  return {tiles, masses_at, weights_at, weights_at + rows * vocab * 4};
}

}  // namespace

int64_t SamplingWorkspaceBytes(int64_t rows, int64_t vocab) { return LayoutOf(rows, vocab).bytes; }

void Sample(Stream& stream, float* logits, int64_t rows, int64_t vocab, float soft_cap, const SamplingArgs& args, int32_t* token_ids,
            void* workspace) {
  if (rows == 0) return;
  const Layout layout = LayoutOf(rows, vocab);
  if (vocab < 1 || layout.tiles > kMaxTiles) {
    throw std::invalid_argument("Sample: a vocabulary of " + std::to_string(vocab) + " tokens; at most " +
                                std::to_string(kMaxTiles * kTile) + " are served");
  }
  auto* base = static_cast<uint8_t*>(workspace);
  const Workspace view{reinterpret_cast<Best*>(base), reinterpret_cast<u64*>(base + layout.masses_at),
                       reinterpret_cast<float*>(base + layout.weights_at)};
  const gpu::Dim tiles{static_cast<unsigned>(layout.tiles), static_cast<unsigned>(rows)};
  const auto size = static_cast<int32_t>(vocab);
  gpu::LaunchDependent(stream, "SampleScan", SampleScan, tiles, {kTileThreads}, 0, logits, size, soft_cap, view);
  gpu::LaunchDependent(stream, "SampleWeigh", SampleWeigh, tiles, {kTileThreads}, 0, static_cast<const float*>(logits), size, args, view);
  gpu::LaunchDependent(stream, "SampleDraw", SampleDraw, {static_cast<unsigned>(rows)}, {kDrawThreads}, 0, size, args, view, token_ids);
}

}  // namespace kvtier::cuda
