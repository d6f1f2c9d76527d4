// libkvtier as it ships, by its C ABI, where the calling thread must not be held up or ended: by threads that are not to be had, by an
// arena that is unmapped, by a client that is closed, by another GPU. Of arenas that are made, and of pinning with several threads, which
// are not in that library, the sources. Built and run by packages/connector/native/src/client.slow.test.ts.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../kvtier.h"
#include "arena.h"
#include "transfer/host_arena.h"

namespace {

constexpr size_t kNone = SIZE_MAX;
std::atomic<int> threads_left{INT_MAX};    // that the system still has
std::atomic<size_t> watched_bytes{kNone};  // who unmaps so many is noted
std::atomic<pid_t> unmapped_by{0};
std::atomic<bool> unmapping_takes{false};  // and does not come back while this is so

}  // namespace

// In place of the C library's, for libkvtier, too.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static auto* const create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attributes, run, argument);
}
extern "C" int munmap(void* base, size_t bytes) noexcept {
  if (bytes == watched_bytes) {
    unmapped_by = gettid();
    unmapping_takes.wait(true);
  }
  return static_cast<int>(syscall(SYS_munmap, base, bytes));
}

namespace kvtier::gpu {

std::mutex registering;
std::set<void*> registered;

void Use(int) {}
void RegisterHost(void* base, size_t) {
  const std::lock_guard lock(registering);
  registered.insert(base);
}
void UnregisterHost(void* base) noexcept {
  const std::lock_guard lock(registering);
  registered.erase(base);
}
void* DeviceView(void* host) { return host; }

}  // namespace kvtier::gpu

namespace {

constexpr int kUsualSlackNs = 50'000;
constexpr uint64_t kBytes = 8 << 20, kPage = 4096, kId = 0x1234'5678'9ABC'DEF0;

bool Until(const std::function<bool()>& there, double seconds = 20) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!there()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::string NewPath(const char* what) { return "/dev/shm/kvtier-client-test-" + std::to_string(getpid()) + "-" + what; }

void MakeArena(const std::string& path, uint64_t bytes) {
  const int file = open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_GE(file, 0);
  const kvtier::ArenaHeader header{kvtier::kArenaMagic, kvtier::kArenaVersion, kPage, bytes, kId};
  ASSERT_EQ(write(file, &header, sizeof(header)), static_cast<ssize_t>(sizeof(header)));
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
  close(file);
}

class Client : public testing::Test {
 protected:
  void SetUp() override {
    MakeArena(path_, kBytes);
    const kvtier_options options{2, 1, 0, 64, 200};
    client_ = kvtier_open(&options);
    ASSERT_NE(client_, nullptr) << kvtier_last_error();
    arena_ = kvtier_map(client_, path_.c_str(), kBytes, kId, 0);
    ASSERT_GT(arena_, 0) << kvtier_last_error();
  }
  void TearDown() override {
    threads_left = INT_MAX;
    watched_bytes = kNone;
    unmapped_by = 0;
    EXPECT_EQ(kvtier_close(client_, 20'000'000), 1);
    unlink(path_.c_str());
  }

  kvtier_counts Counts() {
    kvtier_counts counts;
    kvtier_count(client_, &counts);
    return counts;
  }
  // A check that has ended and was not taken.
  int64_t Checked() {
    const uint64_t offset = kPage, sum = 0;
    const int64_t job = kvtier_check(client_, arena_, 100, 1, &offset, &sum);
    EXPECT_EQ(kvtier_wait(client_, job, 20'000'000), 1);
    return job;
  }

