// Blocks over the bus: the kernels that hash and copy them, the plan of copies, and whole transfers there and back. Exact: bytes
// and checksums are equal or not. What may go wrong in a transfer: check_transfer_faults.cc.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "../kernels/kernels.h"
#include "../transfer/copy_plan.h"
#include "../transfer/paths.h"
#include "transfer_world.h"

namespace kvtier::cuda::check {
namespace {

KVTIER_CHECK(transfer_hash) {
  for (int64_t bytes : {256, 272, 1008, 1024, 1040, 2048, 16 << 10, 32 << 10, (32 << 10) + 16, (33 << 10) - 16, 33 << 10, 65 << 10,
                        (96 << 10) + 1008, 200000}) {
    const int64_t blocks = bytes > 64 << 10 ? 3 : 19;
    const int grid = bytes > 64 << 10 ? 2 : 16;  // fewer than blocks
    const int64_t stride = bytes + 48, slot = bytes + 80;
    const Bytes content = RandomBytes(static_cast<uint64_t>(bytes), blocks * stride);
    std::vector<int64_t> offsets, slots;
    for (int64_t i = 0; i < blocks; ++i) {
      offsets.push_back((blocks - 1 - i) * stride);
      slots.push_back(i * 7 % blocks * slot + 32);
    }
    DeviceArray<uint8_t> pool(content);
    DeviceArray<int64_t> places(offsets), host_places(slots);
    DeviceArray<uint64_t> sums(offsets.size()), apart(offsets.size()), sent(offsets.size()), arrived(offsets.size());
    DeviceArray<uint64_t> rows(static_cast<size_t>(HashRowsBytes(blocks, bytes) / 8));
    gpu::PinnedBuffer host(static_cast<size_t>(blocks * slot), "check");
    memset(host.data(), 0xee, host.bytes());
    DeviceArray<uint8_t> back(Bytes(content.size(), 0xdd));
    auto* view = static_cast<uint8_t*>(gpu::DeviceView(host.data()));
    gpu::Stream stream;
    HashBlocks(stream, sums.data(), pool.data(), places.data(), blocks, bytes, grid);
    HashBlocksApart(stream, apart.data(), pool.data(), places.data(), blocks, bytes, rows.data(), 2);
    ExportBlocks(stream, sent.data(), view, pool.data(), places.data(), host_places.data(), blocks, bytes, grid);
    ImportBlocks(stream, arrived.data(), back.data(), view, places.data(), host_places.data(), blocks, bytes, grid);
    Finish(stream);
    std::vector<uint64_t> expected;
    Bytes there(content.size(), 0xdd), here(host.bytes(), 0xee);
    for (size_t i = 0; i < offsets.size(); ++i) {
      const auto block = content.begin() + offsets[i];
      expected.push_back(HashOf(content.data() + offsets[i], bytes));
      std::copy(block, block + bytes, there.begin() + offsets[i]);
      std::copy(block, block + bytes, here.begin() + slots[i]);
    }
    const std::string shape = std::to_string(blocks) + " x " + std::to_string(bytes);
    ExpectTrue("HashBlocks", shape, sums.Download() == expected);
    ExpectTrue("HashBlocksApart", shape, apart.Download() == expected);
    ExpectTrue("ExportBlocks", shape, sent.Download() == expected && memcmp(here.data(), host.data(), here.size()) == 0);
    ExpectTrue("ImportBlocks", shape, arrived.Download() == expected && back.Download() == there);
  }
}

KVTIER_CHECK(transfer_pieces) {
  for (int64_t bytes : {16, 4096, 4112, 12288 + 32, 20000}) {
    const int64_t pieces = 7;
    const Bytes content = RandomBytes(3, pieces * bytes);
    DeviceArray<uint8_t> pool(content), back(content.size());
    gpu::PinnedBuffer host(static_cast<size_t>(pieces * (bytes + 80)), "check");
    memset(host.data(), 0xee, host.bytes());
    std::vector<int64_t> pool_offsets, host_offsets;
    for (int64_t i = 0; i < pieces; ++i) {
      pool_offsets.push_back(i * bytes);
      host_offsets.push_back((pieces - 1 - i) * (bytes + 80) + 32);
    }
    DeviceArray<int64_t> from(pool_offsets), to(host_offsets);
    gpu::Stream stream;
    auto* view = static_cast<uint8_t*>(gpu::DeviceView(host.data()));
    GatherPieces(stream, view, pool.data(), from.data(), to.data(), pieces, bytes, 2);
    ScatterPieces(stream, back.data(), view, from.data(), to.data(), pieces, bytes, 3);
    Finish(stream);
    bool gathered = true;
    for (int64_t i = 0; i < pieces; ++i) {
      const uint8_t* slot = host.data() + i * (bytes + 80);
      gathered &= memcmp(slot + 32, content.data() + (pieces - 1 - i) * bytes, static_cast<size_t>(bytes)) == 0;
      gathered &= std::all_of(slot, slot + 32, [](uint8_t x) { return x == 0xee; });
      gathered &= std::all_of(slot + 32 + bytes, slot + 80 + bytes, [](uint8_t x) { return x == 0xee; });
    }
    ExpectTrue("GatherPieces", std::to_string(bytes), gathered);
    ExpectTrue("ScatterPieces", std::to_string(bytes), back.Download() == content);
  }
}

// Every byte of every piece once, nothing over a chunk's border, and equal distances put together.
KVTIER_CHECK(transfer_plan) {
  bool exact = true, inside = true, steps = true;
  int64_t runs_seen = 0, pieces_seen = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const auto draw = RandomInts(seed, 64, 0, 1 << 20);
    const int64_t bytes = 16 * (1 + draw[0] % 40), chunk_bytes = 1024 * (1 + draw[1] % 3), pieces = draw[2] % 12;
    std::vector<int64_t> pool, host;
    for (int64_t i = 0; i < pieces; ++i) {
      const bool regular = draw[static_cast<size_t>(4 + i)] % 4 != 0 && i > 0;
      pool.push_back(regular ? pool.back() + bytes * (1 + draw[3] % 2) : bytes * (40 + draw[static_cast<size_t>(20 + i)] % 20));
      host.push_back(regular ? host.back() + bytes + 16 : 16 * (draw[static_cast<size_t>(40 + i)] % 300));
    }
    std::vector<std::pair<int64_t, int64_t>> wanted, covered;
    for (size_t i = 0; i < pool.size(); ++i) {
      for (int64_t byte = 0; byte < bytes; ++byte) wanted.emplace_back(pool[i] + byte, host[i] + byte);
    }
    const int64_t max_pitch_bytes = draw[3] % 2 == 0 ? INT64_MAX : bytes + draw[1] % 2048;
    const auto runs = PlanRuns(pool, host, bytes, {chunk_bytes, draw[3] % 5 == 0 ? 0 : 1 << 20, max_pitch_bytes});
    for (const Run& run : runs) {
      const int64_t last = run.host_offset + (run.rows - 1) * run.host_stride + run.bytes - 1;
      inside &= run.host_offset / chunk_bytes == last / chunk_bytes;
      inside &= run.rows == 1 || (run.pool_stride >= run.bytes && run.host_stride >= run.bytes);
      steps &= run.rows == 1 || std::max(run.pool_stride, run.host_stride) <= max_pitch_bytes;
      for (int64_t row = 0; row < run.rows; ++row) {
        for (int64_t byte = 0; byte < run.bytes; ++byte) {
          covered.emplace_back(run.pool_offset + row * run.pool_stride + byte, run.host_offset + row * run.host_stride + byte);
        }
      }
    }
    exact &= covered == wanted;
    runs_seen += static_cast<int64_t>(runs.size());
    pieces_seen += pieces;
  }
  ExpectTrue("PlanRuns", "covers each byte once, in order", exact);
  ExpectTrue("PlanRuns", "stays inside of chunks", inside);
  ExpectTrue("PlanRuns", "steps no further than the copy engine can", steps);
  ExpectTrue("PlanRuns", "puts pieces together", runs_seen < pieces_seen);
}

// Neighbours in the arena whose blocks are gigabytes apart in the pool: the copy engine takes no such pitch.
KVTIER_CHECK(transfer_far_blocks) {
  constexpr int64_t kBlockBytes = 64 << 10, kBlocks = (int64_t{5} << 29) / kBlockBytes;
#if defined(KVTIER_EMULATED)
  const Mapping pool(static_cast<size_t>(kBlocks * kBlockBytes));  // of which three blocks are touched
#else
  const gpu::Buffer pool(static_cast<size_t>(kBlocks * kBlockBytes), "a check's pool");
#endif
  const Mapping arena(1 << 20);
  Transfers transfers({pool.data(), kBlocks, kBlockBytes}, Options(1));
  const int id = transfers.Register(arena.data(), arena.bytes()).arena;
  const std::vector<int32_t> ids{0, static_cast<int32_t>(kBlocks) - 1, 7};
  const std::vector<int64_t> offsets{0, 2 * kBlockBytes, 4 * kBlockBytes};
  const Bytes content = RandomBytes(5, 3 * kBlockBytes);
  std::vector<uint64_t> sums(3);
  for (size_t i = 0; i < 3; ++i) CopyNow(pool.data() + ids[i] * kBlockBytes, content.data() + static_cast<int64_t>(i) * kBlockBytes, kBlockBytes);
  bool right = transfers.Export(id, ids, offsets, sums).outcome == Outcome::kDone;
  for (size_t i = 0; i < 3; ++i) {
    const uint8_t* block = content.data() + static_cast<int64_t>(i) * kBlockBytes;
    right &= memcmp(arena.data() + offsets[i], block, kBlockBytes) == 0 && sums[i] == HashOf(block, kBlockBytes);
  }
  ExpectTrue("Export", "blocks gigabytes apart", right);
  std::vector<uint8_t> good(3);
  transfers.Import(id, ids, offsets, sums, good);
  ExpectTrue("Import", "blocks gigabytes apart", good == std::vector<uint8_t>(3, 1));
  transfers.Unregister(id);
}

KVTIER_CHECK(transfer_paths) {
  const PathRate engine_wins[] = {{16, 1, 10}, {64, 4, 10}, {256, 9.6, 10}, {1024, 12, 10}};
  const PathRate never[] = {{16, 1, 10}, {64, 12, 10}, {256, 9, 10}};
  const PathRate always[] = {{16, 10, 10}, {64, 11, 10}};
  ExpectTrue("ChooseThreshold", "a tie is the copy engine's", ChooseThreshold(engine_wins) == 256);
  ExpectTrue("ChooseThreshold", "kernel wins at the top", ChooseThreshold(never) == INT64_MAX);
  ExpectTrue("ChooseThreshold", "copy engine wins everywhere", ChooseThreshold(always) == 16);
  std::vector<PathRate> rates;
  const PathChoice choice = MeasurePaths(1 << 20, &rates);
  ExpectTrue("MeasurePaths", "measures", rates.size() == 4 && rates[0].engine_rate > 0 && rates[3].kernel_rate > 0 && choice.multiprocessors > 0);
}

// Beside the model's steps the copy engine moves what kernels would otherwise; from batch to batch.
KVTIER_CHECK(transfer_beside_steps) {
  constexpr int32_t kBlocks = 10;  // two batches
  bool alone = false;
  TransferOptions options = Options(1 << 20);
  options.alone = [&] { return alone; };
  World world(kBlocks, 16 << 10, kBlocks, options);
  std::vector<int32_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<int64_t> offsets;
  for (const int32_t id : ids) offsets.push_back(world.Slot(id));
  std::vector<uint64_t> sums(kBlocks);
  std::vector<uint8_t> good(kBlocks);
  const auto by_kernel = [&] {
    const uint64_t before = world.transfers.Counts().kernel_blocks;
    const bool done = world.transfers.Export(world.id, ids, offsets, sums).outcome == Outcome::kDone &&
                      world.transfers.Import(world.id, ids, offsets, sums, good).outcome == Outcome::kDone;
    if (!done || std::ranges::count(good, uint8_t{0}) > 0) throw std::runtime_error("a block arrived wrong");
    return world.transfers.Counts().kernel_blocks - before;
  };
  ExpectTrue("Transfers", "by the copy engine beside steps", by_kernel() == 0);
  alone = true;
  ExpectTrue("Transfers", "by kernels alone", by_kernel() == 2 * kBlocks);
  World tiny(1, 256, 1, Options(1));
  std::vector<uint64_t> sum(1);
  tiny.transfers.Export(tiny.id, std::vector{0}, std::vector{tiny.Slot(0)}, sum);
  ExpectTrue("Transfers", "what is above the threshold by the copy engine", tiny.transfers.Counts().kernel_blocks == 0);
}

// There and back over both paths, every size class, ragged slots, chunks smaller than a slot, without pins.
KVTIER_CHECK(transfer_round_trip) {
  struct Shape {
    const char* name;
    int64_t block_bytes, threshold_bytes;
    size_t chunk_bytes;
    bool pinned;
    int64_t shift;  // of the slots, so that they are not aligned
  };
  const Shape shapes[] = {
      {"kernel 256", 256, 1 << 20, 1 << 30, true, 0},        {"kernel 16 KiB", 16 << 10, 1 << 20, 1 << 30, true, 0},
      {"kernel 64 KiB", 64 << 10, 1 << 20, 1 << 30, true, 0}, {"kernel, chunks of 8 KiB", 16 << 10, 1 << 20, 8192, true, 0},
      {"engine 16 KiB", 16 << 10, 1, 1 << 30, true, 0},      {"engine 128 KiB", 128 << 10, 1, 1 << 30, true, 0},
      {"engine, chunks of 8 KiB", 16 << 10, 1, 8192, true, 0}, {"engine 256 KiB", 256 << 10, 1, 1 << 30, true, 0}, {"not aligned", 4096, 1 << 20, 1 << 30, true, 8},
      {"not pinned 16 KiB", 16 << 10, 1 << 20, 1 << 30, false, 0}, {"not pinned 128 KiB", 128 << 10, 1, 1 << 30, false, 0},
  };
  for (const Shape& shape : shapes) {
    TransferOptions options = Options(shape.threshold_bytes);
    options.pin.chunk_bytes = shape.chunk_bytes;
    options.pin.threads = 3;
    options.stage_bytes = 40 << 10;
    const int32_t blocks = 24;
    World world(blocks, shape.block_bytes, blocks, options);
    if (!shape.pinned) {  // what is registered already is refused
      world.transfers.Unregister(world.id);
      gpu::RegisterHost(world.arena.data() + 4096, 4096);
      const auto registered = world.transfers.Register(world.arena.data(), world.arena.bytes());
      world.id = registered.arena;
      ExpectTrue("Transfers", std::string(shape.name) + ": says why it is not pinned", !registered.pinned && !registered.refusal.empty());
    }
    std::vector<int32_t> ids;
    std::vector<int64_t> offsets;
    for (int32_t i = 0; i < 18; ++i) {
      ids.push_back((i * 7 + (i > 9 ? 1 : 0)) % blocks);
      offsets.push_back(world.Slot((i * 5) % blocks) + shape.shift);
    }
    std::vector<uint64_t> sums(ids.size());
    const auto exported = world.transfers.Export(world.id, ids, offsets, sums);
    bool right = exported.outcome == Outcome::kDone && exported.blocks == 18;
    for (size_t i = 0; i < ids.size(); ++i) right &= world.SlotHolds(offsets[i], ids[i]) && sums[i] == world.Sum(ids[i]);
    ExpectTrue("Export", shape.name, right);

    // Back into other blocks, one byte of one slot and one checksum changed.
    world.arena.data()[offsets[4] + shape.block_bytes - 1] ^= 1;
    sums[11] ^= 1ull << 63;
    std::vector<int32_t> targets(ids);
    std::ranges::reverse(targets);
    std::vector<uint8_t> good(ids.size(), 9);
    const auto imported = world.transfers.Import(world.id, targets, offsets, sums, good);
    bool verdicts = imported.outcome == Outcome::kDone, arrived = true;
    const Bytes now = world.pool.Download();
    for (size_t i = 0; i < ids.size(); ++i) {
      verdicts &= good[i] == (i == 4 || i == 11 ? 0 : 1);
      if (i == 4) continue;
      arrived &= memcmp(now.data() + targets[i] * shape.block_bytes, world.content.data() + ids[i] * shape.block_bytes,
                        static_cast<size_t>(shape.block_bytes)) == 0;
    }
    ExpectTrue("Import", std::string(shape.name) + ": verdicts", verdicts);
    ExpectTrue("Import", std::string(shape.name) + ": bytes", arrived);
    ExpectTrue("Transfers", std::string(shape.name) + ": counts", world.transfers.Counts().exported_blocks == 18 &&
                                                                          world.transfers.Counts().imported_blocks == 18 && world.transfers.Counts().bad_blocks == 2);
    if (!shape.pinned) gpu::UnregisterHost(world.arena.data() + 4096);
  }
}

}  // namespace
}  // namespace kvtier::cuda::check
