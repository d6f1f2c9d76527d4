// Attention, its plans and the kernels behind it against the reference in double, over paged pools that are full of traps: what no query
// may see is NaN (the null block, blocks of nobody, other layers, rows behind a context's end), table entries behind a
// context's blocks and those of the null block's kind lead outside the pool or to NaNs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>

#include "../kernels/attention.h"
#include "../kernels/reference_attention.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

struct Length {
  int32_t computed, queries;
};

struct AttentionShape {
  NumberType type = NumberType::kF16, kv_type = NumberType::kF16;
  int32_t heads = 8, kv_heads = 2, head_dim = 64, block_tokens = 16;
  int32_t window = 0;
  float soft_cap = 0;
  std::vector<Length> lengths;

  AttentionShape With(NumberType both) const { return With(both, both); }
  AttentionShape With(NumberType queries, NumberType kv) const {
    AttentionShape shape = *this;
    shape.type = queries, shape.kv_type = kv;
    return shape;
  }
  std::string Text() const {
    int32_t rows = 0, context = 0;
    for (const Length& length : lengths) rows += length.queries, context = std::max(context, length.computed + length.queries);
    return std::string(Name(type)) + "/" + Name(kv_type) + " heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " dim " +
           std::to_string(head_dim) + " block " + std::to_string(block_tokens) + " window " + std::to_string(window) + (soft_cap > 0 ? " cap" : "") +
           " sequences " + std::to_string(lengths.size()) + " rows " + std::to_string(rows) + " context " + std::to_string(context);
  }
};

bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr int32_t kLayers = 2, kLayer = 1;
constexpr int32_t kTrap = 0x7fff0000;  // a table entry that nobody may follow

// A shape's inputs on both sides, its reference, and its launches.
class Problem {
 public:
  Problem(const AttentionShape& shape, uint64_t seed) : shape_(shape) {
    const int32_t bt = shape.block_tokens;
    std::vector<int32_t> start{0}, row_sequence;
    int32_t max_context = 0, used = 0;
    std::vector<int32_t>& computed = host_computed_;
    for (const Length& length : shape.lengths) {
      start.push_back(start.back() + length.queries);
      computed.push_back(length.computed);
      row_sequence.insert(row_sequence.end(), static_cast<size_t>(length.queries), static_cast<int32_t>(computed.size() - 1));
      host_queries_.push_back(length.queries);
      max_context = std::max(max_context, length.computed + length.queries);
      used += (length.computed + length.queries + bt - 1) / bt;
    }
    const int64_t stride = (max_context + bt - 1) / bt + 3;
    const int32_t blocks = 1 + 2 * used;  // block 0 is null, every other one is nobody's
    const int64_t layer_bytes = int64_t{2} * shape.kv_heads * bt * shape.head_dim * NumberBytes(shape.kv_type);
    args_.kv = {nullptr, kLayers * layer_bytes, kLayer * layer_bytes, blocks, bt, shape.kv_heads, shape.head_dim, shape.kv_type};
    std::vector<uint8_t> pool(static_cast<size_t>(blocks * args_.kv.block_bytes), 0xff);  // NaN in every type
    std::vector<int32_t> table(static_cast<size_t>(stride) * shape.lengths.size(), kTrap);
    int32_t next = 0;
    for (size_t s = 0; s < shape.lengths.size(); ++s) {
      const int32_t context = shape.lengths[s].computed + shape.lengths[s].queries;
      const int32_t first = shape.window == 0 ? 0 : std::max(0, shape.lengths[s].computed - shape.window + 1);
      for (int32_t entry = 0; entry * bt < context; ++entry, ++next) {
        int32_t& block = table[s * static_cast<size_t>(stride) + static_cast<size_t>(entry)];
        block = (entry + 1) * bt <= first ? 0 : 1 + 2 * (used - 1 - next);
        if (block != 0) FillBlock(pool, block, std::min(bt, context - entry * bt), seed * 1000003 + static_cast<uint64_t>(next));
      }
    }
    const int32_t rows = start.back();
    args_.q_stride = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    args_.heads = shape.heads;
    args_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    args_.window = shape.window;
    args_.soft_cap = shape.soft_cap;
    // Wide enough that single keys matter.
    const auto q = RoundedAs(shape.type, RandomFloats(seed, rows * args_.q_stride, -6, 6));
    q_ = UploadAs(shape.type, q);
    pool_ = DeviceArray<uint8_t>(pool);
    start_ = DeviceArray<int32_t>(start), computed_ = DeviceArray<int32_t>(computed);
    row_sequence_ = DeviceArray<int32_t>(row_sequence), table_ = DeviceArray<int32_t>(table);
    out_count_ = static_cast<size_t>(rows) * static_cast<size_t>(shape.heads * shape.head_dim);
    const auto batch = [&](const int32_t* starts, const int32_t* before, const int32_t* sequences, const int32_t* tables) {
      return Batch{static_cast<int32_t>(shape.lengths.size()), rows, starts, before, sequences, tables, stride};
    };
    const std::vector<uint8_t> host_q = q_.Download();
    AttentionArgs host = args_;
    host.q = host_q.data(), host.kv.pool = pool.data(), host.table = table.data();
    std::vector<double> reference(out_count_);
    ReferenceAttention(shape.type, host, batch(start.data(), computed.data(), row_sequence.data(), table.data()), reference.data());
    reference_.assign(reference.begin(), reference.end());
    args_.q = q_.data(), args_.kv.pool = pool_.data(), args_.table = table_.data();
    batch_ = batch(start_.data(), computed_.data(), row_sequence_.data(), table_.data());
  }

