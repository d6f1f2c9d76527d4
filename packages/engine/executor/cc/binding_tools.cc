// What stands beside the executor: the content digest of weight files, and the machine's own limits, measured by the
// benches in the same run as the figures. All of it runs on a libuv thread and answers by promise.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "binding.h"
#include "memory.h"
#include "xxh3.h"

namespace kvtier {
namespace {

class Task : public Napi::AsyncWorker {
 public:
  Task(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish)
      : AsyncWorker(env), deferred_(Napi::Promise::Deferred::New(env)), work_(std::move(work)), finish_(std::move(finish)) {}
  Napi::Promise Start() {
    const auto promise = deferred_.Promise();
    Queue();
    return promise;
  }

 protected:
  void Execute() override { work_(); }
  void OnOK() override { deferred_.Resolve(finish_(Env())); }
  void OnError(const Napi::Error& error) override { deferred_.Reject(error.Value()); }

 private:
  Napi::Promise::Deferred deferred_;
  std::function<void()> work_;
  std::function<Napi::Value(Napi::Env)> finish_;
};

// By a descriptor that the caller keeps open; where it stands does not move.
XXH128_canonical_t DigestFile(int fd, const std::string& path) {
  posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  constexpr size_t kPiece = 1 << 20;
  const auto buffer = std::make_unique<uint8_t[]>(kPiece);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (off_t at = 0;;) {
    const ssize_t count = pread(fd, buffer.get(), kPiece, at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error("MODEL: " + path + ": cannot be read: " + strerror(errno));
    if (count == 0) break;
    XXH3_128bits_update(&state, buffer.get(), static_cast<size_t>(count));
    at += count;
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
  return canonical;
}

Napi::Value Digest(const Napi::CallbackInfo& info) {
  auto digest = std::make_shared<XXH128_canonical_t>();
  return (new Task(
              info.Env(),
              [fd = info[0].ToNumber().Int32Value(), path = info[1].ToString().Utf8Value(), digest] {
                *digest = DigestFile(fd, path);
              },
              [digest](Napi::Env env) -> Napi::Value {
                auto bytes = Napi::Uint8Array::New(env, sizeof digest->digest);
                memcpy(bytes.Data(), digest->digest, sizeof digest->digest);
                return bytes;
              }))
      ->Start();
}

constexpr int kRepeats = 7;

// Best rate per second over `repeats` rounds of `round(thread)`, which does `amount` units on each of `threads` threads.
double BestRate(int repeats, int threads, double amount, const std::function<void(int)>& round) {
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> running;
    for (int t = 1; t < threads; ++t) running.emplace_back(round, t);
    round(0);
    for (auto& thread : running) thread.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, amount * threads / seconds);
  }
  return best;
}

Napi::Value RateTask(const Napi::CallbackInfo& info, std::function<double()> measure) {
  auto rate = std::make_shared<double>(0);
  return (new Task(
              info.Env(), [rate, measure = std::move(measure)] { *rate = measure(); },
              [rate](Napi::Env env) -> Napi::Value { return Napi::Number::New(env, *rate); }))
      ->Start();
}

// OpenBLAS, opened where its rate is asked for: nothing else needs it, so nothing is linked with it. It stays open, with its threads.
struct OpenBlas {
  static constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;  // of its C interface
  void (*sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int a_stride, const float* b,
                int b_stride, float beta, float* c, int c_stride);
  void (*set_threads)(int count);