  const std::string path_ = NewPath("arena");
  kvtier_client* client_ = nullptr;
  int64_t arena_ = 0;
};

TEST_F(Client, WhoForgetsTheLastJobOfAnArenaDoesNotUnmapIt) {
  const int64_t taken = Checked(), abandoned = Checked();
  watched_bytes = kBytes;
  EXPECT_EQ(kvtier_unmap(client_, arena_), 0);
  EXPECT_EQ(kvtier_take(client_, taken, nullptr, nullptr, 1), 1);
  EXPECT_EQ(Counts().arenas, 1u);
  EXPECT_EQ(kvtier_abandon(client_, abandoned), 1);
  ASSERT_TRUE(Until([] { return unmapped_by != 0; }));
  EXPECT_NE(unmapped_by, gettid());
  EXPECT_TRUE(Until([&] { return Counts().arenas == 0; }));
}

// Who polls a copy of another arena is an engine's loop.
TEST_F(Client, NobodyWaitsWhileAnArenaIsUnmapped) {
  constexpr uint64_t kOther = kBytes / 2;
  const std::string path = NewPath("other");
  MakeArena(path, kOther);
  const int64_t other = kvtier_map(client_, path.c_str(), kOther, kId, 0);
  ASSERT_GT(other, 0) << kvtier_last_error();
  const int64_t job = Checked();
  watched_bytes = kOther;
  unmapping_takes = true;
  std::thread unmaps([&] { EXPECT_EQ(kvtier_unmap(client_, other), 1); });
  EXPECT_TRUE(Until([] { return unmapped_by != 0; }));
  std::atomic<int> said{-1};
  std::thread polls([&] { said = kvtier_wait(client_, job, 0); });
  EXPECT_TRUE(Until([&] { return said == 1; }));
  unmapping_takes = false;
  unmapping_takes.notify_all();
  unmaps.join();
  polls.join();
  EXPECT_EQ(kvtier_take(client_, job, nullptr, nullptr, 1), 1);
  unlink(path.c_str());
}

TEST_F(Client, AnArenaIsUnmappedWhereThereIsNoThreadForIt) {
  const int64_t job = Checked();
  threads_left = 0;
  EXPECT_EQ(kvtier_unmap(client_, arena_), 0);
  EXPECT_EQ(kvtier_take(client_, job, nullptr, nullptr, 1), 1);
  EXPECT_TRUE(Until([&] { return Counts().arenas == 0; }));
}

TEST_F(Client, ClosingEndsWhatWaitsAndRefusesWhatComesLater) {
  constexpr size_t kMany = 20'000, kPayload = 3 << 20;
  std::vector<uint8_t> memory(kPayload);
  const kvtier_part part{reinterpret_cast<uint64_t>(memory.data()), 0, 1, 0, kPayload};
  const int64_t layout = kvtier_layout(client_, &part, 1, 1);
  const std::vector<uint64_t> blocks(kMany, 0), offsets(kMany, kPage);
  const int64_t job = kvtier_store(client_, arena_, layout, kMany, blocks.data(), offsets.data(), 0);
  ASSERT_GT(job, 0) << kvtier_last_error();
  std::atomic<pid_t> waits{0};
  int32_t said = -1, later = 0;
  std::thread waiter([&] {
    waits = gettid();
    said = kvtier_wait(client_, job, 20'000'000);
    later = kvtier_wait(client_, job, 20'000'000);
  });
  const auto sleeps = [&] {
    std::ifstream file("/proc/self/task/" + std::to_string(waits) + "/stat");
    const std::string line(std::istreambuf_iterator<char>(file), {});
    return line.find(") S ") != std::string::npos;
  };
  EXPECT_TRUE(Until([&] { return waits != 0 && sleeps(); }));
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(kvtier_close(client_, 10'000'000), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  waiter.join();
  EXPECT_EQ(said, 0);
  EXPECT_EQ(later, KVTIER_CONFIG);
  EXPECT_EQ(kvtier_take(client_, job, nullptr, nullptr, kMany), KVTIER_CONFIG);
  EXPECT_EQ(kvtier_payload_bytes(client_, layout), 0u);
  EXPECT_EQ(Counts().jobs, 0u);
}

TEST_F(Client, AGpuThatIsAskedWhetherItHangsCostsAnotherNothing) {
  const char* path = std::getenv("KVTIER_CUDA_DRIVER");
  ASSERT_NE(path, nullptr);
  void* driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr) << dlerror();
  const auto call = [&](const char* name, auto... values) {
    return reinterpret_cast<int (*)(decltype(values)...)>(dlsym(driver, name))(values...);
  };
  constexpr uint64_t kPayload = 4096;
  void* context = nullptr;
  ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context, 0), 0);
  ASSERT_EQ(call("cuCtxSetCurrent", context), 0);
  int64_t layouts[2];
  for (const int device : {0, 1}) {
    void* memory = nullptr;
    ASSERT_EQ(call("cuMemAlloc_v2", &memory, size_t{kPayload}), 0);
    const kvtier_part part{reinterpret_cast<uint64_t>(memory), kPayload, 1, 0, kPayload};
    layouts[device] = kvtier_device_layout(client_, device, &part, 1, 1);
    ASSERT_GT(layouts[device], 0) << kvtier_last_error();
    ASSERT_TRUE(Until([&] { return kvtier_pinning(client_, arena_, device) == 1; }));
  }
  const uint64_t block = 0, offset = kPage;
  uint64_t sum = 0;
  uint8_t good = 0;
  const auto ended = [&](int64_t job) {
    EXPECT_EQ(kvtier_wait(client_, job, 20'000'000), 1);
    EXPECT_EQ(kvtier_take(client_, job, &sum, &good, 1), 1);
    return good == 1;
  };
  ASSERT_TRUE(ended(kvtier_store(client_, arena_, layouts[1], 1, &block, &offset, 0)));
  const uint64_t wanted = sum;
  call("kvtier_standin_fault", 1);
  EXPECT_FALSE(ended(kvtier_load(client_, arena_, layouts[0], 1, &block, &offset, &wanted, 0)));
  EXPECT_EQ(Counts().hung, 1u);
  call("kvtier_slow", 1);
  EXPECT_TRUE(Until([&] { return call("kvtier_slow_waiting") == 1; }));
  EXPECT_TRUE(ended(kvtier_load(client_, arena_, layouts[1], 1, &block, &offset, &wanted, 0)));
  EXPECT_FALSE(ended(kvtier_load(client_, arena_, layouts[0], 1, &block, &offset, &wanted, 0)));
  EXPECT_EQ(Counts().hung, 1u);
  call("kvtier_slow", 0);
  call("kvtier_standin_fault", 0);
  EXPECT_TRUE(Until([&] { return Counts().hung == 0; }));
  EXPECT_TRUE(ended(kvtier_load(client_, arena_, layouts[0], 1, &block, &offset, &wanted, 0)));
}