  const std::vector<float>& reference() const { return reference_; }
  // A rounding of each probability and one of the result.
  double allowed() const { return 2 * Epsilon(shape_.type) + 1e-5; }
  // How a step plans it.
  AttentionBounds bounds() const {
    return {shape_.heads, shape_.kv_heads, shape_.head_dim, gpu::Info().multiprocessors, shape_.window};
  }
  AttentionPlan Plan(const AttentionBounds& bounds) const { return PlanAttention(bounds, host_computed_, host_queries_); }
  // The numbers of a result that are one sequence's.
  std::vector<float> Of(size_t sequence, const std::vector<float>& result) const {
    const int64_t columns = shape_.heads * shape_.head_dim, row = std::accumulate(host_queries_.begin(), host_queries_.begin() + static_cast<int64_t>(sequence), 0);
    return {result.begin() + row * columns, result.begin() + (row + host_queries_[sequence]) * columns};
  }

  // What Attention leaves in `out`, which is NaN before, without touching what lies behind it. Twice, so that tickets that do not come
  // back to 0 show. `captured`: as a graph launches it. `only`: one sequence by itself, where it lies; the others' rows stay NaN.
  std::vector<float> Run(const AttentionBounds& bounds, int version = 2, bool captured = false, std::optional<size_t> only = {}) {
    const AttentionPlan plan = only ? PlanAttention(bounds, {&host_computed_[*only], 1}, {&host_queries_[*only], 1}) : Plan(bounds);
    Batch batch = batch_;
    AttentionArgs args = args_;
    if (only) {
      batch.sequences = 1, batch.query_start += *only, batch.computed += *only;
      args.table += static_cast<int64_t>(*only) * batch.table_stride;
    }
    const int32_t rows = bounds.workspace_rows > 0 ? bounds.workspace_rows : AttentionWorkspaceRows(bounds.heads, bounds.multiprocessors);
    const size_t bytes = out_count_ * static_cast<size_t>(NumberBytes(shape_.type));
    DeviceArray<uint8_t> out(bytes), workspace(static_cast<size_t>(AttentionWorkspaceBytes(rows, shape_.head_dim)));
    DeviceArray<AttentionItem> items(plan.items);
    DeviceArray<int32_t> few(std::vector<int32_t>{plan.rounds.front().few});
    gpu::Stream stream;
    const gpu::WaitAtEnd ending(stream, 60'000'000);  // also when Attention throws
    stream.Set(workspace.data(), 0, static_cast<size_t>(PartsWorkspace::TicketBytes(rows)));
    stream.Set(workspace.data() + PartsWorkspace::TicketBytes(rows), 0xff, workspace.count() - static_cast<size_t>(PartsWorkspace::TicketBytes(rows)));
    const AttentionWork work{&plan, items.data(), captured ? few.data() : nullptr, rows};
    args.out = out.data(), args.workspace = workspace.data(), args.work = &work;
    for (int i = 0; i < 2; ++i) {
      stream.Set(out.data(), 0xff, bytes);
      Attention(stream, shape_.type, args, batch, version);
    }
    Finish(stream);
    return DownloadAs(shape_.type, out);
  }

