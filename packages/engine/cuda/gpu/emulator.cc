// Fibers, barriers and warp operations of emulator.h.
//
// A fiber is a stack and a saved stack pointer; Switch saves what the ABI lets a callee keep and jumps (x86-64; elsewhere
// ucontext does it, slower). A fiber that waits passes on to the next of its warp that can run, and when there is none, to the
// next warp. When all that are left wait for launches before theirs, the block stands, and its machine with it.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace kvtier::gpu::emulated {

thread_local const Index* current = nullptr;

namespace {

constexpr size_t kStackBytes = 128 << 10;
// From one stack to the next. What all fibers use lies at the same place of each: at a power of two apart it would share one set of a cache.
constexpr size_t kStackStride = kStackBytes + 17 * 64;
constexpr size_t kLaneBytes = 64;
constexpr size_t kNobody = std::numeric_limits<size_t>::max();
constexpr size_t kAhead = 3;  // launches that begin before the one that runs has ended

#if defined(__x86_64__)
struct Context {
  void* stack_pointer = nullptr;
};
extern "C" void kvtier_emulator_switch(void** from, void* to);
asm(R"(
.text
.type kvtier_emulator_switch, @function
kvtier_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kvtier_emulator_switch, .-kvtier_emulator_switch
)");
void Switch(Context& from, Context& to) { kvtier_emulator_switch(&from.stack_pointer, to.stack_pointer); }
void Prepare(Context& context, uint8_t* stack, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(stack + kStackBytes - 64);
  *--top = nullptr;  // where entry would return to: it never does; also keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
#else
struct Context {
  ucontext_t state;
};
void Switch(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
void Prepare(Context& context, uint8_t* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
#endif

struct Barrier {
  unsigned alive = 0, arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  unsigned turn[32];  // per lane: which of the two exchange buffers is next
  alignas(64) uint8_t exchange[2][32 * kLaneBytes];
};

struct PendingCopy {
  void* shared;
  const void* global;  // null: zeros
};

struct Fiber {
  Context context;
  Index index;
  unsigned warp;
  bool done, waited;  // for the launches before its own
  // What it waits for: that the barrier is past this generation.
  const Barrier* barrier;
  uint64_t generation;
  std::vector<PendingCopy> copies;
  std::vector<size_t> groups;  // where each ends among the copies

  bool can_run() const { return !done && (barrier == nullptr || barrier->generation != generation); }
  void Arrive(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (copies[i].global != nullptr) {
        memcpy(copies[i].shared, copies[i].global, 16);
      } else {
        memset(copies[i].shared, 0, 16);
      }
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(count));
  }
};

// The fibers of one block; made once, used again for block after block.
struct Machine {
  ~Machine() {
    if (stacks != nullptr) munmap(stacks, capacity * kStackStride);
  }

  uint8_t* stacks = nullptr;
  size_t capacity = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<uint64_t> shared;  // dynamic shared memory
  uint8_t* shared_base = nullptr;
  Barrier block;
  Barrier previous;    // passed when all launches before this block's have ended
  bool early = false;  // they have not
  Context main;
  size_t running = 0, live = 0, threads = 0;
  bool backwards = false;
  const std::function<void()>* body = nullptr;
  const char* name = "";

  void Reserve(size_t count) {
    if (count <= capacity) return;
    if (stacks != nullptr) munmap(stacks, capacity * kStackStride);
    void* base = mmap(nullptr, count * kStackStride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      fprintf(stderr, "emulator: no memory for %zu stacks of threads\n", count);
      abort();
    }
    stacks = static_cast<uint8_t*>(base);
    capacity = count;
  }

  size_t Next() const {
    // The usual case by itself: the lane beside.
    const size_t beside = backwards ? running - 1 : running + 1;
    if ((backwards ? running : beside) % 32 != 0 && beside < threads && fibers[beside].can_run()) return beside;
    const size_t warp = fibers[running].warp, all = warps.size();
    for (size_t turn = 0; turn < all; ++turn) {
      const size_t of = (backwards ? warp + all - turn : warp + turn) % all, first = of * 32, lanes = std::min<size_t>(32, threads - first);
      const size_t begin = turn == 0 ? running - first + (backwards ? lanes - 1 : 1) : backwards ? lanes - 1 : 0;
      for (size_t i = 0; i < lanes; ++i) {
        const size_t lane = first + (begin + (backwards ? lanes - i : i)) % lanes;
        if (fibers[lane].can_run()) return lane;
      }
    }
    for (size_t i = 0; i < threads && early; ++i) {
      if (!fibers[i].done && fibers[i].barrier == &previous) return kNobody;
    }
    fprintf(stderr, "emulator: kernel %s: its threads wait for each other for ever (barriers that not all reach)\n", name);
    abort();
  }

  void PassOn(Context& from) {
    const size_t next = Next();
    if (next == kNobody) return Switch(from, main);
    running = next;
    current = &fibers[next].index;
    if (&fibers[next].context != &from) Switch(from, fibers[next].context);
  }

  // Until the block has ended, or stands (`live` says which).
  void Go(size_t first) {
    running = first;
    current = &fibers[first].index;
    Switch(main, fibers[first].context);
    current = nullptr;
  }

  // All launches before this block's have ended.
  void Resume() {
    early = false;
    if (live == 0) return;
    ++previous.generation;
    size_t first = 0;
    while (!fibers[first].can_run()) ++first;
    Go(first);
  }

  void Wait(Barrier& barrier) {
    if (++barrier.arrived == barrier.alive) {
      Release(barrier);
      return;
    }
    Fiber& me = fibers[running];
    me.barrier = &barrier;
    me.generation = barrier.generation;
    PassOn(me.context);
    me.barrier = nullptr;
  }

  void Release(Barrier& barrier) {
    barrier.arrived = 0;
    ++barrier.generation;
  }

  void Leave(Barrier& barrier) {
    --barrier.alive;
    if (barrier.alive > 0 && barrier.arrived == barrier.alive) Release(barrier);
  }
};

// The one whose block runs.
thread_local Machine* machine = nullptr;
// Of this OS thread; the first is for blocks that run to their end at once.
thread_local std::vector<std::unique_ptr<Machine>> machines;
thread_local unsigned early_blocks = 0;  // which one begins early differs from launch to launch

void WaitForWarp() { machine->Wait(machine->warps[machine->fibers[machine->running].warp].barrier); }

struct Waits {
  bool watching = false;
  std::string without;
  std::mutex mutex;
  std::set<std::string> met;

  bool Skips(const Site& at) {
    if (!watching) return false;
    static thread_local std::unordered_map<const char*, std::unordered_map<uint32_t, bool>> known;
    const auto [found, is_new] = known[at.file_name()].try_emplace(at.line(), false);
    if (is_new) {
      const std::string file = at.file_name(), site = file.substr(file.rfind('/') + 1) + ":" + std::to_string(at.line());
      const std::lock_guard lock(mutex);
      met.insert(site);
      found->second = site == without;
    }
    return found->second;
  }
};
Waits waits;

void FiberMain() {
  Machine& m = *machine;
  (*m.body)();
  Fiber& me = m.fibers[m.running];
  if (m.early && !me.waited) {
    fprintf(stderr, "emulator: kernel %s was launched before its predecessors' end, and does not wait for it\n", m.name);
    abort();
  }
  me.done = true;
  me.Arrive(me.copies.size());  // what nobody waited for lands at some time
  m.Leave(m.warps[me.warp].barrier);
  m.Leave(m.block);
  if (--m.live == 0) {
    Switch(me.context, m.main);
  } else {
    m.PassOn(me.context);
  }
  abort();  // a fiber that is done is never switched to
}

void RunBlock(Machine& m, const Grid& of, dim3 at, bool early) {
  const dim3 block = of.block;
  machine = &m;
  m.threads = static_cast<size_t>(block.x) * block.y * block.z;
  m.Reserve(m.threads);
  m.fibers.resize(std::max(m.fibers.size(), m.threads));
  m.warps.resize((m.threads + 31) / 32);
  m.body = &of.body;
  m.name = of.name;
  m.early = early;
  m.shared.assign((of.shared_bytes + 7) / 8 + 16, ~0ull);
  const auto base = reinterpret_cast<uintptr_t>(m.shared.data());
  m.shared_base = reinterpret_cast<uint8_t*>((base + 127) / 128 * 128);
  for (size_t i = 0; i < m.threads; ++i) {
    Fiber& fiber = m.fibers[i];
    const auto linear = static_cast<unsigned>(i);
    fiber.index = {{linear % block.x, linear / block.x % block.y, linear / (block.x * block.y)}, at, block, of.grid, linear % 32};
    fiber.warp = linear / 32;
    fiber.done = fiber.waited = false;
    fiber.barrier = nullptr;
    fiber.copies.clear();
    fiber.groups.clear();
    Prepare(fiber.context, m.stacks + i * kStackStride, FiberMain);
  }
  for (size_t w = 0; w < m.warps.size(); ++w) {
    m.warps[w].barrier = {static_cast<unsigned>(std::min<size_t>(32, m.threads - w * 32)), 0, 0};
    std::fill_n(m.warps[w].turn, 32, 0u);
  }
  m.block = {static_cast<unsigned>(m.threads), 0, 0};
  m.live = m.threads;
  m.Go(m.backwards ? m.threads - 1 : 0);
  m.backwards = !m.backwards;
}

uint64_t Blocks(const Grid& of) { return uint64_t{of.grid.x} * of.grid.y * of.grid.z; }
dim3 BlockAt(const Grid& of, uint64_t i) {
  const auto part = [](uint64_t value) { return static_cast<unsigned>(value); };
  return {part(i % of.grid.x), part(i / of.grid.x % of.grid.y), part(i / of.grid.x / of.grid.y)};
}

}  // namespace

uint8_t* SharedMemory() { return machine->shared_base; }
void SyncThreads(Site at) {
  if (!waits.Skips(at)) machine->Wait(machine->block);
}
void SyncWarp(Site at) {
  if (!waits.Skips(at)) WaitForWarp();
}

void EndMisaligned(const void* address, const char* what) {
  fprintf(stderr, "emulator: kernel %s: %s lies %u bytes past a multiple of 16\n", machine->name, what,
          static_cast<unsigned>(reinterpret_cast<uintptr_t>(address) % 16));
  abort();
}

// Whoever reads the target before its thread has waited, or while others still read what was there, finds NaNs.
void CopyAsync(void* shared, const void* global) {
  RequireAligned(shared, "the target of cp.async");
  RequireAligned(global, "the source of cp.async");
  memset(shared, 0xff, 16);
  machine->fibers[machine->running].copies.push_back({shared, global});
}
void CopyAsyncCommit() {
  Fiber& me = machine->fibers[machine->running];
  me.groups.push_back(me.copies.size());
}
void CopyAsyncWait(size_t pending, Site at) {
  Fiber& me = machine->fibers[machine->running];
  if (waits.Skips(at) || me.groups.size() <= pending) return;
  const auto last = me.groups.end() - static_cast<std::ptrdiff_t>(pending) - 1;
  const size_t count = *last;
  me.Arrive(count);
  me.groups.erase(me.groups.begin(), last + 1);
  for (size_t& end : me.groups) end -= count;
}

void WaitForPrevious(Site at) {
  Machine& m = *machine;
  Fiber& me = m.fibers[m.running];
  if (!m.early || me.waited) return;
  me.waited = true;
  if (waits.Skips(at)) return;
  me.barrier = &m.previous;
  me.generation = m.previous.generation;
  m.PassOn(me.context);
  me.barrier = nullptr;
}

void WatchWaits(const std::string& without) {
  waits.without = without;
  waits.watching = true;
}
std::vector<std::string> WaitsMet() {
  const std::lock_guard lock(waits.mutex);
  return {waits.met.begin(), waits.met.end()};
}

const uint8_t* Exchange(const void* data, size_t bytes) {
  Machine& m = *machine;
  const Fiber& me = m.fibers[m.running];
  Warp& warp = m.warps[me.warp];
  const unsigned turn = warp.turn[me.index.lane]++ & 1;
  uint8_t* const mine = warp.exchange[turn] + me.index.lane * kLaneBytes;
  if (bytes == 4) {  // nearly always: no call for it
    memcpy(mine, data, 4);
  } else {
    memcpy(mine, data, bytes);
  }
  m.Wait(warp.barrier);
  return warp.exchange[turn];
}

void RunGrids(std::span<const Grid> chain) {
  if (machines.empty()) {
    for (size_t i = 0; i <= kAhead; ++i) machines.push_back(std::make_unique<Machine>());
  }
  const auto ahead = [](size_t i) -> Machine& { return *machines[1 + i % kAhead]; };
  uint64_t early[kAhead] = {};  // the block of a launch that has begun
  size_t begun = 1;
  for (size_t i = 0; i < chain.size(); ++i) {
    const size_t end = std::min(chain.size(), i + kAhead + (i == 0 ? 1 : 0));  // launch i itself has one of the machines, but for the first
    for (; begun < end; ++begun) {
      early[begun % kAhead] = early_blocks++ % Blocks(chain[begun]);
      RunBlock(ahead(begun), chain[begun], BlockAt(chain[begun], early[begun % kAhead]), true);
    }
    if (i > 0) {
      machine = &ahead(i);
      machine->Resume();
    }
    for (uint64_t block = 0; block < Blocks(chain[i]); ++block) {
      if (i == 0 || block != early[i % kAhead]) RunBlock(*machines[0], chain[i], BlockAt(chain[i], block), false);
    }
  }
}

}  // namespace kvtier::gpu::emulated

namespace kvtier::gpu {
namespace {

// Fragment layouts of PTX, ISA 9.7.14: lane l holds, of an 8x8 matrix, row l / 4, columns 2 (l % 4) and the one after.
// Each lane's row is read when that lane comes: what others have still to write is not there, as it need not be on a GPU, where
// ldmatrix orders no memory.
void LoadMatrices(uint32_t (&r)[4], const void* row, bool transposed) {
  emulated::RequireAligned(row, "a row of ldmatrix");
  uint16_t mine[8];
  memcpy(mine, row, sizeof mine);
  const uint8_t* all = emulated::Exchange(mine, sizeof mine);
  const unsigned lane = emulated::current->lane;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const auto element = [&](unsigned i, unsigned j) {
      uint16_t bits;
      memcpy(&bits, all + 64 * (matrix * 8 + i) + 2 * j, 2);
      return bits;
    };
    const unsigned i = lane / 4, j = 2 * (lane % 4);
    r[matrix] = transposed ? PackPair(element(j, i), element(j + 1, i)) : PackPair(element(i, j), element(i, j + 1));
  }
}

using Four = float __attribute__((vector_size(16)));
using Places = int32_t __attribute__((vector_size(16)));

// A lane's operands as numbers, so that each is widened once; a pair's two beside each other.
struct Fragments {
  Four a[2], b;  // a: of each half of k, two of row `group`, two of row `group` + 8
};

// d0 d1: row `group`, two columns; d2 d3: row `group` + 8. `which` of a pair's two.
template <int kHalf, int kWhich>
void AddProducts(Four& d, const Fragments& rows, const Four& column, const Four& next) {
  constexpr int kAt = 2 * kHalf + kWhich;
  const Four a = __builtin_shuffle(rows.a[kHalf], Places{kWhich, kWhich, 2 + kWhich, 2 + kWhich});
  d += a * __builtin_shuffle(column, next, Places{kAt, 4 + kAt, kAt, 4 + kAt});
}

template <class T, size_t kPairs>
void Widen(float* to, const uint32_t (&pairs)[kPairs]) {
  for (size_t i = 0; i < 2 * kPairs; ++i) to[i] = ToFloat(T{static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)))});
}

}  // namespace

