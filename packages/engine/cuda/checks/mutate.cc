#include "mutate.h"

#if defined(KVTIER_EMULATED)
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "../gpu/device.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

// A kernel without its wait may never end. It is told by the CPU time that it took: a machine that has other things to do makes a check late,
// and nothing else.
constexpr double kEndless = 20;       // times what the check takes as it is,
constexpr double kLeastCpuS = 10;     // but at least this
constexpr int64_t kLateMs = 600'000;  // by the clock: nobody knows what would have come

// A folder for what checks make: a mutation ends in their midst, and leaves it.
class Folder {
 public:
  Folder() {
    const char* above = std::getenv("TMPDIR");
    std::string name = std::string(above != nullptr ? above : "/tmp") + "/kvtier-mutate-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) return;
    path_ = name;
    setenv("TMPDIR", name.c_str(), 1);
  }
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

 private:
  std::filesystem::path path_;
};

enum class End { kWell, kFailed, kLate };

struct Ran {
  End end = End::kFailed;
  std::string written;
  double cpu_s = 0;
};

double Seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec); }

// What `work` writes to its argument, and how it ended, in a process of its own, whose output goes nowhere. What takes more than `cpu_s` of the
// CPU fails.
template <class Work>
Ran InProcess(double cpu_s, int64_t late_ms, const Work& work) {
  Ran ran;
  int ends[2];
  if (pipe(ends) != 0) return ran;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const auto limit = static_cast<rlim_t>(std::ceil(cpu_s));
    const rlimit cpu{limit, limit + 1};
    if (limit > 0) setrlimit(RLIMIT_CPU, &cpu);
    const itimerval late{{}, {late_ms / 1000, late_ms % 1000 * 1000}};
    setitimer(ITIMER_REAL, &late, nullptr);
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    std::string answer;
    const int code = work(answer);
    for (size_t at = 0; at < answer.size();) {
      const ssize_t count = write(ends[1], answer.data() + at, answer.size() - at);
      if (count <= 0) break;
      at += static_cast<size_t>(count);
    }
    _exit(code);
  }
  close(ends[1]);
  char piece[4096];
  for (ssize_t count; (count = read(ends[0], piece, sizeof piece)) > 0;) ran.written.append(piece, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  rusage used{};
  wait4(child, &status, 0, &used);
  ran.cpu_s = Seconds(used.ru_utime) + Seconds(used.ru_stime);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) ran.end = End::kWell;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) ran.end = End::kLate;
  return ran;
}

}  // namespace

int Mutate(const std::vector<std::string>& checks, int (*run)(const std::string& name)) {
  struct Meets {
    std::string check;
    double cpu_s;
  };
  const char* told = std::getenv("KVTIER_MUTATE_LATE_MS");
  const int64_t late_ms = told != nullptr ? atoll(told) : kLateMs;
  const Folder folder;
  std::map<std::string, std::vector<Meets>> waits;
  for (const std::string& check : checks) {
    const Ran as_it_is = InProcess(0, kLateMs, [&](std::string& answer) {
      gpu::emulated::WatchWaits("");
      const int code = run(check);
      for (const std::string& wait : gpu::emulated::WaitsMet()) answer += wait + "\n";
      return code;
    });
    if (as_it_is.end != End::kWell) {
      fprintf(stderr, "%s fails as it is\n", check.c_str());
      return 1;
    }
    const std::string& met = as_it_is.written;
    for (size_t at = 0, end; (end = met.find('\n', at)) != std::string::npos; at = end + 1) {
      waits[met.substr(at, end - at)].push_back({check, as_it_is.cpu_s});
    }
  }
  int unseen = 0, late = 0;
  for (auto& [wait, meets] : waits) {
    std::ranges::sort(meets, {}, &Meets::cpu_s);
    std::string found, was_late;
    for (const Meets& one : meets) {
      const Ran without = InProcess(std::max(kLeastCpuS, kEndless * one.cpu_s), late_ms, [&](std::string&) {
        gpu::emulated::WatchWaits(wait);
        EndAtFailure();
        return run(one.check);
      });
      if (without.end == End::kLate) was_late = one.check;
      if (without.end != End::kFailed) continue;
      found = one.check;
      break;
    }
    unseen += found.empty() ? 1 : 0;
    late += found.empty() && !was_late.empty() ? 1 : 0;
    printf("{\"wait\":\"%s\",\"found\":%s", wait.c_str(), found.empty() ? "null" : ("\"" + found + "\"").c_str());
    printf("%s}\n", found.empty() && !was_late.empty() ? (",\"late\":\"" + was_late + "\"").c_str() : "");
    fflush(stdout);
  }
  fprintf(stderr, "%zu waits, %d taken away unseen, %d of them by a check that did not end in time\n", waits.size(), unseen, late);
  return 0;
}

}  // namespace kvtier::cuda::check
#endif