  // The one sequence's queries in steps of so many, the keys before them being there: what each step leaves, one behind the other.
  std::vector<float> InPieces(const AttentionBounds& bounds, const std::vector<int32_t>& pieces) {
    const int32_t workspace_rows = AttentionWorkspaceRows(bounds.heads, bounds.multiprocessors);
    const size_t bytes = out_count_ * static_cast<size_t>(NumberBytes(shape_.type));
    DeviceArray<uint8_t> out(bytes), workspace(static_cast<size_t>(AttentionWorkspaceBytes(workspace_rows, shape_.head_dim)));
    CopyNow(workspace.data(), std::vector<uint8_t>(workspace.count()).data(), workspace.count());
    int32_t row = 0;
    for (const int32_t queries : pieces) {
      const std::vector<int32_t> before{host_computed_[0] + row}, count{queries};
      const AttentionPlan plan = PlanAttention(bounds, before, count);
      const DeviceArray<AttentionItem> items(plan.items);
      const DeviceArray<int32_t> start(std::vector<int32_t>{0, queries}), computed(before), of(std::vector<int32_t>(static_cast<size_t>(queries), 0));
      const AttentionWork work{&plan, items.data(), nullptr, workspace_rows};
      AttentionArgs args = args_;
      args.q = q_.data() + row * args_.q_stride * NumberBytes(shape_.type);
      args.out = out.data() + int64_t{row} * shape_.heads * shape_.head_dim * NumberBytes(shape_.type);
      args.workspace = workspace.data(), args.work = &work;
      gpu::Stream stream;
      const gpu::WaitAtEnd ending(stream, 60'000'000);
      Attention(stream, shape_.type, args, {1, queries, start.data(), computed.data(), of.data(), table_.data(), batch_.table_stride}, 0);
      Finish(stream);
      row += queries;
    }
    return DownloadAs(shape_.type, out);
  }

  void ExpectRun(const std::string& name, const AttentionBounds& bounds, int version = 2, bool captured = false) {
    Expect("Attention v" + std::to_string(version), name + (name.empty() ? "" : ", ") + shape_.Text(), MaxError(Run(bounds, version, captured), reference_), allowed());
  }
  void ExpectWarp() { ExpectRun("", bounds(), 1); }
  // As a step runs it.
  void ExpectPlanned(bool captured = false) { ExpectRun(captured ? "captured" : "planned", bounds(), 0, captured); }
  // All of it in large tiles, in parts of so many keys.
  void ExpectLarge(int32_t keys = 1024) {
    AttentionBounds large = bounds();
    large.few_rows = 0, large.large_keys = keys;
    ExpectRun("large tiles, parts of " + std::to_string(keys), large);
  }
  // All of it in tiles of few rows, in parts of so many keys.
  void ExpectFew(int32_t keys, int32_t most_queries = 1) {
    AttentionBounds few = bounds();
    few.few_rows = most_queries * shape_.heads / shape_.kv_heads, few.few_keys = keys;
    ExpectRun("few rows, parts of " + std::to_string(keys), few);
  }

