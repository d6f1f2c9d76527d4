// Imports layer by layer: each layer is there when its event fires, before the last ones have come; verdicts are those of whole blocks; where
// layers cannot be had apart, all comes at once.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "transfer_world.h"

namespace kvtier::cuda::check {
namespace {

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

// Blocks in no order are too many slices for the copy engine: the kernel brings them, by layer all the same. In order they are few.
KVTIER_CHECK(transfer_layers_in_no_order) {
  constexpr int64_t kLayers = 16, kLayerBytes = 4096;
  constexpr int32_t kBlocks = 300;
  TransferOptions options = Options(1);
  options.layered_blocks = kBlocks;
  World world(2 * kBlocks, kLayers * kLayerBytes, kBlocks, options);
  for (const bool in_order : {true, false}) {
    std::vector<int32_t> ids(kBlocks), targets(kBlocks);
    std::vector<int64_t> offsets;
    std::iota(ids.begin(), ids.end(), 0);
    std::iota(targets.begin(), targets.end(), kBlocks);
    for (int32_t i = 0; i < kBlocks; ++i) offsets.push_back(world.Slot(i));
    for (int32_t i = kBlocks - 1; i > 0 && !in_order; --i) std::swap(offsets[static_cast<size_t>(i)], offsets[static_cast<size_t>(i * 7919 % (i + 1))]);
    for (int32_t i = 1; i < kBlocks && !in_order; i += 2) std::swap(offsets[static_cast<size_t>(i)], offsets[static_cast<size_t>(i - 1)]);
    std::vector<uint64_t> sums(kBlocks);
    world.transfers.Export(world.id, ids, offsets, sums);
    const uint64_t before = world.transfers.Counts().kernel_blocks;
    auto import = world.transfers.ImportByLayer(world.id, targets, offsets, sums, kLayers);
    const bool good = import->Finish().outcome == Outcome::kDone && import->good() == std::vector<uint8_t>(kBlocks, 1);
    const Bytes now = world.pool.Download();
    const bool there = std::equal(now.begin() + kBlocks * world.block_bytes, now.end(), world.content.begin());
    const auto by_kernel = static_cast<int64_t>(world.transfers.Counts().kernel_blocks - before);
    ExpectTrue("ImportByLayer", std::string(in_order ? "in order" : "in no order") + ": arrives", good && there);
    ExpectTrue("ImportByLayer", in_order ? "in order: by the copy engine" : "in no order: by the kernel", by_kernel == (in_order ? 0 : kBlocks));
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

}  // namespace
}  // namespace kvtier::cuda::check
