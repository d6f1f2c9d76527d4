#include "kept_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>

namespace kvtier::cuda {
namespace {

constexpr char kEnd[] = "end";
constexpr size_t kMaxLines = 4096;

// One at a time, of all processes; none when it cannot be had.
class FileLock {
 public:
  explicit FileLock(const std::string& file) : fd_(open((file + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
    if (fd_ >= 0) (void)flock(fd_, LOCK_EX | LOCK_NB);  // who finds it taken goes on: the rename is whole all the same
  }
  ~FileLock() {
    if (fd_ >= 0) close(fd_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  const int fd_;
};

}  // namespace

KeptFile::KeptFile(const std::string& folder, const std::string& kind, const std::string& of, std::string heading)
    : heading_(std::move(heading)) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return;
  std::string name;
  for (const char c : of) name += isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' ? c : '-';
  path_ = folder + "/" + kind + "-" + name + ".txt";
}

std::optional<std::vector<std::string>> KeptFile::Read() const {
  std::ifstream in(path_);
  std::string line;
  if (!std::getline(in, line) || line != heading_) return std::nullopt;
  std::vector<std::string> lines;
  while (std::getline(in, line) && line != kEnd && lines.size() < kMaxLines) lines.push_back(line);
  if (line != kEnd) return std::nullopt;  // cut short
  return lines;
}

void KeptFile::Change(const std::function<std::vector<std::string>()>& lines) {
  if (path_.empty()) return;
  const FileLock lock(path_);
  if (!Write(lines())) path_.clear();
}

bool KeptFile::Write(const std::vector<std::string>& lines) const {
  const std::string next = path_ + "." + std::to_string(getpid());
  {
    std::ofstream out(next, std::ios::trunc);
    out << heading_ << "\n";
    for (const std::string& line : lines) out << line << "\n";
    out << kEnd << "\n";
    out.flush();
    if (!out) return false;
  }
  if (rename(next.c_str(), path_.c_str()) == 0) return true;
  unlink(next.c_str());
  return false;
}

}  // namespace kvtier::cuda
