// What may go wrong in a transfer, and what must not: deadlines that pass, hung and faulting devices, calls that run beside each
// other and beside a model's kernels, layers in their order.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "../kernels/kernels.h"
#include "transfer_world.h"

namespace kvtier::cuda::check {
namespace {

constexpr int64_t kShortUs = 100'000;

// True as soon as the condition holds; false after a minute.
template <class Condition>
bool Eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TransferOptions ShortDeadline(int64_t threshold_bytes) {
  TransferOptions options = Options(threshold_bytes);
  options.deadline_us = kShortUs;
  return options;
}

KVTIER_CHECK(transfer_quarantine) {
  for (const bool is_export : {true, false}) {
    const std::string call = is_export ? "Export" : "Import";
    World world(12, 4096, 12, ShortDeadline(1));
    const std::vector<int32_t> ids{1, 2, 3};
    const std::vector<int64_t> offsets{world.Slot(0), world.Slot(1), world.Slot(2)};
    std::vector<uint64_t> sums(3);
    std::vector<uint8_t> good(3, 1);
    // There may be time for it or not: what counts is that it happens once the machine lets it.
    if (!Eventually([&] { return world.transfers.Export(world.id, ids, offsets, sums).outcome == Outcome::kDone; })) throw std::runtime_error("no export");
    const auto run = [&](std::vector<int32_t> blocks, std::vector<int64_t> slots, const gpu::Event* after) {
      return is_export ? world.transfers.Export(world.id, blocks, slots, sums, after)
                       : world.transfers.Import(world.id, blocks, slots, sums, good, after);
    };
    uint64_t ticket = 0;
    {
      Gate gate;
      const auto late = run(ids, offsets, &gate.event);
      ticket = late.ticket;
      ExpectTrue(call, "a deadline that passes", late.outcome == Outcome::kTimedOut && late.blocks == 0 && ticket != 0 && !late.error.empty());
      if (!is_export) ExpectTrue(call, "nothing that is late is good", good == std::vector<uint8_t>{0, 0, 0});
      ExpectTrue(call, "blocks are in quarantine", world.transfers.QuarantinedBlocks() == ids && !world.transfers.Settled(ticket));
      ExpectTrue(call, "their blocks are refused", run({7, 2, 8}, {world.Slot(5), world.Slot(6), world.Slot(7)}, nullptr).outcome == Outcome::kRefused);
      const int64_t across = world.Slot(1) + 4096 - 16;
      ExpectTrue(call, "their slots are refused", run({7}, {across}, nullptr).outcome == Outcome::kRefused);
      ExpectTrue(call, "an arena in use stays", !world.transfers.Unregister(world.id));
      ExpectTrue(call, "others go on", Eventually([&] { return run({7, 8}, {world.Slot(5), world.Slot(6)}, nullptr).outcome == Outcome::kDone; }));
    }
    ExpectTrue(call, "the quarantine ends with the event", Eventually([&] { return world.transfers.Settled(ticket); }));
    ExpectTrue(call, "nothing is left in it", world.transfers.QuarantinedBlocks().empty());
    ExpectTrue(call, "its blocks can be had again", Eventually([&] { return run(ids, offsets, nullptr).outcome == Outcome::kDone; }));
  }
}

KVTIER_CHECK(transfer_lanes) {
  TransferOptions options = ShortDeadline(1);
  options.channels = 2;
  World world(12, 4096, 12, options);
  std::vector<uint64_t> sums(1);
  std::vector<uint8_t> good(1);
  {
    Gate gate;
    const auto stuck = [&](int32_t block) {
      return world.transfers.Export(world.id, std::vector{block}, std::vector{world.Slot(block)}, sums, &gate.event).outcome == Outcome::kTimedOut;
    };
    const bool both = stuck(1) && stuck(2);
    ExpectTrue("Export", "every channel can be late", both);
    const auto third = world.transfers.Export(world.id, std::vector{3}, std::vector{world.Slot(3)}, sums);
    ExpectTrue("Export", "no channel is left: refused in time", third.outcome == Outcome::kRefused && third.ticket == 0);
    // Imports have channels of their own.
    memcpy(world.arena.data() + world.Slot(4), world.content.data(), 4096);
    sums[0] = world.Sum(0);
    ExpectTrue("Import", "goes on beside exports that hang", Eventually([&] {
                 world.transfers.Import(world.id, std::vector{4}, std::vector{world.Slot(4)}, sums, good);
                 return good[0] == 1;
               }));
  }
  ExpectTrue("Export", "channels come back", Eventually([&] {
               return world.transfers.Export(world.id, std::vector{3}, std::vector{world.Slot(3)}, sums).outcome == Outcome::kDone;
             }));
}

// Copies end while the stream of checksums stands still.
KVTIER_CHECK(transfer_copies_wait_for_no_hash) {
  constexpr int64_t kBlockBytes = 4096;
  const Bytes content = RandomBytes(7, 4 * kBlockBytes);
  DeviceArray<uint8_t> pool(content);
  gpu::PinnedBuffer slots(content.size(), "a check's slots");
  gpu::Stream hash;
  const gpu::WaitAtEnd ending(hash, 60'000'000);
  CopyChannel channel(Direction::kExport, {pool.data(), 4, kBlockBytes}, 2, 2, {1, 2}, &hash);
  std::atomic<bool> open{false};
  hash.Host([&] {
    while (!open) std::this_thread::yield();
  });
  for (int64_t b = 0; b < 2; ++b) {
    CopyBatch& batch = channel.batch(b);
    batch.count = 2;
    for (int64_t i = 0; i < 2; ++i) {
      const auto at = static_cast<size_t>(i);
      batch.pool_offsets()[at] = batch.host_offsets()[at] = (2 * b + i) * kBlockBytes;
    }
    auto* view = static_cast<uint8_t*>(gpu::DeviceView(slots.data()));
    channel.Issue(batch, {slots.data(), view, static_cast<int64_t>(slots.bytes())}, nullptr, false);
    channel.StartHash(batch);
  }
  const bool copied = channel.batch(1).copied.Wait(60'000'000), hashed = channel.batch(0).hashed.Done();
  const bool there = memcmp(slots.data(), content.data(), content.size()) == 0;
  open = true;
  bool right = channel.batch(1).hashed.Wait(60'000'000);
  for (int64_t i = 0; i < 4; ++i) {
    right &= channel.batch(i / 2).sums.data<uint64_t>()[i % 2] == HashOf(content.data() + i * kBlockBytes, kBlockBytes);
  }
  ExpectTrue("CopyChannel", "copies end before their checksums", copied && !hashed && there);
  ExpectTrue("CopyChannel", "checksums beside copies", right);
}

KVTIER_CHECK(transfer_arguments) {
  World world(4, 4096, 4, Options(1));
  std::vector<uint64_t> sums(1);
  const auto throws = [&](int arena, int32_t block, int64_t offset) {
    try {
      world.transfers.Export(arena, std::vector{block}, std::vector{offset}, sums);
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  ExpectTrue("Export", "a block out of the pool", throws(world.id, 4, 0) && throws(world.id, -1, 0));
  ExpectTrue("Export", "a slot out of the arena", throws(world.id, 1, 4 * world.slot_bytes - 4095) && throws(world.id, 1, -16));
  ExpectTrue("Export", "an arena that is not there", throws(world.id + 1, 1, 0));
  ExpectTrue("Export", "nothing", world.transfers.Export(world.id, {}, {}, {}).outcome == Outcome::kDone);
}

// Threads that export and import, each its own blocks and slots, while kernels run on another stream.
KVTIER_CHECK(transfer_beside_compute) {
  constexpr int32_t kThreads = 4, kEach = 12;
  for (const int64_t threshold : {int64_t{1}, int64_t{1} << 20}) {
    World world(kThreads * kEach + 1, 8192, kThreads * kEach, Options(threshold));
    std::atomic<bool> right{true}, stop{false};
    std::thread decode([&] {
      gpu::Use(0);
      gpu::Stream stream(gpu::Stream::Priority::kNormal);
      DeviceArray<int64_t> place(std::vector<int64_t>{kThreads * kEach * 8192});
      DeviceArray<uint64_t> sum(size_t{1});
      while (!stop) {
        HashBlocks(stream, sum.data(), world.pool.data(), place.data(), 1, 8192);
        Finish(stream);
      }
      right = right && sum.Download()[0] == world.Sum(kThreads * kEach);
    });
    std::vector<std::thread> callers;
    for (int32_t t = 0; t < kThreads; ++t) {
      callers.emplace_back([&, t] {
        gpu::Use(0);
        std::vector<int32_t> ids(kEach);
        std::vector<int64_t> offsets;
        std::iota(ids.begin(), ids.end(), t * kEach);
        for (int32_t i = 0; i < kEach; ++i) offsets.push_back(world.Slot(t * kEach + (i * 5) % kEach));
        std::vector<uint64_t> sums(kEach);
        std::vector<uint8_t> good(kEach);
        for (int round = 0; round < 6; ++round) {
          bool ok = world.transfers.Export(world.id, ids, offsets, sums).outcome == Outcome::kDone;
          for (size_t i = 0; i < ids.size(); ++i) ok &= sums[i] == world.Sum(ids[i]) && world.SlotHolds(offsets[i], ids[i]);
          ok &= world.transfers.Import(world.id, ids, offsets, sums, good).outcome == Outcome::kDone;
          ok &= std::ranges::count(good, uint8_t{1}) == kEach;
          if (!ok) right = false;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    stop = true;
    decode.join();
    ExpectTrue("Transfers", threshold == 1 ? "beside compute, copy engine" : "beside compute, kernels",
               right && world.pool.Download() == world.content);
  }
}

// A slot's page that holds back whoever reads it until `seen` is set: so a copy of a later layer waits for the use of layer 0.
struct Withheld {
  uint8_t* page = nullptr;
  std::atomic<bool> seen{false}, in_order{false};
};
Withheld withheld;

void OnRead(int signal_number, siginfo_t* info, void*) {
  const auto* address = static_cast<uint8_t*>(info->si_addr);
  if (address < withheld.page || address >= withheld.page + 4096) {
    signal(signal_number, SIG_DFL);
    return;
  }
  for (int i = 0; i < 20'000 && !withheld.seen; ++i) usleep(1000);
  withheld.in_order = withheld.seen.load();
  mprotect(withheld.page, 4096, PROT_READ | PROT_WRITE);
}

KVTIER_CHECK(transfer_layers) {
  for (const int64_t threshold : {int64_t{1}, int64_t{1} << 20}) {
    const std::string path = threshold == 1 ? "copy engine: " : "kernel: ";
    constexpr int64_t kLayers = 10, kLayerBytes = 4096, kBlocks = 6;
    World world(2 * kBlocks, kLayers * kLayerBytes, kBlocks, Options(threshold));
    std::vector<int32_t> ids(kBlocks), targets(kBlocks);
    std::vector<int64_t> offsets;
    std::iota(ids.begin(), ids.end(), 0);
    std::iota(targets.begin(), targets.end(), static_cast<int32_t>(kBlocks));
    for (int64_t i = 0; i < kBlocks; ++i) offsets.push_back(i * world.slot_bytes);  // page-aligned
    std::vector<uint64_t> sums(kBlocks);
    world.transfers.Export(world.id, ids, offsets, sums);
    sums[2] ^= 1;

    DeviceArray<uint8_t> snapshot(static_cast<size_t>(kBlocks * kLayers * kLayerBytes));
    gpu::Stream compute;
    const bool emulated = gpu::Info().emulated;
    struct sigaction before {};
    if (emulated) {  // a GPU reads pinned pages by itself
      struct sigaction action {};
      action.sa_sigaction = OnRead;
      action.sa_flags = SA_SIGINFO;
      sigaction(SIGSEGV, &action, &before);
      withheld.seen = withheld.in_order = false;
      withheld.page = world.arena.data() + offsets[0] + 4 * kLayerBytes;  // of layer 4: four come together
      mprotect(withheld.page, 4096, PROT_NONE);
    }
    {
      auto import = world.transfers.ImportByLayer(world.id, targets, offsets, sums, kLayers);
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        import->BeforeLayer(layer, compute);
        compute.Copy2D(snapshot.data() + layer * kLayerBytes, kLayers * kLayerBytes,
                       world.pool.data() + kBlocks * kLayers * kLayerBytes + layer * kLayerBytes, kLayers * kLayerBytes, kLayerBytes, kBlocks);
        if (layer == 0) compute.Host([] { withheld.seen = true; });
      }
      Finish(compute);
      const TransferResult& result = import->Finish();
      ExpectTrue("ImportByLayer", path + "ends", result.outcome == Outcome::kDone && result.blocks == kBlocks);
      ExpectTrue("ImportByLayer", path + "finds the wrong checksum", import->good() == std::vector<uint8_t>{1, 1, 0, 1, 1, 1});
    }
    if (emulated) {
      sigaction(SIGSEGV, &before, nullptr);
      ExpectTrue("ImportByLayer", path + "layer 0 is used while layer 4 is still to come", withheld.in_order);
    }
    const Bytes seen = snapshot.Download();
    ExpectTrue("ImportByLayer", path + "each layer is there when its event fires",
               std::equal(seen.begin(), seen.end(), world.content.begin()));
  }
}

// Blocks so small that all layers come together, by the kernel: hashed as they pass, and each layer waits for them.
KVTIER_CHECK(transfer_layers_together) {
  constexpr int64_t kLayers = 8, kLayerBytes = 512, kBlocks = 6;
  World world(2 * kBlocks, kLayers * kLayerBytes, kBlocks, Options(1 << 20));
  std::vector<int32_t> ids(kBlocks), targets(kBlocks);
  std::vector<int64_t> offsets;
  std::iota(ids.begin(), ids.end(), 0);
  std::iota(targets.begin(), targets.end(), static_cast<int32_t>(kBlocks));
  for (int64_t i = 0; i < kBlocks; ++i) offsets.push_back(world.Slot(i));
  std::vector<uint64_t> sums(kBlocks);
  world.transfers.Export(world.id, ids, offsets, sums);
  sums[4] ^= 1;
  Gate gate;
  gpu::Stream compute;
  gpu::Event first_layer;
  auto import = world.transfers.ImportByLayer(world.id, targets, offsets, sums, kLayers, &gate.event);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    import->BeforeLayer(layer, compute);
    if (layer == 0) first_layer.Record(compute);
  }
  const bool early = first_layer.Done();
  gate.Open();
  const TransferResult& result = import->Finish();
  Finish(compute);
  ExpectTrue("ImportByLayer", "together: layers wait for the blocks", !early && first_layer.Done());
  ExpectTrue("ImportByLayer", "together: ends", result.outcome == Outcome::kDone && result.blocks == kBlocks);
  ExpectTrue("ImportByLayer", "together: finds the wrong checksum", import->good() == std::vector<uint8_t>{1, 1, 1, 1, 0, 1});
  const Bytes now = world.pool.Download();
  ExpectTrue("ImportByLayer", "together: bytes", std::equal(now.begin() + kBlocks * kLayers * kLayerBytes, now.end(), world.content.begin()));
}

KVTIER_CHECK(transfer_layers_elsewhere) {
  for (const char* why : {"not pinned", "more blocks than a layered import takes", "not aligned"}) {
    TransferOptions options = Options(why == std::string("not aligned") ? int64_t{1} << 20 : 1);
    options.layered_blocks = why[0] == 'm' ? 3 : 64;
    World world(8, 4 * 4096, 4, options);
    const bool pinned = why != std::string("not pinned");
    if (!pinned) {
      world.transfers.Unregister(world.id);
      gpu::RegisterHost(world.arena.data(), 4096);
      world.id = world.transfers.Register(world.arena.data(), world.arena.bytes()).arena;
    }
    const int64_t shift = why == std::string("not aligned") ? 8 : 0;
    const std::vector<int32_t> ids{0, 1, 2, 3}, targets{7, 4, 6, 5};
    const std::vector<int64_t> offsets{world.Slot(2) + shift, world.Slot(0) + shift, world.Slot(1) + shift, world.Slot(3) + shift};
    std::vector<uint64_t> sums(4);
    world.transfers.Export(world.id, ids, offsets, sums);
    auto import = world.transfers.ImportByLayer(world.id, targets, offsets, sums, 4);
    gpu::Stream compute;
    import->BeforeLayer(0, compute);
    const bool done = import->Finish().outcome == Outcome::kDone && import->good() == std::vector<uint8_t>(4, 1);
    const Bytes now = world.pool.Download();
    bool right = done;
    for (size_t i = 0; i < 4; ++i) {
      right &= std::equal(now.begin() + targets[i] * world.block_bytes, now.begin() + (targets[i] + 1) * world.block_bytes,
                          world.content.begin() + ids[i] * world.block_bytes);
    }
    ExpectTrue("ImportByLayer", why, right);
    import.reset();
    if (!pinned) gpu::UnregisterHost(world.arena.data());
  }
  World world(8, 4096, 4, ShortDeadline(1));
  std::vector<uint64_t> sums(1);
  uint64_t ticket = 0;
  {
    Gate gate;
    auto import = world.transfers.ImportByLayer(world.id, std::vector{5}, std::vector{world.Slot(1)}, sums, 4, &gate.event);
    const TransferResult& late = import->Finish();
    ticket = late.ticket;
    ExpectTrue("ImportByLayer", "a deadline that passes", late.outcome == Outcome::kTimedOut && import->good()[0] == 0);
    ExpectTrue("ImportByLayer", "its blocks are in quarantine", world.transfers.QuarantinedBlocks() == std::vector{5});
  }
  ExpectTrue("ImportByLayer", "the quarantine ends with the event", Eventually([&] { return world.transfers.Settled(ticket); }));
}

#if defined(KVTIER_EMULATED)
KVTIER_CHECK(transfer_device_faults) {
  const std::vector<int32_t> ids{1, 2, 3};
  std::vector<uint64_t> sums(3);
  static Mapping& arena = *new Mapping(64 << 10);  // a device that hangs may write to it as long as the process lives
  const std::vector<int64_t> offsets{256, 8192, 16384};
  {
    DeviceArray<uint8_t> pool(RandomBytes(1, 8 * 4096));
    Transfers transfers({pool.data(), 8, 4096}, ShortDeadline(1));
    const int id = transfers.Register(arena.data(), arena.bytes()).arena;
    gpu::Inject(gpu::Fault::kHang);
    const auto hung = transfers.Export(id, ids, offsets, sums);
    ExpectTrue("Export", "a device that hangs", hung.outcome == Outcome::kTimedOut && transfers.QuarantinedBlocks() == ids);
    ExpectTrue("Unregister", "a device that hangs", !transfers.Unregister(id) && !transfers.Settled(hung.ticket));
    // It ends, and neither it nor the pool waits for the device.
  }
  gpu::Inject(gpu::Fault::kNone);
  {
    static Mapping& other = *new Mapping(64 << 10);
    DeviceArray<uint8_t> pool(RandomBytes(1, 8 * 4096));
    Transfers transfers({pool.data(), 8, 4096}, Options(1));
    const int id = transfers.Register(other.data(), other.bytes()).arena;
    gpu::Inject(gpu::Fault::kIllegalAccess);
    bool threw = false, again = false;
    try {
      transfers.Export(id, ids, offsets, sums);
    } catch (const std::runtime_error&) {
      threw = true;
    }
    try {
      transfers.Export(id, std::vector{5}, std::vector<int64_t>{32768}, sums);
    } catch (const std::runtime_error&) {
      again = true;
    }
    gpu::Inject(gpu::Fault::kNone);
    ExpectTrue("Export", "an illegal access throws", threw && again);
    const auto kept = transfers.QuarantinedBlocks();
    ExpectTrue("Export", "what was under way is never given back", std::equal(ids.begin(), ids.end(), kept.begin(), kept.begin() + 3));
  }
  {
    DeviceArray<uint8_t> pool(RandomBytes(1, 8 * 4096));
    gpu::Inject(gpu::Fault::kOutOfMemory);
    bool threw = false;
    try {
      Transfers transfers({pool.data(), 8, 4096}, Options(1));
    } catch (const std::runtime_error&) {
      threw = true;
    }
    gpu::Inject(gpu::Fault::kNone);
    ExpectTrue("Transfers", "no memory for its buffers", threw);
  }
}
#endif

}  // namespace
}  // namespace kvtier::cuda::check
