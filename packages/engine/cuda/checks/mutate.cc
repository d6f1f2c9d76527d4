#include "mutate.h"

#if defined(KVTIER_EMULATED)
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "../gpu/device.h"
#include "check.h"

namespace kvtier::cuda::check {
namespace {

constexpr unsigned kDeadlineS = 120;

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

// What `work` writes to its argument, and whether it ended with 0, in a process of its own, whose output goes nowhere.
template <class Work>
bool InProcess(std::string& written, const Work& work) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlineS);  // a kernel without its wait may never end
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
  for (ssize_t count; (count = read(ends[0], piece, sizeof piece)) > 0;) written.append(piece, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int Mutate(const std::vector<std::string>& checks, int (*run)(const std::string& name)) {
  struct Meets {
    std::string check;
    std::chrono::steady_clock::duration elapsed;
  };
  const Folder folder;
  std::map<std::string, std::vector<Meets>> waits;
  for (const std::string& check : checks) {
    std::string met;
    const auto start = std::chrono::steady_clock::now();
    const bool good = InProcess(met, [&](std::string& answer) {
      gpu::emulated::WatchWaits("");
      const int code = run(check);
      for (const std::string& wait : gpu::emulated::WaitsMet()) answer += wait + "\n";
      return code;
    });
    if (!good) {
      fprintf(stderr, "%s fails as it is\n", check.c_str());
      return 1;
    }
    const auto elapsed = std::chrono::steady_clock::now() - start;
    for (size_t at = 0, end; (end = met.find('\n', at)) != std::string::npos; at = end + 1) {
      waits[met.substr(at, end - at)].push_back({check, elapsed});
    }
  }
  int unseen = 0;
  for (auto& [wait, meets] : waits) {
    std::ranges::sort(meets, {}, &Meets::elapsed);
    const auto found = std::ranges::find_if(meets, [&](const Meets& one) {
      std::string nothing;
      return !InProcess(nothing, [&](std::string&) {
        gpu::emulated::WatchWaits(wait);
        EndAtFailure();
        return run(one.check);
      });
    });
    const bool seen = found != meets.end();
    unseen += seen ? 0 : 1;
    printf("{\"wait\":\"%s\",\"found\":%s%s%s}\n", wait.c_str(), seen ? "\"" : "", seen ? found->check.c_str() : "null", seen ? "\"" : "");
    fflush(stdout);
  }
  fprintf(stderr, "%zu waits, %d taken away unseen\n", waits.size(), unseen);
  return 0;
}

}  // namespace kvtier::cuda::check
#endif
