#include "choices.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace kvtier::cuda {
namespace {

constexpr char kHeading[] = "kvtier: which way matrix products go, 1";
constexpr size_t kMaxChoices = 4096;
constexpr int kMaxAlgorithm = 63;

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

Choices::Choices(const std::string& folder, const std::string& of) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return;
  std::string name;
  for (const char c : of) name += isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' ? c : '-';
  file_ = folder + "/products-" + name + ".txt";
  Read();
}

void Choices::Read() {
  std::ifstream in(file_);
  std::string line;
  if (!std::getline(in, line) || line != kHeading) return;
  std::map<ProductShape, int> found;
  while (std::getline(in, line) && line != "end") {
    std::istringstream fields(line);
    int type = -1, f32 = -1, choice = kMaxAlgorithm + 1;
    ProductShape shape{};
    if (!(fields >> type >> shape.rows >> shape.outputs >> shape.inputs >> f32 >> choice)) return;
    const bool valid = type >= 0 && type <= static_cast<int>(NumberType::kBf16) && f32 >= 0 && f32 <= 1 && choice >= kOurs &&
                       choice <= kMaxAlgorithm && shape.rows > 0 && shape.outputs > 0 && shape.inputs > 0 && found.size() < kMaxChoices;
    if (!valid) return;
    shape.type = static_cast<NumberType>(type);
    shape.target_f32 = f32 == 1;
    found[shape] = choice;
  }
  if (line != "end") return;  // cut short
  for (const auto& [shape, choice] : found) choices_[shape] = choice;
}

bool Choices::Write() const {
  const std::string next = file_ + "." + std::to_string(getpid());
  {
    std::ofstream out(next, std::ios::trunc);
    out << kHeading << "\n";
    for (const auto& [s, choice] : choices_) {
      out << static_cast<int>(s.type) << ' ' << s.rows << ' ' << s.outputs << ' ' << s.inputs << ' ' << (s.target_f32 ? 1 : 0) << ' '
          << choice << "\n";
    }
    out << "end\n";
    out.flush();
    if (!out) return false;
  }
  if (rename(next.c_str(), file_.c_str()) == 0) return true;
  unlink(next.c_str());
  return false;
}

const int* Choices::Find(const ProductShape& shape) const {
  const auto found = choices_.find(shape);
  return found == choices_.end() ? nullptr : &found->second;
}

int Choices::Keep(const ProductShape& shape, int choice) {
  if (choices_.size() >= kMaxChoices) choices_.clear();
  if (!file_.empty()) {
    const FileLock lock(file_);
    Read();
    choice = choices_.emplace(shape, choice).first->second;
    if (!Write()) file_.clear();
  }
  return choices_.emplace(shape, choice).first->second;
}

}  // namespace kvtier::cuda
