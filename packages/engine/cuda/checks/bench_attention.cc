// Attention at the shapes of an 8B Llama, over pools of 16-token blocks in random order.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../kernels/kernels.h"
#include "bench.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int32_t kBlockTokens = 16;

// `sequences` equal sequences; keys, values and queries are uniform noise, so that nothing is cheaper than in earnest.
class Problem {
 public:
  Problem(int32_t sequences, int32_t computed, int32_t queries, NumberType kv_type)
      : sequences_(sequences), computed_(computed), queries_(queries), kv_type_(kv_type) {
    const int32_t context = computed + queries, rows = sequences * queries;
    const int32_t entries = (context + kBlockTokens - 1) / kBlockTokens, blocks = 1 + sequences * entries;
    const int64_t block_bytes = 2 * kKvHeads * kBlockTokens * kHeadDim * NumberBytes(kv_type);
    std::vector<int32_t> start, before(static_cast<size_t>(sequences), computed), row_sequence, table(static_cast<size_t>(sequences * entries));
    for (int32_t i = 0; i <= sequences; ++i) start.push_back(i * queries);
    for (int32_t i = 0; i < rows; ++i) row_sequence.push_back(i / queries);
    std::iota(table.begin(), table.end(), 1);
    uint64_t state = 1;
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[Next(state) % i]);

    q_ = Noise(static_cast<size_t>(rows) * kStride * 2, NumberType::kBf16);
    pool_ = Noise(static_cast<size_t>(blocks * block_bytes), kv_type);
    out_ = gpu::Buffer(static_cast<size_t>(rows) * kHeads * kHeadDim * 2, "attention's output");
    const int multiprocessors = gpu::Info().multiprocessors;
    workspace_ = gpu::Buffer(static_cast<size_t>(AttentionWorkspaceBytes(sequences, kHeads, kHeadDim, multiprocessors)), "attention's workspace");
    stream_.Set(workspace_.data(), 0, workspace_.bytes());
    arrays_ = gpu::Buffer((start.size() + before.size() + row_sequence.size() + table.size()) * 4, "the batch");
    auto* at = arrays_.data<int32_t>();
    const auto put = [&](const std::vector<int32_t>& values) {
      stream_.Copy(at, values.data(), values.size() * 4);
      at += values.size();
      return at - values.size();
    };
    batch_ = {sequences, rows, queries, context, put(start), put(before), put(row_sequence), put(table), entries};
    args_ = {q_.data(), out_.data(), kStride, kHeads, 0.08838834764f, 0, 0,
             {pool_.data(), block_bytes, 0, blocks, kBlockTokens, kKvHeads, kHeadDim, kv_type},
             batch_.tables, workspace_.data()};
    if (!stream_.Synchronize(60'000'000)) throw std::runtime_error("the bench's inputs did not arrive within 60 s");
  }

  std::string shape() const {
    return std::string("bf16") + (kv_type_ == NumberType::kE4m3 ? ", e4m3 KV, " : ", ") + std::to_string(sequences_) + " x " +
           std::to_string(queries_) + " queries over " + std::to_string(computed_) + " tokens";
  }
  // 4 FLOPs per head dim for each pair of a query and a key that it sees.
  double flops() const {
    const double pairs = static_cast<double>(queries_) * computed_ + 0.5 * queries_ * (queries_ + 1.0);
    return 4.0 * kHeads * kHeadDim * pairs * sequences_;
  }
  // Keys and values once, queries and outputs once.
  double bytes() const {
    const double context = static_cast<double>(computed_) + queries_;
    return sequences_ * (2.0 * kKvHeads * kHeadDim * context * NumberBytes(kv_type_) + 4.0 * kHeads * kHeadDim * queries_);
  }
  void Prefill(int version) {
    const double us = TimeUs(stream_, [&] { AttentionPrefill(stream_, NumberType::kBf16, args_, batch_, version); });
    ReportFlops("AttentionPrefill v" + std::to_string(version), shape(), us, flops());
  }
  void Tail() {
    const double us = TimeUs(stream_, [&] { AttentionPrefill(stream_, NumberType::kBf16, args_, batch_); });
    ReportBytes("AttentionPrefill v0", shape(), us, bytes());
  }
  void Decode(int version) {
    const double us = TimeUs(stream_, [&] { AttentionDecode(stream_, NumberType::kBf16, args_, batch_, version); });
    ReportBytes("AttentionDecode v" + std::to_string(version), shape(), us, bytes());
  }

 private:
  static constexpr int64_t kStride = (kHeads + 2 * kKvHeads) * kHeadDim;

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
    if (!stream_.Synchronize(60'000'000)) throw std::runtime_error("the bench's inputs did not arrive within 60 s");
    return buffer;
  }

  int32_t sequences_, computed_, queries_;
  NumberType kv_type_;
  gpu::Stream stream_;
  gpu::Buffer q_, pool_, out_, workspace_, arrays_;
  AttentionArgs args_{};
  Batch batch_{};
};

}  // namespace

KVTIER_BENCH(attention_prefill) {
  Problem(1, 0, 2048, NumberType::kBf16).Prefill(1);
  for (const NumberType kv : {NumberType::kBf16, NumberType::kE4m3}) {
    Problem(1, 0, 8192, kv).Prefill(2);
    Problem(4, 0, 2048, kv).Prefill(2);
    Problem(1, 30720, 2048, kv).Prefill(2);
  }
}

KVTIER_BENCH(attention_decode) {
  Problem(1, 8191, 1, NumberType::kBf16).Decode(1);
  for (const NumberType kv : {NumberType::kBf16, NumberType::kE4m3}) {
    for (const int32_t computed : {1023, 8191, 32767, 131071}) Problem(1, computed, 1, kv).Decode(2);
    for (const int32_t computed : {1023, 8191}) Problem(32, computed, 1, kv).Decode(2);
  }
}

// What is left of a prompt after a warm start, and a decode among them.
KVTIER_BENCH(attention_tail) {
  Problem(1, 9984, 16, NumberType::kBf16).Tail();
  Problem(8, 9984, 8, NumberType::kBf16).Tail();
}

}  // namespace kvtier::cuda::bench
