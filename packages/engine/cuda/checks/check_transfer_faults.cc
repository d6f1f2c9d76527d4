// What may go wrong in a transfer, and what must not: deadlines that pass, hung and faulting devices, calls that run beside each
// other and beside a model's kernels. Imports by layers: check_transfer_layers.cc.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "../kernels/kernels.h"
#include "../transfer/kernel_loading.h"
#include "transfer_world.h"

namespace kvtier::cuda::check {
namespace {


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
  LoadTransferKernels();
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