// Each copy waits for the GPU some times in a row, for microseconds each: what the system adds to them is most of a small load.
TEST_F(Client, WhoWaitsForAGpuIsWokenInTimeAndTheEnginesThreadsStayAsTheyAre) {
  const char* path = std::getenv("KVTIER_CUDA_DRIVER");
  ASSERT_NE(path, nullptr);
  void* driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr) << dlerror();
  const auto call = [&](const char* name, auto... values) {
    return reinterpret_cast<int (*)(decltype(values)...)>(dlsym(driver, name))(values...);
  };
  constexpr uint64_t kPayload = 4096;
  void *context = nullptr, *memory = nullptr;
  ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context, 0), 0);
  ASSERT_EQ(call("cuCtxSetCurrent", context), 0);
  ASSERT_EQ(call("cuMemAlloc_v2", &memory, size_t{kPayload}), 0);
  const kvtier_part part{reinterpret_cast<uint64_t>(memory), kPayload, 1, 0, kPayload};
  const int64_t layout = kvtier_device_layout(client_, 0, &part, 1, 1);
  ASSERT_GT(layout, 0) << kvtier_last_error();
  ASSERT_TRUE(Until([&] { return kvtier_pinning(client_, arena_, 0) == 1; }));
  const uint64_t block = 0, offset = kPage;
  uint64_t sum = 0;
  uint8_t good = 0;
  const auto ended = [&](int64_t job) {
    EXPECT_EQ(kvtier_wait(client_, job, 20'000'000), 1);
    EXPECT_EQ(kvtier_take(client_, job, &sum, &good, 1), 1);
    return good == 1;
  };
  ASSERT_TRUE(ended(kvtier_store(client_, arena_, layout, 1, &block, &offset, 0)));
  const uint64_t wanted = sum;
  ASSERT_TRUE(ended(kvtier_load(client_, arena_, layout, 1, &block, &offset, &wanted, 0)));
  EXPECT_EQ(call("kvtier_slow_slack", "kvtier-store"), 1000);
  EXPECT_EQ(call("kvtier_slow_slack", "kvtier-load"), 1000);
  EXPECT_EQ(prctl(PR_GET_TIMERSLACK), kUsualSlackNs);
}

