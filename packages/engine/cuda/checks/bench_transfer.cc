// Transfers at the sizes of real blocks: each against one pinned copy of the same bytes, timed around it in the same run; alone,
// and while a decode-like load runs (skinny matrix products that read weights at the memory's speed), whose slowdown is
// reported beside. Rounds are paired: copy, transfer, copy, transfer; medians. What an import has to bring is not there before it, and its checksums
// are looked at: one that brings nothing has no figure.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../kernels/kernels.h"
#include "../transfer/transfers.h"
#include "bench_arena.h"

namespace kvtier::cuda::bench {
namespace {

constexpr int kRounds = 15;
constexpr int64_t kLoadDeadlineUs = 60'000'000;

// What decode does to the memory: one row through a gate-up matrix of 8B shape, again and again, from its own thread.
class DecodeLoad {
 public:
  DecodeLoad() {
    Finish(stream_);
    thread_ = std::thread([this] {
      gpu::Use(0);
      while (!stop_) {
        const double us = Round();
        if (!listening_) continue;
        rounds_.push_back(us);
        ++heard_;
      }
    });
  }
  ~DecodeLoad() {
    stop_ = true;
    thread_.join();
  }
  // The median round while `work` runs, again and again until there are some.
  template <class Work>
  double During(const Work& work) {
    listening_ = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a round that began before is over
    rounds_.clear();
    heard_ = 0;
    listening_ = true;
    do {
      work();
    } while (heard_ < 3);
    listening_ = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return Median(rounds_);
  }

 private:
  static constexpr int kLaunches = 32;  // as many layers

  double Round() {
    gpu::Event from(true), to(true);
    from.Record(stream_);
    for (int i = 0; i < kLaunches; ++i) {
      const GemmArgs args{out_.data(), in_.data(), weight_.data(), 1, 2 * kIntermediate, kHidden, 2 * kIntermediate, kHidden, false, false};
      GemmOurs(stream_, NumberType::kBf16, args);
    }
    to.Record(stream_);
    if (!to.Wait(kLoadDeadlineUs)) throw std::runtime_error("the decode load did not end within 60 s");
    return gpu::Event::ElapsedUs(from, to);
  }

  gpu::Buffer weight_{static_cast<size_t>(2 * kIntermediate * kHidden * 2), "decode load"};
  gpu::Buffer in_{static_cast<size_t>(kHidden * 2), "decode load"}, out_{static_cast<size_t>(2 * kIntermediate * 2), "decode load"};
  gpu::Stream stream_;
  std::atomic<bool> stop_{false}, listening_{false};
  std::atomic<int> heard_{0};
  std::vector<double> rounds_;
  std::thread thread_;
};

TransferOptions Alone(bool alone) {
  TransferOptions options;
  options.alone = [alone] { return alone; };
  return options;
}

struct Bench {
  // alone: nothing else runs on the GPU.
  Bench(int64_t block_bytes, int64_t blocks, bool alone)
      : bytes(block_bytes * blocks),
        slot_bytes((block_bytes + 256 + 4095) / 4096 * 4096),
        pool(static_cast<size_t>(bytes), "bench"),
        straight(static_cast<size_t>(bytes), "bench"),
        arena(static_cast<size_t>(slot_bytes * blocks)),
        transfers({pool.data(), blocks, block_bytes}, Alone(alone)),
        id(Registered(transfers.Register(arena.data(), arena.bytes()))),
        shape(std::to_string(block_bytes >> 10) + " KiB x " + std::to_string(blocks)),
        ids(static_cast<size_t>(blocks)),
        sums(static_cast<size_t>(blocks)),
        good(static_cast<size_t>(blocks)) {
    std::iota(ids.begin(), ids.end(), 0);
    // Blocks and slots of a system that has run for a while: in no order.
    for (size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[(i * 2654435761u) % (i + 1)]);
    for (int64_t i = 0; i < blocks; ++i) offsets.push_back(i * slot_bytes + 256);
    for (size_t i = offsets.size() - 1; i > 0; --i) std::swap(offsets[i], offsets[(i * 40503u + 7) % (i + 1)]);
    Fill();
    Export();
  }
  ~Bench() { transfers.Unregister(id); }

  void Export() { Require(transfers.Export(id, ids, offsets, sums)); }
  void Import() {
    Require(transfers.Import(id, ids, offsets, sums, good));
    RequireGood(good);
  }
  void ImportByLayer() {
    const auto import = transfers.ImportByLayer(id, ids, offsets, sums, 32);
    Require(import->Finish());
    RequireGood(import->good());
  }
  void Fill() {
    FillRandom(stream, NumberType::kBf16, pool.data(), bytes / 2, 1, 1, 0);
    Finish(stream);
  }
  // No block is any more what it was.
  void Spoil() {
    stream.Set(pool.data(), 0x5a, static_cast<size_t>(bytes));
    Finish(stream);
  }
  void Straight(bool to_host) {
    stream.Copy(to_host ? straight.data() : pool.data(), to_host ? pool.data() : straight.data(), static_cast<size_t>(bytes));
    Finish(stream);
  }

