// Creation and mapping of the arena file; see arena.h.
#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace kvtier {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

[[noreturn]] void Fail(const char* code, const std::string& path, const std::string& what) {
  throw std::runtime_error(std::string(code) + ": " + path + ": " + what);
}

uint8_t* Map(int fd, const std::string& path, uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) Fail("SETUP", path, std::string("cannot be mapped (") + std::strerror(errno) + ")");
  // A child of this process must not hold the arena's memory, nor a core dump its bytes.
  madvise(base, bytes, MADV_DONTFORK);
  madvise(base, bytes, MADV_DONTDUMP);
  // Where the system allows huge pages for shared memory on advice (shmem_enabled), this is the advice; else nothing happens.
  madvise(base, bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(base);
}

// Page tables are filled now rather than at the first copy of each page.
void Touch(uint8_t* base, uint64_t bytes, unsigned threads) {
  // Shares end between huge pages: the kernel populates none of hugetlbfs otherwise.
  const uint64_t share = (bytes / threads / kHugePageBytes + 1) * kHugePageBytes;
  std::vector<std::thread> workers;
  for (uint64_t from = 0; from < bytes; from += share) {
    const uint64_t count = std::min(share, bytes - from);
    workers.emplace_back([=] {
      if (madvise(base + from, count, MADV_POPULATE_WRITE) == 0) return;
      for (uint64_t page = 0; page < count; page += kArenaHeaderBytes) {
        auto* byte = reinterpret_cast<volatile uint8_t*>(base + from + page);
        *byte = *byte;
      }
    });
  }
  for (auto& worker : workers) worker.join();
}

struct Fd {
  int number;
  int Release() { return std::exchange(number, -1); }
  ~Fd() {
    if (number >= 0) close(number);
  }
};

}  // namespace

std::shared_ptr<Arena> Arena::Create(const std::string& path, uint64_t bytes, unsigned threads) {
  if (bytes < 2 * kArenaHeaderBytes || bytes % kArenaHeaderBytes != 0) {
    Fail("CONFIG", path, "an arena is a whole number of 4096-byte pages, at least two");
  }
  Fd fd{open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
  if (fd.number < 0) Fail("SETUP", path, std::string("cannot be created (") + std::strerror(errno) + ")");
  try {
    if (const int error = posix_fallocate(fd.number, 0, static_cast<off_t>(bytes)); error != 0) {
      struct statvfs fs {};
      fstatvfs(fd.number, &fs);
      const uint64_t freeBytes = uint64_t{fs.f_bavail} * fs.f_frsize;
      Fail("CAPACITY", path,
           "no space for an arena of " + std::to_string(bytes) + " bytes (" + std::strerror(error) + ", about " +
               std::to_string(freeBytes) + " free); enlarge the file system (docker: --shm-size) or make the arena smaller");
    }
    uint64_t id = 0;
    if (getrandom(&id, sizeof(id), 0) != sizeof(id)) Fail("SETUP", path, "no random numbers from the kernel");
    uint8_t* base = Map(fd.number, path, bytes);
    std::shared_ptr<Arena> arena(new Arena(fd.Release(), base, bytes, id));
    Touch(base, bytes, std::clamp(threads, 1u, 64u));
    const ArenaHeader header{kArenaMagic, kArenaVersion, kArenaHeaderBytes, bytes, id};
    std::memcpy(base, &header, sizeof(header));
    return arena;
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

std::shared_ptr<Arena> Arena::Open(const std::string& path, uint64_t bytes, uint64_t id) {
  Fd fd{open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
  if (fd.number < 0) Fail("SETUP", path, std::string("cannot be opened (") + std::strerror(errno) + ")");
  struct stat info {};
  if (fstat(fd.number, &info) != 0 || static_cast<uint64_t>(info.st_size) != bytes || bytes < 2 * kArenaHeaderBytes) {
    Fail("PROTOCOL", path, "has another size than announced");
  }
  uint8_t* base = Map(fd.number, path, bytes);
  std::shared_ptr<Arena> arena(new Arena(fd.Release(), base, bytes, id));
  if (const std::string fault = ArenaFault(base, bytes, id); !fault.empty()) Fail("PROTOCOL", path, fault);
  return arena;
}

Arena::~Arena() {
  munmap(base_, bytes_);
  close(fd_);
}

}  // namespace kvtier