// With eight hardware queues, as in an engine's process. Run by itself: the emulator puts a stream onto the queue with the fewest.
TEST_F(Client, ACopyThatWaitsForTheEnginesStepsHoldsUpNoOtherStreamOfIt) {
  const char* path = std::getenv("KVTIER_CUDA_DRIVER");
  ASSERT_NE(path, nullptr);
  void* driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr) << dlerror();
  const auto call = [&](const char* name, auto... values) {
    return reinterpret_cast<int (*)(decltype(values)...)>(dlsym(driver, name))(values...);
  };
  const kvtier_options patient{1, 1, 0, 64, 60'000};
  kvtier_client* client = kvtier_open(&patient);
  const int64_t arena = kvtier_map(client, path_.c_str(), kBytes, kId, 0);
  ASSERT_GT(arena, 0) << kvtier_last_error();
  void *context = nullptr, *gate = nullptr, *memory = nullptr;
  ASSERT_EQ(call("cuDevicePrimaryCtxRetain", &context, 0), 0);
  ASSERT_EQ(call("cuCtxSetCurrent", context), 0);
  constexpr uint64_t kPayload = 4096;
  ASSERT_EQ(call("cuMemAlloc_v2", &memory, 3 * size_t{kPayload}), 0);
  auto* const bytes = static_cast<uint8_t*>(memory);
  const kvtier_part part{reinterpret_cast<uint64_t>(memory), kPayload, 1, 0, kPayload};
  // Kernels are loaded while the device has nothing to do. With that client its streams have gone.
  kvtier_client* first = kvtier_open(&patient);
  ASSERT_GT(kvtier_device_layout(first, 0, &part, 1, 2), 0) << kvtier_last_error();
  ASSERT_EQ(kvtier_close(first, 20'000'000), 1);

  // The engine's: a step in one queue, a stream in each of the seven others, the default one (0) among them; and two for balance, so that
  // the streams of copies, in the order in which they are made and taken, lie on those seven.
  void* const step = reinterpret_cast<void* (*)(void**)>(dlsym(driver, "kvtier_standin_held_stream"))(&gate);
  std::vector<void*> made(8);
  for (void*& stream : made) ASSERT_EQ(call("cuStreamCreateWithPriority", &stream, 1u, 0), 0);
  std::vector<void*> others(made.begin(), made.begin() + 6);
  others.push_back(nullptr);
  const int64_t layout = kvtier_device_layout(client, 0, &part, 1, 2);
  ASSERT_GT(layout, 0) << kvtier_last_error();
  ASSERT_TRUE(Until([&] { return kvtier_pinning(client, arena, 0) == 1; }));

  const uint64_t blocks[] = {0, 1}, offsets[] = {kPage, 2 * kPage};
  uint64_t sum = 0;
  uint8_t good = 0;
  const auto ends = [&](int64_t job, uint64_t* said) {
    ASSERT_GT(job, 0) << kvtier_last_error();
    ASSERT_EQ(kvtier_wait(client, job, 20'000'000), 1);
    ASSERT_EQ(kvtier_take(client, job, said, &good, 1), 1);
    EXPECT_EQ(good, 1);
  };
  ends(kvtier_store(client, arena, layout, 1, &blocks[0], &offsets[0], 0), &sum);
  ends(kvtier_load(client, arena, layout, 1, &blocks[0], &offsets[0], &sum, 0), nullptr);
  const auto waits = [&](bool load) {
    const int before = call("kvtier_slow_awaited", step);
    const int64_t mark = kvtier_mark(client, 0, step);
    const int64_t job = load ? kvtier_load(client, arena, layout, 1, &blocks[0], &offsets[0], &sum, mark)
                             : kvtier_store(client, arena, layout, 1, &blocks[1], &offsets[1], mark);
    EXPECT_GT(job, 0) << kvtier_last_error();
    EXPECT_EQ(kvtier_forget_mark(client, mark), 1);
    EXPECT_TRUE(Until([&] { return call("kvtier_slow_awaited", step) > before; }));
    for (void* stream : others) {
      EXPECT_EQ(call("kvtier_standin_set", stream, static_cast<void*>(bytes + 2 * kPayload), 1, size_t{16}), 0);
      EXPECT_TRUE(Until([&] { return call("cuStreamQuery", stream) == 0; }, 5)) << "behind a " << (load ? "load" : "store");
    }
    EXPECT_EQ(kvtier_wait(client, job, 0), 0);
    return job;
  };
  const int64_t load = waits(true), store = waits(false);
  call("kvtier_standin_open", gate);
  ends(load, nullptr);
  ends(store, nullptr);
  for (void* stream : made) EXPECT_EQ(call("cuStreamDestroy_v2", stream), 0);
  EXPECT_EQ(kvtier_close(client, 20'000'000), 1);
}

TEST(Threads, AClientIsLeftWhereThereIsNoneToFreeIt) {
  const kvtier_options options{1, 1, 0, 64, 200};
  kvtier_client* client = kvtier_open(&options);
  ASSERT_NE(client, nullptr) << kvtier_last_error();
  const auto began = std::chrono::steady_clock::now();
  threads_left = 0;
  EXPECT_EQ(kvtier_close(client, 60'000'000), 0);
  threads_left = INT_MAX;
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
}

TEST(Threads, AnArenaIsMadeWithThoseThatThereAre) {
  for (const int left : {0, 1, 2}) {
    const std::string path = NewPath("made");
    threads_left = left;
    const auto made = kvtier::Arena::Create(path, 16 << 20, 4);
    threads_left = INT_MAX;
    EXPECT_EQ(kvtier::ArenaFault(made->base(), made->bytes(), made->id()), "");
    unlink(path.c_str());
  }
}

TEST(Threads, AnArenaIsPinnedWithThoseThatThereAre) {
  constexpr size_t kChunks = 16;
  std::vector<uint8_t> memory(kChunks * kPage);
  kvtier::cuda::PinOptions options;
  options.chunk_bytes = kPage;
  options.threads = 4;
  for (const int left : {0, 1, 2}) {
    threads_left = left;
    const kvtier::cuda::HostArena arena(memory.data(), memory.size(), options);
    threads_left = INT_MAX;
    EXPECT_TRUE(arena.pinned()) << arena.refusal();
    EXPECT_EQ(kvtier::gpu::registered.size(), kChunks);
  }
  EXPECT_TRUE(kvtier::gpu::registered.empty());
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  prctl(PR_SET_TIMERSLACK, kUsualSlackNs);  // whatever the process that began this one has
  return RUN_ALL_TESTS();
}
