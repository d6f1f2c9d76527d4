// Blocks of any layout over the bus (docs/formats.md, "Namespace"): a latent, 8-bit keys and values with their scales, states of a fixed
// size, ranges of heads of several tensor-parallel ranks in one arena. Bytes are bytes: what was drawn at random lies in each slot, and in
// each block that it was imported into, whole or by layers, and nowhere else. The oracle is memcpy.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "transfer_world.h"

namespace kvtier::cuda::check {
namespace {

struct Part {
  int64_t number_bytes, per_token, per_block;  // numbers for each token, or once a block
};

struct Layout {
  std::string name;
  int64_t layers, block_tokens;
  std::vector<Part> parts;

  // As partsLayout reckons it (packages/base/identity/src/layout.ts).
  int64_t LayerBytes() const {
    int64_t bytes = 0;
    for (const Part& part : parts) bytes += part.number_bytes * (part.per_token * block_tokens + part.per_block);
    return (bytes + 15) / 16 * 16;
  }
  int64_t BlockBytes() const { return layers * LayerBytes(); }
};

std::vector<Layout> Layouts(const std::vector<int32_t>& draw) {
  const auto of = [&](size_t at, int64_t low, int64_t high) { return low + draw[at] % (high - low + 1); };
  const int64_t tokens = int64_t{1} << of(0, 2, 6), layers = of(1, 1, 6), heads = of(2, 1, 3);
  std::vector<Layout> layouts{
      {"a latent", layers, tokens, {{2, 512, 0}, {2, 64, 0}}},
      {"a latent in 8 bits", layers, tokens, {{1, 512, 0}, {4, 4, 0}, {2, 64, 0}}},
      {"8 bits and scales", layers, tokens, {{1, heads * 128, 0}, {1, heads * 128, 0}, {4, heads, 0}, {4, heads, 0}}},
      {"a scale for each block", layers, tokens, {{1, heads * 64, 0}, {1, heads * 64, 0}, {4, 0, 2}}},
      {"a state", layers, tokens, {{2, 0, 3 * of(3, 100, 400)}, {4, 0, heads * 16 * 16}}},
      {"tokens and a state", layers, tokens, {{2, heads * 32, 0}, {2, heads * 32, 0}, {4, 0, of(4, 1, 99)}}},
  };
  for (Layout& layout : layouts) {
    while (layout.BlockBytes() < 256) ++layout.layers;  // what a checksum needs
  }
  return layouts;
}

// What one rank has: a pool of its own, copies of its own, and the arena that all share.
struct Rank {
  Rank(uint64_t seed, int64_t blocks, int64_t block_bytes, const TransferOptions& options)
      : content(RandomBytes(seed, blocks * block_bytes)), pool(content), transfers({pool.data(), blocks, block_bytes}, options) {}
  const Bytes content;
  DeviceArray<uint8_t> pool;
  Transfers transfers;
};

std::vector<int32_t> Shuffled(uint64_t seed, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  const auto draw = RandomInts(seed, count, 0, 1 << 20);
  for (size_t i = ids.size(); i-- > 1;) std::swap(ids[i], ids[static_cast<size_t>(draw[i]) % (i + 1)]);
  return ids;
}

// Ranks 0 and 1 export into slots of their own, and import each its own again, one by whole blocks, one by layers.
std::string Fault(const Layout& layout, uint64_t seed) {
  constexpr int32_t kBlocks = 12, kRanks = 2, kMoved = 9;
  const int64_t bytes = layout.BlockBytes(), slot = bytes + 256;
  const auto draw = RandomInts(seed, 8, 0, 1 << 20);
  TransferOptions options = Options(draw[0] % 2 == 0 ? 1 : 1 << 20);  // by the copy engine, or by the kernel
  options.batch_bytes = (1 + draw[1] % 5) * bytes;
  options.pin.chunk_bytes = draw[2] % 2 == 0 ? size_t{1} << 30 : 8192;
  Mapping arena(static_cast<size_t>((kRanks * kBlocks * slot + 4095) / 4096 * 4096));
  Bytes expected(arena.bytes());
  const auto places = Shuffled(seed + 1, kRanks * kBlocks);  // slots of both ranks, mixed
  const auto ids = Shuffled(seed + 2, kBlocks), targets = Shuffled(seed + 3, kBlocks);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::vector<uint64_t>> sums(kRanks, std::vector<uint64_t>(kMoved));
  std::vector<std::vector<int64_t>> offsets(kRanks);
  std::shared_ptr<HostArena> host = std::make_shared<HostArena>(arena.data(), arena.bytes(), options.pin);
  std::vector<int> arenas;
  const std::vector<int32_t> moved(ids.begin(), ids.begin() + kMoved), into(targets.begin(), targets.begin() + kMoved);
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<Rank>(seed + 10 + static_cast<uint64_t>(rank), kBlocks, bytes, options));
    arenas.push_back(ranks.back()->transfers.Adopt(host));
    for (int i = 0; i < kMoved; ++i) {
      offsets[static_cast<size_t>(rank)].push_back(places[static_cast<size_t>(rank * kBlocks + i)] * slot + 256);
      memcpy(expected.data() + offsets[static_cast<size_t>(rank)].back(), ranks.back()->content.data() + moved[static_cast<size_t>(i)] * bytes,
             static_cast<size_t>(bytes));
    }
  }
  std::string fault;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    if (ranks[rank]->transfers.Export(arenas[rank], moved, offsets[rank], sums[rank]).outcome != Outcome::kDone) fault = "an export";
    for (size_t i = 0; i < kMoved; ++i) {
      if (sums[rank][i] != HashOf(ranks[rank]->content.data() + moved[i] * bytes, bytes)) fault = "a checksum";
    }
  }
  if (memcmp(arena.data(), expected.data(), expected.size()) != 0) fault = "the arena's bytes";
  for (size_t rank = 0; rank < kRanks && fault.empty(); ++rank) {
    Rank& one = *ranks[rank];
    Bytes after = one.content;
    for (size_t i = 0; i < kMoved; ++i) memcpy(after.data() + into[i] * bytes, one.content.data() + moved[i] * bytes, static_cast<size_t>(bytes));
    std::vector<uint8_t> good(kMoved);
    if ((rank + seed) % 2 == 0) {
      one.transfers.Import(arenas[rank], into, offsets[rank], sums[rank], good);
    } else {
      auto import = one.transfers.ImportByLayer(arenas[rank], into, offsets[rank], sums[rank], layout.layers);
      gpu::Stream stream;
      for (int64_t layer = 0; layer < layout.layers; ++layer) import->BeforeLayer(layer, stream);
      import->Finish();
      good = import->good();
      Finish(stream);
    }
    if (good != std::vector<uint8_t>(kMoved, 1)) fault = "a verdict";
    if (one.pool.Download() != after) fault = "a block's bytes";
    // Another rank's bytes are not taken for its own.
    one.transfers.Import(arenas[rank], into, offsets[1 - rank], sums[rank], good);
    if (good != std::vector<uint8_t>(kMoved, 0)) fault = "the other rank's block";
  }
  for (size_t rank = 0; rank < kRanks; ++rank) ranks[rank]->transfers.Unregister(arenas[rank]);
  return fault;
}

KVTIER_CHECK(transfer_layouts) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    for (const Layout& layout : Layouts(RandomInts(100 * seed, 8, 0, 1 << 20))) {
      const std::string fault = Fault(layout, 1000 * seed);
      const std::string name = layout.name + ", " + std::to_string(layout.layers) + " layers of " + std::to_string(layout.LayerBytes());
      ExpectTrue("Transfers", name + (fault.empty() ? "" : ": " + fault + " is wrong"), fault.empty());
    }
  }
}

}  // namespace
}  // namespace kvtier::cuda::check