  // Medians of paired rounds: the straight copy, the transfer. Into a pool that was spoiled between them, where it is one into the pool.
  template <class Work>
  std::pair<double, double> Pair(bool to_host, const Work& work) {
    std::vector<double> straight_us, transfer_us;
    for (int round = 0; round <= Rounds(kRounds); ++round) {
      const double a = WallUs([&] { Straight(to_host); });
      if (!to_host) Spoil();
      const double b = WallUs(work);
      if (round == 0) continue;
      straight_us.push_back(a);
      transfer_us.push_back(b);
    }
    return {Median(straight_us), Median(transfer_us)};
  }

  const int64_t bytes, slot_bytes;
  gpu::Buffer pool;
  gpu::PinnedBuffer straight;
  Shared arena;
  Transfers transfers;
  const int id;
  const std::string shape;
  std::vector<int32_t> ids;
  std::vector<int64_t> offsets;
  std::vector<uint64_t> sums;
  std::vector<uint8_t> good;
  gpu::Stream stream;
};

constexpr const char* kPeer = "one pinned copy";

KVTIER_BENCH(transfer) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{2 << 20, Scaled(256)}, {64 << 10, Scaled(4096)}, {16 << 10, Scaled(8192)}};
  for (const auto& [block_bytes, blocks] : kShapes) {
    Bench bench(block_bytes, blocks, true);
    const auto [out_us, export_us] = bench.Pair(true, [&] { bench.Export(); });
    ReportUs("export", bench.shape, export_us, out_us, kPeer);
    const auto [in_us, import_us] = bench.Pair(false, [&] { bench.Import(); });
    ReportUs("import", bench.shape, import_us, in_us, kPeer);
    const auto [layered_in_us, layered_us] = bench.Pair(false, [&] { bench.ImportByLayer(); });
    ReportUs("import by layer", bench.shape, layered_us, layered_in_us, kPeer);
  }
}

KVTIER_BENCH(transfer_while_decoding) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{2 << 20, Scaled(256)}, {64 << 10, Scaled(4096)}, {16 << 10, Scaled(8192)}};
  for (const auto& [block_bytes, blocks] : kShapes) {
    Bench bench(block_bytes, blocks, false);
    const double out_us = bench.Pair(true, [] {}).first, in_us = bench.Pair(false, [] {}).first;
    bench.Fill();
    bench.Export();
    DecodeLoad load;
    const double alone_us = load.During([] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); });
    double export_us = 0, import_us = 0;
    const auto median = [](const auto& work) {
      std::vector<double> all;
      for (int round = 0; round < 2 * Rounds(kRounds); ++round) all.push_back(WallUs(work));
      return Median(all);
    };
    const double beside_export_us = load.During([&] { export_us = median([&] { bench.Export(); }); });
    bench.Spoil();  // once: each time would take the memory's speed from the decodes
    const double beside_import_us = load.During([&] { import_us = median([&] { bench.Import(); }); });
    const std::string of = block_bytes >= 1 << 20 ? "" : " of small blocks";
    ReportUs("export" + of + " while decoding", bench.shape, export_us, out_us, "one pinned copy, alone");
    ReportUs("import" + of + " while decoding", bench.shape, import_us, in_us, "one pinned copy, alone");
    ReportUs("decode load beside exports", "32 x 1x28672x4096, " + bench.shape, beside_export_us, alone_us, "alone");
    ReportUs("decode load beside imports", "32 x 1x28672x4096, " + bench.shape, beside_import_us, alone_us, "alone");
  }
}

// What keeps up with the bus costs nothing: it runs beside the copies.
KVTIER_BENCH(transfer_hash) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{2 << 20, 16}, {2 << 20, 1}, {64 << 10, 256}, {16 << 10, 1024}};
  for (const auto& [block_bytes, blocks] : kShapes) {
    const auto bytes = static_cast<size_t>(block_bytes * blocks);
    gpu::Buffer pool(bytes, "bench"), places(static_cast<size_t>(8 * blocks), "bench"), sums(static_cast<size_t>(8 * blocks), "bench");
    gpu::PinnedBuffer host(bytes, "bench"), offsets(places.bytes(), "bench");
    for (int64_t i = 0; i < blocks; ++i) offsets.data<int64_t>()[i] = i * block_bytes;
    gpu::Stream stream;
    stream.Copy(places.data(), offsets.data(), places.bytes());
    const double us = TimeUs(stream, [&] { HashBlocks(stream, sums.data<uint64_t>(), pool.data(), places.data<int64_t>(), blocks, block_bytes); });
    const double bus_us = TimeUs(stream, [&] { stream.Copy(host.data(), pool.data(), bytes); });
    ReportUs("hash", std::to_string(block_bytes >> 10) + " KiB x " + std::to_string(blocks), us, bus_us, kPeer);
  }
}

KVTIER_BENCH(transfer_pinning) {
  Shared arena(size_t{4} << (kTiny ? 24 : 30));
  const double whole_us = WallUs([&] { gpu::RegisterHost(arena.data(), arena.bytes()); });
  gpu::UnregisterHost(arena.data());
  PinOptions options;
  options.chunk_bytes = size_t{512} << (kTiny ? 14 : 20);
  const HostArena pinned(arena.data(), arena.bytes(), options);
  if (!pinned.pinned()) throw std::runtime_error(pinned.refusal());
  ReportUs("pin an arena of 4 GiB", "in chunks of 512 MiB", pinned.pin_seconds() * 1e6, whole_us, "in one piece");
}

}  // namespace
}  // namespace kvtier::cuda::bench
