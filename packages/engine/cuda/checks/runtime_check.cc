// The runtime keeps what gpu.h promises; the same on the emulator and on a GPU. Faults need the emulator.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "runtime_kernels.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

constexpr int64_t kSecondUs = 1'000'000;
constexpr int32_t kCount = 10'000;

std::vector<int32_t> Numbers(int32_t first) {
  std::vector<int32_t> values(kCount);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// True when `work` throws the runtime's one line with `part` in it.
template <class Work>
bool Throws(const Work& work, const char* part) {
  try {
    work();
    return false;
  } catch (const std::runtime_error& error) {
    const bool one_line = strchr(error.what(), '\n') == nullptr && strncmp(error.what(), "GPU: ", 5) == 0;
    if (one_line && strstr(error.what(), part) != nullptr) return true;
    fprintf(stderr, "another message than expected: %s\n", error.what());
    return false;
  }
}

KVTIER_CHECK(copies) {
  gpu::Stream stream;
  gpu::PinnedBuffer host(kCount * 4, "host"), back(kCount * 4, "back");
  const auto numbers = Numbers(7);
  memcpy(host.data(), numbers.data(), kCount * 4);
  gpu::Buffer a(kCount * 4, "a"), b(kCount * 4, "b");
  stream.Copy(a.data(), host.data(), kCount * 4);
  stream.Copy(b.data(), a.data(), kCount * 4);
  stream.Copy(back.data(), b.data(), kCount * 4);
  Finish(stream);
  ExpectTrue("Copy", "host, device, device, host", memcmp(back.data(), numbers.data(), kCount * 4) == 0);

  stream.Set(b.data(), 0x5a, 100);
  stream.Copy(back.data(), b.data(), 104);
  Finish(stream);
  const uint8_t* bytes = back.data();
  ExpectTrue("Set", "100 bytes", bytes[0] == 0x5a && bytes[99] == 0x5a && memcmp(bytes + 100, &numbers[25], 4) == 0);

  // 10 rows of 12 bytes, 40 apart, to rows 16 apart.
  stream.Set(a.data(), 0, 10 * 16);
  stream.Copy2D(a.data(), 16, host.data(), 40, 12, 10);
  stream.Copy(back.data(), a.data(), 10 * 16);
  Finish(stream);
  bool equal = true;
  for (int row = 0; row < 10; ++row) {
    for (int i = 0; i < 4; ++i) equal = equal && back.data<int32_t>()[row * 4 + i] == (i == 3 ? 0 : 7 + row * 10 + i);
  }
  ExpectTrue("Copy2D", "10 x 12 bytes", equal);
}

KVTIER_CHECK(launch) {
  gpu::Stream stream;
  DeviceArray<int32_t> values(Numbers(0));
  LaunchAdd(stream, values.data(), kCount, 5);
  Finish(stream);
  ExpectTrue("Launch", "10000 numbers", values.Download() == Numbers(5));
  LaunchReverse(stream, values.data(), kCount);  // 40 kB of dynamic shared memory
  LaunchReverse(stream, values.data(), kCount);
  Finish(stream);
  ExpectTrue("Launch", "dynamic shared memory", values.Download() == Numbers(5));
  DeviceArray<int32_t> many(std::vector<int32_t>(20'000, 1));
  LaunchReverse(stream, many.data(), 20'000);  // more than the 48 KiB that need no asking
  Finish(stream);
  ExpectTrue("Launch", "80 kB of shared memory", many.Download() == std::vector<int32_t>(20'000, 1));
}

// Two streams hand one buffer to and fro 50 times; without the events the sum would be another.
KVTIER_CHECK(events_order_streams) {
  gpu::Stream first(gpu::Stream::Priority::kHigh), second(gpu::Stream::Priority::kLow);
  DeviceArray<int32_t> values(std::vector<int32_t>(kCount, 1));
  gpu::Event to_second, to_first;
  for (int i = 0; i < 50; ++i) {
    first.Wait(to_first);
    LaunchTriple(first, values.data(), kCount);
    to_second.Record(first);
    second.Wait(to_second);
    LaunchAdd(second, values.data(), kCount, -1);
    to_first.Record(second);
  }
  const bool done = to_first.Wait(60 * kSecondUs);
  uint32_t expected = 1;
  for (int i = 0; i < 50; ++i) expected = expected * 3 - 1;
  ExpectTrue("Event", "two streams take turns", done && values.Download() == std::vector<int32_t>(kCount, static_cast<int32_t>(expected)));
}

KVTIER_CHECK(events) {
  gpu::Stream stream;
  gpu::Event never;
  ExpectTrue("Event", "never recorded is done", never.Done() && never.Wait(0));
  stream.Wait(never);
  gpu::Event from(true), to(true);
  DeviceArray<int32_t> values(Numbers(0));
  from.Record(stream);
  for (int i = 0; i < 100; ++i) LaunchAdd(stream, values.data(), kCount, 1);
  to.Record(stream);
  const bool done = to.Wait(60 * kSecondUs);
  ExpectTrue("Event", "timed", done && from.Done() && to.Done() && gpu::Event::ElapsedUs(from, to) > 0);
  ExpectTrue("Event", "all before it has ended", values.Download() == Numbers(100));

  // A host function that does not end holds up what is behind it, and a wait for that ends at its deadline.
  std::atomic<bool> release{false}, ran{false};
  stream.Host([&] {
    while (!release) {
    }
  });
  stream.Host([&] { ran = true; });
  to.Record(stream);
  const bool early = to.Done(), waited = to.Wait(20'000), synchronized = stream.Synchronize(20'000), ran_early = ran;
  release = true;
  Finish(stream);
  ExpectTrue("Event", "a wait ends at its deadline", !early && !waited && !synchronized && !ran_early);
  ExpectTrue("Stream", "host functions run in order", ran && to.Done());
}

// A graph holds addresses, not contents.
KVTIER_CHECK(graph) {
  gpu::Stream stream;
  DeviceArray<int32_t> values(Numbers(0)), copy(Numbers(0));
  stream.BeginCapture();
  int32_t added = 3;
  LaunchAdd(stream, values.data(), kCount, added);
  stream.Copy(copy.data(), values.data(), kCount * 4);
  added = 1000;  // arguments are copied at capture
  const gpu::Graph graph = stream.EndCapture();
  Finish(stream);
  ExpectTrue("Graph", "capturing runs nothing", values.Download() == Numbers(0));
  stream.Launch(graph);
  stream.Launch(graph);
  Finish(stream);
  ExpectTrue("Graph", "replayed twice", values.Download() == Numbers(6) && copy.Download() == Numbers(6));
  values.Upload(Numbers(500));
  stream.Launch(graph);
  Finish(stream);
  ExpectTrue("Graph", "sees new contents", values.Download() == Numbers(503) && copy.Download() == Numbers(503));

  gpu::Event event;
  stream.BeginCapture();
  ExpectTrue("Graph", "events stay outside", Throws([&] { event.Record(stream); }, "captured"));
  ExpectTrue("Graph", "host functions stay outside", Throws([&] { stream.Host([] {}); }, "captured"));
  (void)stream.EndCapture();
}

// Launches that may begin before the one before them has ended see its results all the same, and overwrite nothing that is still read.
KVTIER_CHECK(dependent_launches) {
  constexpr int kLaunches = 9;
  const auto rotated = [](bool dependent, bool late) {
    gpu::Stream stream;
    const DeviceArray<uint32_t> one(std::vector<uint32_t>(kCount, 7)), two(std::vector<uint32_t>(kCount, 8));
    stream.BeginCapture(dependent);
    for (int i = 0; i < kLaunches; ++i) LaunchRotate(stream, (i % 2 == 0 ? two : one).data(), (i % 2 == 0 ? one : two).data(), kCount, late);
    const gpu::Graph graph = stream.EndCapture();
    stream.Launch(graph);
    stream.Launch(graph);
    Finish(stream);
    return std::pair(one.Download(), two.Download());
  };
  ExpectTrue("Launch", "dependent launches give what launches in turn give", rotated(true, false) == rotated(false, false));
#if defined(KVTIER_EMULATED)  // on a GPU it may go well by chance
  ExpectTrue("Launch", "and not where a kernel reads before it has waited", rotated(true, true) != rotated(false, true));
#endif
}

KVTIER_CHECK(memory) {
  const size_t free_bytes = gpu::Info().free_bytes;
  {
    const gpu::Buffer buffer(64 << 20, "a big one");
    ExpectTrue("Buffer", "is counted", gpu::Info().free_bytes + (32 << 20) < free_bytes);
    gpu::Buffer moved;
    ExpectTrue("Buffer", "empty", moved.data() == nullptr && moved.bytes() == 0);
  }
  ExpectTrue("Buffer", "is freed", gpu::Info().free_bytes + (32 << 20) > free_bytes);
  ExpectTrue("Buffer", "names its owner when it does not fit",
             Throws([] { gpu::Buffer(size_t{1} << 50, "the KV pool"); }, "the KV pool"));

  alignas(4096) static uint8_t pages[8192];
  ExpectTrue("RegisterHost", "only what is registered is seen", Throws([&] { gpu::DeviceView(pages); }, "not registered"));
  gpu::RegisterHost(pages, sizeof pages);
  gpu::Stream stream;
  memset(pages, 0, sizeof pages);
  LaunchAdd(stream, static_cast<int32_t*>(gpu::DeviceView(pages)), 2048, 9);
  Finish(stream);
  const auto* numbers = reinterpret_cast<const int32_t*>(pages);
  ExpectTrue("RegisterHost", "kernels write it", numbers[0] == 9 && numbers[2047] == 9);
  gpu::UnregisterHost(pages);
}

// A host function that ends when it is told to; what is behind it in its stream waits.
struct Gate {
  std::atomic<bool> open{false}, passed{false};
  void Close(gpu::Stream& stream) {
    stream.Host([this] {
      while (!open) std::this_thread::yield();
    });
    stream.Host([this] { passed = true; });
  }
};

// As many streams as a worker has, and more: what waits in some of them holds up no other.
KVTIER_CHECK(streams_beside_waiting_ones) {
  Gate gate;
  gpu::Event opened;
  gpu::Stream held;
  DeviceArray<int32_t> values(Numbers(0));
  std::vector<std::unique_ptr<gpu::Stream>> waiting;
  for (int i = 0; i < 12; ++i) waiting.push_back(std::make_unique<gpu::Stream>());
  gpu::Stream decode;
  LaunchAdd(decode, values.data(), kCount, 1);  // a kernel's first launch loads it, and that waits for all that is on the device
  Finish(decode);
  gate.Close(held);
  opened.Record(held);
  for (const auto& stream : waiting) stream->Wait(opened);
  LaunchAdd(decode, values.data(), kCount, 1);
  const bool beside = decode.Synchronize(5 * kSecondUs);
  gate.open = true;
  for (const auto& stream : waiting) Finish(*stream);
  Finish(decode);
  ExpectTrue("Stream", "thirteen streams that wait hold up no other", beside && values.Download() == Numbers(2));
}

KVTIER_CHECK(stream_end) {
  Gate gate;
  bool before = false;
  {
    gpu::Stream stream;
    gate.Close(stream);
  }
  before = gate.passed;
  gate.open = true;
  ExpectTrue("Stream", "its end waits for nothing", !before && Eventually([&] { return gate.passed.load(); }));
  Gate other;
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    other.open = true;
  });
  {
    gpu::Stream stream;
    gpu::WaitAtEnd ending(stream, 60 * kSecondUs);
    other.Close(stream);
  }
  const bool waited = other.passed;
  opener.join();
  ExpectTrue("Stream", "WaitAtEnd waits for all of it", waited && !gpu::Abandoned());
}

#if defined(KVTIER_EMULATED)
KVTIER_CHECK(pitch) {
  gpu::Stream stream;
  DeviceArray<int32_t> values(Numbers(0));
  const size_t most = gpu::Info().max_pitch_bytes;
  stream.Copy2D(values.data(), 16, values.data(), most, 4, 1);
  Finish(stream);
  ExpectTrue("Copy2D", "refuses a pitch that the copy engine does not have",
             Throws([&] { stream.Copy2D(values.data(), 16, values.data(), most + 1, 4, 1); }, "invalid pitch"));
}

KVTIER_CHECK(fault_hang) {
  alignas(4096) static uint8_t pages[4096];
  {
    gpu::Stream stream, other;
    gpu::Event behind, beside;
    DeviceArray<int32_t> values(Numbers(0)), more(Numbers(0));
    gpu::Buffer spare(16, "spare");
    gpu::RegisterHost(pages, sizeof pages);
    gpu::Inject(gpu::Fault::kHang);
    LaunchAdd(stream, values.data(), kCount, 1);
    behind.Record(stream);
    ExpectTrue("Fault", "a hung kernel passes the deadline", !behind.Wait(50'000) && !stream.Synchronize(50'000));
    LaunchAdd(other, more.data(), kCount, 1);
    beside.Record(other);
    ExpectTrue("Fault", "another stream goes on", beside.Wait(60 * kSecondUs));
    other.Wait(behind);
    LaunchAdd(other, more.data(), kCount, 1);
    std::atomic<int> given{0};
    std::vector<std::thread> givers;
    givers.emplace_back([&] {
      gpu::Use(0);
      { const gpu::Buffer freed(std::move(spare)); }
      ++given;
    });
    givers.emplace_back([&] {
      gpu::Use(0);
      gpu::UnregisterHost(pages);
      ++given;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ExpectTrue("Fault", "what gives memory back waits for a device that hangs", given == 0);
    gpu::Abandon();
    for (std::thread& giver : givers) giver.join();
    ExpectTrue("Fault", "and for none that was abandoned", given == 2);
  }
  gpu::Inject(gpu::Fault::kNone);
  gpu::UnregisterHost(pages);
}

KVTIER_CHECK(fault_illegal_access) {
  {
    gpu::Stream stream;
    gpu::Event event;
    DeviceArray<int32_t> values(Numbers(0));
    gpu::Inject(gpu::Fault::kIllegalAccess);
    LaunchAdd(stream, values.data(), kCount, 1);
    ExpectTrue("Fault", "an illegal access shows at the wait", Throws([&] { stream.Synchronize(60 * kSecondUs); }, "illegal memory access"));
    ExpectTrue("Fault", "and in every call after it",
               Throws([&] { event.Record(stream); }, "illegal memory access") &&
                   Throws([&] { gpu::Buffer(16, "more"); }, "illegal memory access") &&
                   Throws([&] { (void)event.Done(); }, "illegal memory access"));
  }
  gpu::Inject(gpu::Fault::kNone);
}

KVTIER_CHECK(fault_out_of_memory) {
  gpu::Inject(gpu::Fault::kOutOfMemory);
  ExpectTrue("Fault", "an allocation that does not fit", Throws([] { gpu::Buffer(16, "weights"); }, "weights: 16 bytes do not fit"));
  const gpu::Buffer buffer(16, "weights");
  ExpectTrue("Fault", "is over after one", buffer.bytes() == 16);
}

KVTIER_CHECK(host_function_must_not_call) {
  gpu::Stream stream;
  bool refused = false;
  stream.Host([&] { refused = Throws([&] { stream.Set(nullptr, 0, 0); }, "host function"); });
  Finish(stream);
  ExpectTrue("Stream", "a host function must not call the runtime", refused);
}
#endif

}  // namespace
}  // namespace kvtier::cuda::check
