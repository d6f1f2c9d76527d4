// Attention at the shapes of an 8B Llama, over pools of 16-token blocks in random order.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../kernels/attention_plan.h"
#include "../kernels/kernels.h"
#include "bench.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int32_t kCacheBlockTokens = 16;
constexpr int32_t Tokens(int64_t count) { return static_cast<int32_t>(Scaled(count)); }

// Sequences of `computed` tokens and `queries` new ones each; keys, values and queries are uniform noise, so that nothing is cheaper than in earnest.
class Problem {
 public:
  Problem(int32_t sequences, int32_t computed, int32_t queries, NumberType kv_type)
      : Problem(std::vector<int32_t>(static_cast<size_t>(sequences), computed), queries, kv_type,
                std::to_string(sequences) + " x " + std::to_string(queries) + " queries over " + std::to_string(computed) + " tokens") {}
  Problem(const std::vector<int32_t>& before, int32_t queries, NumberType kv_type, const std::string& name)
      : before_(before), queries_(queries), kv_type_(kv_type), name_(name) {
    const auto sequences = static_cast<int32_t>(before.size());
    const int32_t context = *std::max_element(before.begin(), before.end()) + queries, rows = sequences * queries;
    const int32_t entries = (context + kCacheBlockTokens - 1) / kCacheBlockTokens;
    int32_t blocks = 1;  // only what lies in a context has one
    for (const int32_t computed : before) blocks += (computed + queries + kCacheBlockTokens - 1) / kCacheBlockTokens;
    const int64_t block_bytes = 2 * kKvHeads * kCacheBlockTokens * kHeadDim * NumberBytes(kv_type);
    std::vector<int32_t> start, row_sequence, table(static_cast<size_t>(sequences * entries)), ids(static_cast<size_t>(blocks - 1));
    for (int32_t i = 0; i <= sequences; ++i) start.push_back(i * queries);
    for (int32_t i = 0; i < rows; ++i) row_sequence.push_back(i / queries);
    std::iota(ids.begin(), ids.end(), 1);
    uint64_t state = 1;
    for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[Next(state) % i]);
    for (size_t s = 0, next = 0; s < before.size(); ++s) {
      for (int32_t entry = 0; entry * kCacheBlockTokens < before[s] + queries; ++entry) table[s * static_cast<size_t>(entries) + static_cast<size_t>(entry)] = ids[next++];
    }
    plan_ = PlanAttention({kHeads, kKvHeads, kHeadDim, gpu::Info().multiprocessors}, before, std::vector<int32_t>(before.size(), queries));
    items_ = gpu::Buffer(plan_.items.size() * sizeof(AttentionItem), "the plan");
    stream_.Copy(items_.data(), plan_.items.data(), items_.bytes());