void LoadMatrix4(uint32_t (&r)[4], const void* row) { LoadMatrices(r, row, false); }
void LoadMatrix4Transposed(uint32_t (&r)[4], const void* row) { LoadMatrices(r, row, true); }

template <class T>
void MultiplyAdd16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments mine;
  Widen<T>(reinterpret_cast<float*>(&mine.a), a);
  Widen<T>(reinterpret_cast<float*>(&mine.b), b);
  const uint8_t* all = emulated::Exchange(&mine, sizeof mine);
  const auto of = [&](unsigned lane) -> const Fragments& { return *reinterpret_cast<const Fragments*>(all + 64 * lane); };
  const unsigned group = emulated::current->lane / 4, member = emulated::current->lane % 4;
  Four sums{d[0], d[1], d[2], d[3]};
  for (unsigned pair = 0; pair < 4; ++pair) {  // four lanes hold four pairs of k, in both halves of 8
    const Fragments& rows = of(group * 4 + pair);
    const Four &column = of((member * 2) * 4 + pair).b, &next = of((member * 2 + 1) * 4 + pair).b;
    AddProducts<0, 0>(sums, rows, column, next);
    AddProducts<0, 1>(sums, rows, column, next);
    AddProducts<1, 0>(sums, rows, column, next);
    AddProducts<1, 1>(sums, rows, column, next);
  }
  memcpy(d, &sums, sizeof d);
}
template void MultiplyAdd16816<bf16>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);
template void MultiplyAdd16816<f16>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);

}  // namespace kvtier::gpu