 private:
  // Keys and values of the first `tokens` tokens; the rest stays NaN.
  void FillBlock(std::vector<uint8_t>& pool, int32_t block, int32_t tokens, uint64_t seed) const {
    const PagedKv& kv = args_.kv;
    const int64_t row_floats = kv.head_dim, heads = int64_t{2} * kv.kv_heads;
    const auto values = RandomFloats(seed, heads * tokens * row_floats, -1, 1);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < tokens * row_floats; ++i) {
        uint8_t* const target = pool.data() + block * kv.block_bytes + kv.layer_offset +
                                kv.Row(static_cast<int32_t>(head / kv.kv_heads), static_cast<int32_t>(head % kv.kv_heads), 0) +
                                i * NumberBytes(kv.type);
        Store(target, values[static_cast<size_t>(head * tokens * row_floats + i)]);
      }
    }
  }
  void Store(uint8_t* target, float value) const {
    const auto put = [&](auto number) { memcpy(target, &number, sizeof number); };
    switch (shape_.kv_type) {
      case NumberType::kF32: return put(value);
      case NumberType::kF16: return put(FromFloat<f16>(value));
      case NumberType::kBf16: return put(FromFloat<bf16>(value));
      case NumberType::kE4m3: return put(FromFloat<e4m3>(value));
    }
  }

  AttentionShape shape_;
  AttentionArgs args_{};
  Batch batch_{};
  size_t out_count_ = 0;
  DeviceArray<uint8_t> q_, pool_;
  DeviceArray<int32_t> start_, computed_, row_sequence_, table_;
  std::vector<float> reference_;
  std::vector<int32_t> host_computed_, host_queries_;
};

// Chunks, decodes and short tails in one batch: tiles that are full, partly filled and nearly empty.
AttentionShape Mixed(int32_t head_dim) {
  AttentionShape shape;
  shape.head_dim = head_dim;
  shape.lengths = {{37, 20}, {0, 1}, {64, 1}, {90, 43}, {0, 3}};
  return shape;
}

// Heads that a model is refused for on this GPU (kernels.h).
bool HasRoom(int32_t head_dim) { return head_dim <= 128 || gpu::Info().shared_bytes_per_block >= kWideHeadsSharedBytes; }

}  // namespace

KVTIER_CHECK(attention_warp) {
  for (const int32_t dim : {32, 64, 80, 96, 128, 256}) {
    Problem(Mixed(dim).With(kF32), 1).ExpectWarp();
  }
  for (const NumberType type : {kF32, kF16, kBf16}) {
    AttentionShape shape = Mixed(80).With(type, kE4m3);
    shape.window = 33;
    shape.soft_cap = 2;
    Problem(shape, 2).ExpectWarp();
  }
  AttentionShape decode = Mixed(64).With(kF32);
  decode.lengths = {{70, 1}, {0, 1}, {15, 1}, {16, 1}};
  Problem(decode, 3).ExpectPlanned();
}

KVTIER_CHECK(attention_head_dims) {
  for (const int32_t dim : {32, 64, 80, 96, 128, 256}) {
    if (!HasRoom(dim)) continue;
    for (const NumberType type : {kF16, kBf16}) {
      for (const NumberType kv : {type, kE4m3}) {
        Problem(Mixed(dim).With(type, kv), 4).ExpectLarge();
        AttentionShape shape = Mixed(dim).With(type, kv);
        shape.lengths = {{140, 1}, {15, 1}};
        Problem(shape, 4).ExpectFew(64);
      }
    }
  }
}

// What a step calls: tiles for the chunks, split keys for the decodes and short tails among them.
KVTIER_CHECK(attention_mixed_batches) {
  for (const int32_t dim : {32, 80, 128}) Problem(Mixed(dim).With(kBf16), 4).ExpectPlanned();
}

KVTIER_CHECK(attention_head_groups) {
  const int32_t heads[][2] = {{2, 2}, {4, 1}, {7, 1}, {14, 2}, {8, 1}, {24, 1}};
  for (const auto& pair : heads) {
    AttentionShape shape = Mixed(32);
    shape.heads = pair[0], shape.kv_heads = pair[1];
    shape.lengths = {{20, 30}, {50, 1}, {0, 2}};
    Problem problem(shape, 5);
    problem.ExpectLarge();
    problem.ExpectPlanned();
    shape.lengths = {{200, 1}, {33, 1}};
    Problem(shape, 6).ExpectFew(64);
  }
}