  explicit OpenBlas(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) Refuse(path, dlerror());
    sgemm = reinterpret_cast<decltype(sgemm)>(dlsym(library, "cblas_sgemm"));
    set_threads = reinterpret_cast<decltype(set_threads)>(dlsym(library, "openblas_set_num_threads"));
    if (!sgemm || !set_threads) Refuse(path, "it has no cblas_sgemm or no openblas_set_num_threads");
  }
  [[noreturn]] static void Refuse(const std::string& path, const std::string& why) {
    throw std::runtime_error("SETUP: " + path + ": OpenBLAS cannot be used (" + why + "); install it (Debian: libopenblas0)");
  }
};

// FLOP/s of big square sgemms of OpenBLAS with its own threads: the machine's ceiling for prefill. The mean over `repeats`,
// because what is compared with it runs as long and meets the same neighbours.
Napi::Value SgemmRate(const Napi::CallbackInfo& info) {
  const int size = info[0].ToNumber().Int32Value(), threads = info[1].ToNumber().Int32Value(),
            repeats = info[2].ToNumber().Int32Value();
  return RateTask(info, [size, threads, repeats, library = info[3].ToString().Utf8Value()] {
    const OpenBlas blas(library);
    const auto n = static_cast<size_t>(size);
    Memory memory(3 * n * n * 4, "the sgemm measurement");
    std::minstd_rand random(1);
    for (size_t i = 0; i < 2 * n * n; ++i) memory.floats()[i] = static_cast<float>(random() % 1000) / 1000.0f - 0.5f;
    blas.set_threads(threads);
    const auto multiply = [&] {
      blas.sgemm(OpenBlas::kRowMajor, OpenBlas::kNoTranspose, OpenBlas::kTranspose, size, size, size, 1.0f, memory.floats(), size,
                 memory.floats() + n * n, size, 0.0f, memory.floats() + 2 * n * n, size);
    };
    multiply();  // wakes its threads
    const double rate = BestRate(1, 1, 2.0 * size * size * size * repeats, [&](int) {
      for (int i = 0; i < repeats; ++i) multiply();
    });
    blas.set_threads(1);
    return rate;
  });
}

// Bytes per second of memcpy in pieces of `pieceBytes`, over memory far larger than the caches.
Napi::Value MemcpyRate(const Napi::CallbackInfo& info) {
  const auto piece = static_cast<size_t>(info[0].ToNumber().Int64Value());
  const auto total = static_cast<size_t>(info[1].ToNumber().Int64Value()) / piece * piece;
  const int threads = info[2].ToNumber().Int32Value(), repeats = info[3].ToNumber().Int32Value();
  return RateTask(info, [piece, total, threads, repeats] {
    Memory source(total, "the memcpy measurement"), target(total, "the memcpy measurement");
    memset(source.data(), 1, total);
    memset(target.data(), 2, total);
    const size_t share = total / static_cast<size_t>(threads) / piece;
    return BestRate(repeats, threads, static_cast<double>(share * piece), [&](int thread) {
      for (size_t i = 0; i < share; ++i) {
        const size_t at = (static_cast<size_t>(thread) * share + i) * piece;
        memcpy(target.data() + at, source.data() + at, piece);
      }
    });
  });
}

// Bytes per second of plain reading, the ceiling of decode.
Napi::Value ReadRate(const Napi::CallbackInfo& info) {
  const auto total = static_cast<size_t>(info[0].ToNumber().Int64Value());
  const int threads = info[1].ToNumber().Int32Value();
  return RateTask(info, [total, threads] {
    Memory memory(total, "the read measurement");
    memset(memory.data(), 1, total);
    const size_t share = total / 4 / static_cast<size_t>(threads);
    std::vector<float> sums(static_cast<size_t>(threads) * 16);
    const double rate = BestRate(kRepeats, threads, static_cast<double>(share * 4), [&](int thread) {
      const float* from = memory.floats() + static_cast<size_t>(thread) * share;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (size_t i = 0; i < share; ++i) sum += from[i];
      sums[static_cast<size_t>(thread) * 16] = sum;
    });
    volatile float keep = sums[0];
    (void)keep;
    return rate;
  });
}

}  // namespace

void RegisterTools(Napi::Env env, Napi::Object exports) {
  exports.Set("digestFile", Napi::Function::New(env, Digest));
  exports.Set("sgemmRate", Napi::Function::New(env, SgemmRate));
  exports.Set("memcpyRate", Napi::Function::New(env, MemcpyRate));
  exports.Set("readRate", Napi::Function::New(env, ReadRate));
}

}  // namespace kvtier
