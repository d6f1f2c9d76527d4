// A prompt through the engine's native half, without Node: cold, its blocks from the arena, its blocks from a disk; a start in parts; exports
// and imports beside decodes. 8B shape, random weights.
// KVTIER_BENCH_DIR: a folder on the disk that is meant (/tmp).
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "bench_engine.h"

namespace kvtier::cuda::bench {
namespace {

std::string Name(int64_t step_tokens) {
  return "8B, " + std::to_string(kPrompt) + " tokens, steps of " + std::to_string(step_tokens);
}

// Cold and warm by turns, so that both see the same minute. What is measured is told before anything else may fail.
void ColdAndWarm(int64_t step_tokens) {
  Engine engine(step_tokens);
  std::vector<double> cold, warm, layered, unordered;
  engine.Compute(0, 0);  // loads kernels
  for (int i = 0; i < Rounds(3); ++i) {
    const int64_t prompt = 1 + i;
    int32_t first = 0, again = 0, by_layer = 0;
    cold.push_back(WallUs([&] { first = engine.Compute(prompt, 0); }));
    engine.Export();
    engine.Forget();
    warm.push_back(WallUs([&] {
      engine.Import(0, kHeld);
      again = engine.Compute(prompt, kHeld * kBlockTokens);
    }));
    engine.Forget();
    layered.push_back(WallUs([&] { by_layer = engine.WarmByLayer(prompt); }));
    if (again != by_layer) throw std::runtime_error("two imports of the same blocks gave different tokens");
    fprintf(stderr, "prompt %ld: token %d cold, %d warm\n", static_cast<long>(prompt), first, again);
  }
  ReportUs("warm from the arena", Name(step_tokens), Median(warm), Median(cold), "cold, same prompts");
  ReportUs("warm from the arena by layer", Name(step_tokens), Median(layered), Median(cold), "cold, same prompts");
  ReportFlops("cold", Name(step_tokens), Median(cold), StepFlops(engine.model.shape(), 0, static_cast<double>(kPrompt)));
  engine.Shuffle();
  for (int i = 0; i < Rounds(3); ++i) {
    engine.Compute(1 + i, 0);
    engine.Export();
    engine.Forget();
    unordered.push_back(WallUs([&] { engine.WarmByLayer(1 + i); }));
  }
  ReportUs("warm from the arena by layer, in no order", Name(step_tokens), Median(unordered), Median(cold), "cold, same prompts");
}

KVTIER_BENCH(system_512) { ColdAndWarm(Scaled(512)); }
KVTIER_BENCH(system_8192) { ColdAndWarm(Scaled(8192)); }

// A file that is read past the page cache.
class DiskFile {
 public:
  explicit DiskFile(const std::string& folder) : path_(folder + "/kvtier-bench-" + std::to_string(getpid())) {
    handle_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (handle_ < 0) throw std::runtime_error(path_ + ": " + strerror(errno) + "; KVTIER_BENCH_DIR names a folder on a disk that serves O_DIRECT");
    unlink(path_.c_str());
  }
  ~DiskFile() { close(handle_); }
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  void Write(const uint8_t* data, int64_t at, int64_t bytes) { Each("write", bytes, [&](int64_t done) { return pwrite(handle_, data + done, static_cast<size_t>(bytes - done), at + done); }); }
  void Read(uint8_t* data, int64_t at, int64_t bytes) { Each("read", bytes, [&](int64_t done) { return pread(handle_, data + done, static_cast<size_t>(bytes - done), at + done); }); }

 private:
  template <class Work>
  void Each(const char* what, int64_t bytes, const Work& work) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t moved = work(done);
      if (moved <= 0) throw std::runtime_error(path_ + ": " + what + ": " + (moved == 0 ? "the file ends" : strerror(errno)));
      done += moved;
    }
  }
  const std::string path_;
  int handle_;
};

// Reads slots of the arena in order, eight at a time, from threads; `Await` returns when the first `count` are there.
class Reading {
 public:
  Reading(DiskFile& file, Engine& engine) : done_(static_cast<size_t>(kHeld)) {
    for (int i = 0; i < 8; ++i) {
      threads_.emplace_back([this, &file, &engine] {
        for (int64_t slot = next_++; slot < kHeld; slot = next_++) {
          try {
            file.Read(engine.arena.data() + slot * engine.slot_bytes, slot * engine.slot_bytes, engine.slot_bytes);
          } catch (const std::exception& error) {
            const std::lock_guard lock(mutex_);
            error_ = error.what();
          }
          const std::lock_guard lock(mutex_);
          done_[static_cast<size_t>(slot)] = true;
          changed_.notify_all();
        }
      });
    }
  }
  ~Reading() {
    for (std::thread& thread : threads_) thread.join();
  }
  void Await(int64_t count) {
    std::unique_lock lock(mutex_);
    const bool all = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return std::all_of(done_.begin(), done_.begin() + count, [](bool done) { return done; }); });
    if (!all) throw std::runtime_error("the disk has not read all blocks within 60 s");
    if (!error_.empty()) throw std::runtime_error(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> done_;
  std::string error_;
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> threads_;
};

