// Timing, limits and the main function of kernel_bench: `kernel_bench [--list] [--seconds N] [NAME...]` runs the cases whose name contains
// one of the arguments, each in a process of its own (`--case NAME`) that may take N seconds (120). `--probe` says what device there is, `--probe
// --rate` what it reaches in matrix products, too.
// Exit code 0: all went well; 1: a case failed, its line says why; 2: there is no GPU.
#include "bench.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "../gemm/cublaslt.h"
#include "../json.h"

namespace kvtier::cuda::bench {
namespace {

constexpr size_t kFlushBytes = kTiny ? 1 << 20 : 256 << 20;  // several times the L2 of any GPU there is
constexpr size_t kCopyBytes = size_t{1} << (kTiny ? 22 : 30);
constexpr int64_t kDeadlineUs = 60'000'000;
constexpr int kNoGpu = 2;

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::string Number(double value) {  // JSON has no NaN and no infinity
  char text[40];
  snprintf(text, sizeof text, "%.6g", value);
  return std::isfinite(value) ? text : "null";
}

// One line, at once: what comes after may end the process.
void Print(const std::string& name, double value, const std::string& unit, double limit, const std::string& limit_name, double ratio) {
  printf("{\"name\":%s,\"value\":%s,\"unit\":\"%s\",\"limit\":%s,\"limitName\":%s,\"ratio\":%s}\n", Quoted(name).c_str(),
         Number(value).c_str(), unit.c_str(), Number(limit).c_str(), Quoted(limit_name).c_str(), Number(ratio).c_str());
  fflush(stdout);
  fprintf(stderr, "%-56s %10.4g %-8s %5.1f %% of %s\n", name.c_str(), value, unit.c_str(), 100 * ratio, limit_name.c_str());
}

void PrintError(const std::string& name, const std::string& error) {
  printf("{\"case\":%s,\"error\":%s}\n", Quoted(name).c_str(), Quoted(error).c_str());
  fflush(stdout);
  fprintf(stderr, "%s: %s\n", name.c_str(), error.c_str());
}

double CopyRate() {
  static const double gb_per_s = [] {
    gpu::Stream stream;
    const gpu::Buffer a(kCopyBytes, "copy source"), b(kCopyBytes, "copy target");
    stream.Set(a.data(), 1, kCopyBytes);
    return 2.0 * kCopyBytes / TimeUs(stream, [&] { stream.Copy(b.data(), a.data(), kCopyBytes); }) / 1000;
  }();
  return gb_per_s;
}

// In this process.
int RunCase(const std::string& name) {
  for (const Case& one : cases()) {
    if (name != one.name) continue;
    try {
      std::string why;
      if (gpu::DeviceCount(&why) == 0) throw std::runtime_error("no GPU: " + why);
      gpu::Use(0);
      one.run();
      return 0;
    } catch (const std::exception& error) {
      PrintError(name, error.what());
      fflush(nullptr);
      _exit(1);  // a device that has failed is not waited for
    }
  }
  fprintf(stderr, "%s: unknown case; --list names them\n", name.c_str());
  return 1;
}

// In a process of its own, killed after `seconds`. The case prints why it failed; what ended without a word is told here.
bool RunApart(const char* name, int seconds) {
  const std::string self = "/proc/self/exe";
  std::string words[] = {"kernel_bench", "--case", name};
  char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
  pid_t child = 0;
  if (const int error = posix_spawn(&child, self.c_str(), nullptr, nullptr, arguments, environ)) {
    PrintError(name, std::string("could not be started: ") + strerror(error));
    return false;
  }
  const int handle = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  bool ended = true;
  if (handle >= 0) {
    pollfd waited{handle, POLLIN, 0};
    ended = poll(&waited, 1, seconds * 1000) > 0;
    close(handle);
  } else {  // gVisor and kernels before 5.3
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    siginfo_t info{};
    while (waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT | WNOHANG) == 0 && info.si_pid == 0) {
      if (!(ended = std::chrono::steady_clock::now() < until)) break;
      usleep(20'000);
    }
  }
  if (!ended) kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  if (!ended) {
    PrintError(name, "did not end within " + std::to_string(seconds) + " s, and was killed");
  } else if (WIFSIGNALED(status)) {
    PrintError(name, std::string("ended by a signal: ") + strsignal(WTERMSIG(status)));
  } else if (WEXITSTATUS(status) > 1) {
    PrintError(name, "ended with code " + std::to_string(WEXITSTATUS(status)));
  }
  return ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Whether there is a GPU is asked in a process of its own, too: a driver's state is not kept beside those of the cases.
int Probe(bool with_rate) {
  std::string why;
  if (gpu::DeviceCount(&why) == 0) {
    fprintf(stderr, "no GPU: %s\n", why.c_str());
    return kNoGpu;
  }
  gpu::Use(0);
  std::string cublaslt = "not found: ";
  if (const auto library = CublasLt::Load("", &cublaslt)) cublaslt = library->name();
  const gpu::DeviceInfo info = gpu::Info();
  printf("{\"device\":%s,\"capability\":%d,\"multiprocessors\":%d,\"bytes\":%zu,\"freeBytes\":%zu,\"cublaslt\":%s", Quoted(info.name).c_str(),
         info.compute_capability, info.multiprocessors, info.total_bytes, info.free_bytes, Quoted(cublaslt).c_str());
  if (with_rate) {
    const GemmRate gemm = MeasuredGemmRate();
    printf(",\"gemm\":%s,\"gemmTflops\":%s,\"favouriteTflops\":%s", Quoted(gemm.name).c_str(), Number(gemm.fastest / 1e12).c_str(),
           Number(gemm.favourite / 1e12).c_str());
  }
  printf("}\n");
  return fflush(stdout);
}

int RunAll(const std::vector<std::string>& wanted, int seconds) {
  bool well = true, any = false;
  for (const Case& one : cases()) {
    bool selected = wanted.empty();
    for (const std::string& part : wanted) selected = selected || strstr(one.name, part.c_str()) != nullptr;
    if (!selected) continue;
    any = true;
    well = RunApart(one.name, seconds) && well;
  }
  if (!any) fprintf(stderr, "no case has such a name; --list names them\n");
  return well && any ? 0 : 1;
}

}  // namespace

Registration::Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }

double Median(std::vector<double> values) {
  if (values.empty()) throw std::runtime_error("nothing was measured");
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void Finish(gpu::Stream& stream) {
  if (!stream.Synchronize(kDeadlineUs)) throw std::runtime_error("the device did not end what it was given within 60 s");
}

double TimeUs(gpu::Stream& stream, const std::function<void()>& enqueue, int repeats) {
  const gpu::Buffer flush(kFlushBytes, "what flushes the L2 cache");
  std::vector<double> times;
  for (int i = 0; i <= Rounds(repeats); ++i) {
    gpu::Event from(true), to(true);
    stream.Set(flush.data(), static_cast<uint8_t>(i), kFlushBytes);
    from.Record(stream);
    enqueue();
    to.Record(stream);
    if (!to.Wait(kDeadlineUs)) throw std::runtime_error("a kernel did not end within 60 s");
    if (i > 0) times.push_back(gpu::Event::ElapsedUs(from, to));
  }
  return Median(times);
}

void ReportBytes(const std::string& kernel, const std::string& shape, double us, double bytes) {
  const double rate = bytes / us / 1000;
  Print(kernel + " " + shape, rate, "GB/s", CopyRate(), "device memcpy", rate / CopyRate());
}
void ReportFlops(const std::string& kernel, const std::string& shape, double us, double flops) {
  static const GemmRate gemm = MeasuredGemmRate();
  Print(kernel + " " + shape, flops / us / 1e6, "TFLOP/s", gemm.fastest / 1e12, gemm.name, flops / us * 1e6 / gemm.fastest);
}
void ReportUs(const std::string& kernel, const std::string& shape, double us, double limit_us, const std::string& limit_name) {
  Print(kernel + " " + shape, us, "us", limit_us, limit_name, limit_us / us);
}
void ReportCount(const std::string& what, double count, double of, const std::string& of_name) {
  Print(what, count, "of", of, of_name, count / of);
}

}  // namespace kvtier::cuda::bench

int main(int count, char** arguments) {
  using namespace kvtier::cuda::bench;
  std::vector<std::string> wanted(arguments + 1, arguments + count);
  if (!wanted.empty() && wanted[0] == "--list") {
    for (const auto& one : cases()) printf("%s\n", one.name);
    return 0;
  }
  if (wanted.size() == 2 && wanted[0] == "--case") return RunCase(wanted[1]);
  try {
    if (!wanted.empty() && wanted[0] == "--probe") return Probe(wanted.size() > 1 && wanted[1] == "--rate");
    int seconds = 120;
    if (wanted.size() > 1 && wanted[0] == "--seconds") {
      seconds = std::stoi(wanted[1]);
      wanted.erase(wanted.begin(), wanted.begin() + 2);
    }
    std::string why;
    if (kvtier::gpu::DeviceCount(&why) == 0) {
      fprintf(stderr, "no GPU: %s\n", why.c_str());
      return kNoGpu;
    }
    return RunAll(wanted, seconds);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