KVTIER_CHECK(attention_blocks) {
  for (const int32_t block_tokens : {8, 16, 24, 32, 128}) {
    AttentionShape shape = Mixed(32);
    shape.block_tokens = block_tokens;
    shape.heads = 4, shape.kv_heads = 2;
    shape.lengths.clear();
    // Prefixes at and beside the ends of blocks and tiles.
    for (const int32_t computed : {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
      shape.lengths.push_back({computed, 1});
      shape.lengths.push_back({computed - 1, 2});
      if (computed >= 63 && computed <= 65) shape.lengths.push_back({computed, 40});
    }
    Problem problem(shape, 7);
    problem.ExpectLarge();
    problem.ExpectFew(64, 40);
  }
}

KVTIER_CHECK(attention_windows) {
  for (const int32_t window : {1, 2, 16, 17, 64, 100, 1000}) {
    for (const float cap : {0.0f, 3.0f}) {
      AttentionShape shape = Mixed(32);
      shape.heads = 4, shape.kv_heads = 2;
      shape.window = window;
      shape.soft_cap = cap;
      shape.lengths = {{200, 70}, {0, 90}, {130, 1}, {127, 3}};
      Problem problem(shape, 8);
      problem.ExpectLarge();
      shape.lengths = {{399, 3}, {0, 1}, {64, 1}, {16, 2}};
      Problem(shape, 9).ExpectFew(64, 3);
    }
  }
}

// One long context over the whole GPU, beside short ones; parts of every size up to all keys.
KVTIER_CHECK(attention_parts) {
  for (const NumberType kv : {kBf16, kE4m3}) {
    AttentionShape shape = Mixed(128).With(kBf16, kv);
    shape.heads = 4, shape.kv_heads = 1;
    shape.lengths = {{2999, 1}};
    Problem problem(shape, 10);
    problem.ExpectFew(64);  // twice that: there are 32 parts at most
    problem.ExpectPlanned();
    problem.ExpectPlanned(true);
    problem.ExpectWarp();
  }
  AttentionShape shape = Mixed(64);
  shape.lengths = {{1300, 1}, {127, 1}, {128, 1}, {0, 1}, {640, 1}};
  Problem problem(shape, 11);
  for (const int32_t keys : {64, 128, 512, 2048}) problem.ExpectFew(keys);
  problem.ExpectPlanned(true);
  shape.lengths = {{1300, 4}, {127, 16}, {128, 1}, {0, 9}, {640, 2}};
  shape.window = 500;
  Problem(shape, 12).ExpectFew(64, 16);
}

// Short tails over long prefixes in large tiles, their keys in parts, and the parts merged.
KVTIER_CHECK(attention_tails) {
  for (const int32_t dim : {64, 80, 128, 256}) {
    if (!HasRoom(dim)) continue;
    for (const NumberType kv : {kBf16, kE4m3}) {
      AttentionShape shape = Mixed(dim).With(kBf16, kv);
      shape.heads = 4, shape.kv_heads = 2;
      shape.lengths = {{400, 33}, {40, 70}, {200, 1}};
      shape.soft_cap = kv == kBf16 ? 0.0f : 2.0f;
      Problem problem(shape, 15);
      problem.ExpectLarge(64);
      problem.ExpectPlanned();
      shape.window = 150;
      Problem(shape, 16).ExpectLarge(128);
    }
  }
  AttentionShape shape = Mixed(64);
  shape.lengths = {{2000, 40}};
  Problem(shape, 17).ExpectPlanned();
}

// A sequence's result has the same bits alone, in any company, on any number of rounds, and as a graph launches it.
KVTIER_CHECK(attention_company) {
  for (const int32_t window : {0, 200}) {
    AttentionShape shape = Mixed(64).With(kBf16);
    shape.heads = 4, shape.kv_heads = 2, shape.window = window;
    shape.lengths = {{700, 40}, {1030, 1}, {15, 3}, {2100, 1}, {0, 150}, {600, 33}};
    Problem together(shape, 18);
    AttentionBounds bounds = together.bounds();
    bounds.few_keys = bounds.large_keys = 128;
    const auto whole = together.Run(bounds);
    bounds.workspace_rows = window == 0 ? 1400 : 520;  // the largest tile's parts, and not much else
    const std::string text = "window " + std::to_string(window);
    ExpectTrue("PlanAttention", "takes several rounds, " + text, together.Plan(bounds).rounds.size() > 1);
    ExpectTrue("Attention v2", "the same bits in several rounds, " + text, Same(whole, together.Run(bounds)));
    for (size_t i = 0; i < shape.lengths.size(); ++i) {
      const auto alone = together.Run(bounds, 2, false, i);
      ExpectTrue("Attention v2", "the same bits alone, sequence " + std::to_string(i) + ", " + text, Same(together.Of(i, alone), together.Of(i, whole)));
    }
  }
}

// The end of a long prompt, cut in any way: the same bits as in one piece. The parts begin to be longer within it.
KVTIER_CHECK(attention_cuts) {
  for (const int32_t window : {0, 1000}) {
    const NumberType kv = window == 0 ? kBf16 : kE4m3;
    AttentionShape shape = Mixed(64).With(kBf16, kv);
    shape.heads = 2, shape.kv_heads = 1, shape.window = window;
    constexpr int32_t kLonger = 60 * 128;  // from here on parts are twice as long
    constexpr int32_t kQueries = 70, kComputed = kLonger - 40;
    shape.lengths = {{kComputed, kQueries}};
    Problem problem(shape, 20);
    AttentionBounds bounds = problem.bounds();
    bounds.few_keys = bounds.large_keys = 128;
    const std::string text = Name(kv) + std::string(" KV, window ") + std::to_string(window);
    ExpectTrue("PartKeys", "follow from the position, " + text,
               window != 0 || (PartKeys(bounds, true, kLonger - 1) == 128 && PartKeys(bounds, true, kLonger) == 256 &&
                               PartKeys(bounds, false, kLonger - 1) == 128 && PartKeys(bounds, false, kLonger) == 256));
    for (const int32_t few_rows : {0, 1 << 20}) {  // all in large tiles; all in tiles of few rows
      bounds.few_rows = few_rows;
      const std::string kind = few_rows == 0 ? "large tiles, " : "few rows, ";
      const auto whole = problem.InPieces(bounds, {kQueries});
      Expect("Attention v2", "a prompt's end, " + kind + text, MaxError(whole, problem.reference()), problem.allowed());
      for (uint64_t seed = 0; seed < 2; ++seed) {
        std::vector<int32_t> pieces;
        for (int32_t left = kQueries; left > 0; left -= pieces.back()) {
          const auto draw = RandomInts(100 * seed + pieces.size(), 2, 0, 1000);
          pieces.push_back(std::min(left, 1 + draw[0] % (draw[1] % 3 == 0 ? 5 : 60)));
        }
        ExpectTrue("Attention v2", "the same bits in " + std::to_string(pieces.size()) + " pieces, cut " + std::to_string(seed) + ", " + kind + text,
                   Same(whole, problem.InPieces(bounds, pieces)));
      }
    }
  }
}

// The same inputs through the two ways give the same numbers but for rounding.
KVTIER_CHECK(attention_ways_agree) {
  for (const int32_t dim : {64, 80, 256}) {
    if (!HasRoom(dim)) continue;
    AttentionShape shape = Mixed(dim).With(kBf16);
    shape.lengths = {{333, 1}, {16, 1}, {64, 1}};
    Problem problem(shape, 13);
    AttentionBounds large = problem.bounds();
    large.few_rows = 0;
    Expect("Attention v2", "few rows against large tiles, dim " + std::to_string(dim), MaxError(problem.Run(problem.bounds()), problem.Run(large)),
           2 * problem.allowed());
  }
}

KVTIER_CHECK(attention_refusals) {
  const auto refused = [](const AttentionShape& shape) {
    try {
      Problem problem(shape, 14);
      problem.Run(problem.bounds(), 0);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  AttentionShape shape = Mixed(64);
  shape.lengths = {{0, 2}};
  ExpectTrue("Attention", "takes what it knows", !refused(shape));
  shape.head_dim = 48;
  ExpectTrue("Attention", "refuses head_dim 48", refused(shape));
  shape.head_dim = 64, shape.block_tokens = 12;
  ExpectTrue("Attention", "refuses blocks of 12 tokens", refused(shape));
  shape.block_tokens = 16, shape.kv_type = kBf16;
  ExpectTrue("Attention", "refuses bf16 keys for f16 queries", refused(shape));
}

}  // namespace kvtier::cuda::check