KVTIER_BENCH(system_disk) {
  const char* const folder = std::getenv("KVTIER_BENCH_DIR");
  Engine engine(Scaled(8192));
  DiskFile file(folder != nullptr && *folder != 0 ? folder : "/tmp");
  engine.Compute(0, 0);
  std::vector<double> cold, warm, read;
  for (int i = 0; i < Rounds(3); ++i) {
    const int64_t prompt = 1 + i;
    cold.push_back(WallUs([&] { engine.Compute(prompt, 0); }));
    engine.Export();
    for (int64_t slot = 0; slot < kHeld; ++slot) file.Write(engine.arena.data() + slot * engine.slot_bytes, slot * engine.slot_bytes, engine.slot_bytes);
    memset(engine.arena.data(), 0, engine.arena.bytes());
    engine.Forget();
    read.push_back(WallUs([&] { Reading(file, engine).Await(kHeld); }));
    memset(engine.arena.data(), 0, engine.arena.bytes());
    warm.push_back(WallUs([&] {
      Reading reading(file, engine);
      constexpr int64_t kGroup = 32;
      for (int64_t first = 0; first < kHeld; first += kGroup) {
        const int64_t count = std::min(kGroup, kHeld - first);
        reading.Await(first + count);
        engine.Import(first, count);
      }
      engine.Compute(prompt, kHeld * kBlockTokens);
    }));
  }
  ReportUs("warm from the disk", Name(Scaled(8192)), Median(warm), Median(cold), "cold, same prompts");
  ReportUs("warm from the disk beside its reading", Name(Scaled(8192)), Median(warm), Median(read), "the disk alone, 8 reads at a time");
}

KVTIER_BENCH(system_start) {
  std::optional<Engine> engine;
  const double made_us = WallUs([&] { engine.emplace(Scaled(8192)); });
  const double token_us = WallUs([&] { engine->Compute(0, 0); }), again_us = WallUs([&] { engine->Compute(1, 0); });
  const StartTimes& times = engine->model.start_times();
  const double all = made_us + token_us;
  constexpr const char* kAll = "start to the first token of a prompt";
  ReportUs("start: weights made on the device", "8B", times.weights_us, all, kAll);
  ReportUs("start: buffers", "8B", times.buffers_us, all, kAll);
  ReportUs("start: arena pinned, and the rest", "8B", made_us - times.weights_us - times.buffers_us, all, kAll);
  ReportUs("start: first prompt, kernels loaded by it", Name(Scaled(8192)), token_us, again_us, "the second prompt");
  engine.reset();
  CudaOptions options;
  options.capture_at_start = true;
  const Model8B captured({.block_tokens = kBlockTokens, .blocks = 64 * 32, .threads = 1, .max_step_tokens = 64, .max_step_sequences = kTiny ? 4 : 256}, options);
  ReportUs("start: graphs captured", "8B, " + std::to_string(captured.graphs()) + " graphs", captured.start_times().graphs_us, all, kAll);
}

// Decodes with and without `work` beside them, by turns so that both see the same minute.
struct Beside {
  double alone_us, beside_us, work_us;
};
template <class Work>
Beside DecodesBeside(CudaTransformer& model, const Step& decode, const Work& work) {
  constexpr int kTurns = 5, kSettling = 4, kSteps = 17;
  std::vector<double> alone, beside, works;
  std::atomic<bool> stop{false}, on{false};
  std::string error;
  std::thread worker([&] {
    try {
      gpu::Use(0);
      for (on.wait(false); !stop; on.wait(false)) works.push_back(WallUs(work));
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
  });
  for (int turn = 0; turn < Rounds(kTurns); ++turn) {
    for (const bool both : {false, true}) {
      on = both;
      on.notify_one();
      for (int i = 0; i < (kTiny ? 0 : kSettling); ++i) model.Run(decode);  // what began before is over
      for (int i = 0; i < Rounds(kSteps); ++i) (both ? beside : alone).push_back(model.Run(decode).elapsed_us);
    }
  }
  stop = true;
  on = true;
  on.notify_one();
  worker.join();
  if (!error.empty()) throw std::runtime_error(error);
  if (works.empty()) throw std::runtime_error("nothing ran beside the decodes");
  return {Median(alone), Median(beside), Median(works)};
}

// Steps of 32 decodes while blocks come and go: what either loses, and what plain pinned copies of the same bytes cost the decodes.
KVTIER_BENCH(system_beside_decode) {
  const int64_t context = Scaled(2048), each = context / kBlockTokens + 1;
  Engine engine(64, kPromptBlocks + 32 * each + 64, 32);
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < 32; ++i) pieces.push_back({i, context - 1, 1, 1 + kPromptBlocks + i * each, true});
  const Step decode = MakeStep(pieces);
  engine.Export();
  const std::string contexts = std::to_string(context) + " tokens each";
  const auto bytes = static_cast<size_t>(kHeld) * engine.model.block_bytes();
  const gpu::PinnedBuffer plain(bytes, "bench");
  gpu::Stream copies;
  const auto beside = [&](const std::string& name, bool to_host, const auto& work) {
    const auto copy = [&] {
      copies.Copy(to_host ? plain.data() : engine.model.block(1), to_host ? engine.model.block(1) : plain.data(), bytes);
      Finish(copies);
    };
    std::vector<double> alone;
    for (int i = 0; i < Rounds(7); ++i) alone.push_back(WallUs(copy));
    const auto copied = DecodesBeside(engine.model, decode, copy);
    ReportUs("8B decode, batch 32, with " + name + " by one pinned copy", contexts, copied.beside_us, copied.alone_us, "alone");
    const auto moved = DecodesBeside(engine.model, decode, work);
    ReportUs("8B decode, batch 32, beside " + name, contexts, moved.beside_us, moved.alone_us, "alone");
    ReportUs(name + " beside 8B decode", std::to_string(kHeld) + " blocks of " + std::to_string(engine.model.block_bytes() >> 10) + " KiB", moved.work_us, Median(alone),
             "one pinned copy, alone");
  };
  beside("exports", true, [&] { engine.Export(); });
  beside("imports", false, [&] { engine.Import(0, kHeld); });
}

}  // namespace
}  // namespace kvtier::cuda::bench