    q_ = Noise(static_cast<size_t>(rows) * kStride * 2, NumberType::kBf16);
    pool_ = Noise(static_cast<size_t>(blocks * block_bytes), kv_type);
    out_ = gpu::Buffer(static_cast<size_t>(rows) * kHeads * kHeadDim * 2, "attention's output");
    const int32_t workspace_rows = AttentionWorkspaceRows(kHeads, gpu::Info().multiprocessors);
    workspace_ = gpu::Buffer(static_cast<size_t>(AttentionWorkspaceBytes(workspace_rows, kHeadDim)), "attention's workspace");
    work_ = {&plan_, items_.data<AttentionItem>(), nullptr, workspace_rows};
    stream_.Set(workspace_.data(), 0, workspace_.bytes());
    arrays_ = gpu::Buffer((start.size() + before.size() + row_sequence.size() + table.size()) * 4, "the batch");
    auto* at = arrays_.data<int32_t>();
    const auto put = [&](const std::vector<int32_t>& values) {
      stream_.Copy(at, values.data(), values.size() * 4);
      at += values.size();
      return at - values.size();
    };
    batch_ = {sequences, rows, put(start), put(before), put(row_sequence), put(table), entries};
    args_ = {q_.data(), out_.data(), kStride, static_cast<int32_t>(kHeads), 0.08838834764f, 0, 0,
             {pool_.data(), block_bytes, 0, blocks, kCacheBlockTokens, kKvHeads, kHeadDim, kv_type},
             batch_.tables, workspace_.data(), &work_};
    Finish(stream_);
  }

  std::string shape() const {
    return std::string("bf16") + (kv_type_ == NumberType::kE4m3 ? ", e4m3 KV, " : ", ") + name_;
  }
  // 4 FLOPs per head dim for each pair of a query and a key that it sees.
  double flops() const {
    double pairs = 0;
    for (const int32_t computed : before_) pairs += static_cast<double>(queries_) * computed + 0.5 * queries_ * (queries_ + 1.0);
    return 4.0 * kHeads * kHeadDim * pairs;
  }
  // Keys and values once, queries and outputs once.
  double bytes() const {
    double sum = 0;
    for (const int32_t computed : before_) {
      sum += 2.0 * kKvHeads * kHeadDim * (static_cast<double>(computed) + queries_) * NumberBytes(kv_type_) + 4.0 * kHeads * kHeadDim * queries_;
    }
    return sum;
  }
  // What computes most, and what moves most: against the GPU's rate of either.
  void Flops(int version = 2) { ReportFlops("Attention v" + std::to_string(version), shape(), Us(version), flops()); }
  void Bytes(int version = 2) { ReportBytes("Attention v" + std::to_string(version), shape(), Us(version), bytes()); }

 private:
  static constexpr int64_t kStride = (kHeads + 2 * kKvHeads) * kHeadDim;

  double Us(int version) {
    return TimeUs(stream_, [&] { Attention(stream_, NumberType::kBf16, args_, batch_, version); });
  }
  static uint64_t Next(uint64_t& state) { return (state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33; }
  // Numbers of either sign between 2^-8 and 1: no NaN whatever the bits.
  gpu::Buffer Noise(size_t bytes, NumberType type) {
    std::vector<uint8_t> piece(std::min<size_t>(bytes, 16 << 20));
    uint64_t state = 7;
    if (type == NumberType::kE4m3) {
      for (uint8_t& number : piece) number = static_cast<uint8_t>(Next(state) & 0xb7);
    } else {
      for (size_t i = 0; i + 2 <= piece.size(); i += 2) {
        const uint16_t bits = FromFloat<bf16>(static_cast<float>(static_cast<int64_t>(Next(state) % 2001) - 1000) / 1000).bits;
        piece[i] = static_cast<uint8_t>(bits), piece[i + 1] = static_cast<uint8_t>(bits >> 8);
      }
    }
    gpu::Buffer buffer(bytes, "the bench's numbers");
    for (size_t at = 0; at < bytes; at += piece.size()) stream_.Copy(buffer.data() + at, piece.data(), std::min(piece.size(), bytes - at));
    Finish(stream_);
    return buffer;
  }

  const std::vector<int32_t> before_;
  const int32_t queries_;
  const NumberType kv_type_;
  const std::string name_;
  AttentionPlan plan_;
  AttentionWork work_{};
  gpu::Stream stream_;
  gpu::Buffer q_, pool_, out_, workspace_, arrays_, items_;
  AttentionArgs args_{};
  Batch batch_{};
};

}  // namespace

KVTIER_BENCH(attention_prefill) {
  Problem(1, 0, Tokens(2048), NumberType::kBf16).Flops(1);
  for (const NumberType kv : {NumberType::kBf16, NumberType::kE4m3}) {
    Problem(1, 0, Tokens(8192), kv).Flops();
    Problem(4, 0, Tokens(2048), kv).Flops();
    Problem(1, Tokens(30720), Tokens(2048), kv).Flops();
  }
}

KVTIER_BENCH(attention_decode) {
  Problem(1, Tokens(8191), 1, NumberType::kBf16).Bytes(1);
  for (const NumberType kv : {NumberType::kBf16, NumberType::kE4m3}) {
    for (const int32_t computed : {1023, 8191, 32767, 131071}) Problem(1, Tokens(computed), 1, kv).Bytes();
    for (const int32_t computed : {1023, 8191}) Problem(32, Tokens(computed), 1, kv).Bytes();
    std::vector<int32_t> unequal(32, Tokens(499));
    unequal[7] = Tokens(99'999);
    Problem(unequal, 1, kv, "one of 100k among 31 of 500 tokens").Bytes();
  }
}

// What is left of a prompt after a warm start: few rows move bytes, more of them compute.
KVTIER_BENCH(attention_tail) {
  Problem(1, Tokens(9984), 16, NumberType::kBf16).Bytes();
  Problem(8, Tokens(9984), 8, NumberType::kBf16).Bytes();
  for (const int32_t computed : {10'000, 30'000, 100'000}) {
    for (const int32_t queries : {32, 128, 500}) Problem(1, Tokens(computed), Tokens(queries), NumberType::kBf16).Flops();
  }
}

}  // namespace kvtier::cuda::bench
