// Creation and mapping of the arena file; see arena.h.
#include "arena.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
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
constexpr uint64_t kReservedAtOnce = uint64_t{64} << 20;

[[noreturn]] void Fail(const char* code, const std::string& path, const std::string& what) {
  throw std::runtime_error(std::string(code) + ": " + path + ": " + what);
}

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; the C library's headers may be older
#endif

// A huge page of the file needs an address like its own, which the system chooses only where huge pages are its default.
void* MapAligned(int fd, uint64_t bytes) {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  void* base = mmap(nullptr, bytes, kAccess, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED || reinterpret_cast<uintptr_t>(base) % kHugePageBytes == 0) return base;
  munmap(base, bytes);
  void* room = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  const uint64_t before = kHugePageBytes - reinterpret_cast<uintptr_t>(room) % kHugePageBytes;
  uint8_t* const aligned = static_cast<uint8_t*>(room) + before;
  munmap(room, before);
  munmap(aligned + bytes, kHugePageBytes - before);
  return mmap(aligned, bytes, kAccess, MAP_SHARED | MAP_FIXED, fd, 0);
}

uint8_t* Map(int fd, const std::string& path, uint64_t bytes) {
  void* base = MapAligned(fd, bytes);
  if (base == MAP_FAILED) Fail("SETUP", path, std::string("cannot be mapped (") + std::strerror(errno) + ")");
  // A child of this process must not hold the arena's memory, nor a core dump its bytes.
  madvise(base, bytes, MADV_DONTFORK);
  madvise(base, bytes, MADV_DONTDUMP);
  // Where the system allows huge pages for shared memory on advice (shmem_enabled), this is the advice; else nothing happens.
  madvise(base, bytes, MADV_HUGEPAGE);
  return static_cast<uint8_t*>(base);
}

// `work` on each thread's share of the arena.
template <typename Work>
void InShares(uint8_t* base, uint64_t bytes, unsigned threads, const Work& work) {
  // Shares end between huge pages: the kernel populates none of hugetlbfs otherwise.
  const uint64_t share = (bytes / threads / kHugePageBytes + 1) * kHugePageBytes;
  std::vector<std::thread> workers;
  for (uint64_t from = 0; from < bytes; from += share) {
    const auto run = [=] { work(base + from, std::min(share, bytes - from)); };
    try {
      workers.emplace_back(run);
    } catch (const std::exception&) {
      run();  // there is no thread for it
    }
  }
  for (auto& worker : workers) worker.join();
}

// Huge pages where the system has no policy of its own for them, as most have none for shared memory: the kernel makes one of an
// extent of the file in which there is a page already. A best effort; where it ends, small pages follow.
void MakeHugePages(int fd, uint8_t* base, uint64_t bytes, unsigned threads) {
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0 || fs.f_type != TMPFS_MAGIC || fs.f_bavail * static_cast<uint64_t>(fs.f_bsize) < bytes) return;
  InShares(base, bytes, threads, [=](uint8_t* from, uint64_t count) {
    for (uint64_t at = 0; at + kHugePageBytes <= count; at += kHugePageBytes) {
      while (fallocate(fd, 0, static_cast<off_t>(from + at - base), kArenaHeaderBytes) != 0) {
        if (errno != EINTR) return;
      }
      if (madvise(from + at, kHugePageBytes, MADV_COLLAPSE) != 0) return;
    }
  });
}

// Room for all of the file; 0, or the errno. Any signal breaks a call off, and file systems in memory take back what it had reserved: so it
// is done in pieces, and in smaller ones where signals come often, as they do to a process that is profiled.
int Reserve(int fd, uint64_t bytes) {
  uint64_t piece = kReservedAtOnce;
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t count = std::min(piece, bytes - at);
    const int error = posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(count));
    if (error == 0) at += count;
    else if (error == EINTR) piece = std::max(piece / 2, kHugePageBytes);
    else return error;
  }
  return 0;
}

// Page tables are filled now rather than at the first copy of each page.
void Touch(uint8_t* base, uint64_t bytes, unsigned threads) {
  InShares(base, bytes, threads, [](uint8_t* from, uint64_t count) {
    if (madvise(from, count, MADV_POPULATE_WRITE) == 0) return;
    for (uint64_t page = 0; page < count; page += kArenaHeaderBytes) {
      auto* byte = reinterpret_cast<volatile uint8_t*>(from + page);
      *byte = *byte;
    }
  });
}

struct Fd {
  int number;
  int Release() { return std::exchange(number, -1); }
  ~Fd() {
    if (number >= 0) close(number);
  }
};

[[noreturn]] void NoSpace(const std::string& path, uint64_t bytes, int error) {
  struct statvfs fs {};
  statvfs(path.c_str(), &fs);
  const uint64_t freeBytes = uint64_t{fs.f_bavail} * fs.f_frsize;
  Fail("CAPACITY", path,
       "no space for an arena of " + std::to_string(bytes) + " bytes (" + std::strerror(error) + ", about " +
           std::to_string(freeBytes) + " free); enlarge the file system (docker: --shm-size) or make the arena smaller");
}

}  // namespace

std::shared_ptr<Arena> Arena::Create(const std::string& path, uint64_t bytes, unsigned threads) {
  if (bytes < 2 * kArenaHeaderBytes || bytes % kArenaHeaderBytes != 0) {
    Fail("CONFIG", path, "an arena is a whole number of 4096-byte pages, at least two");
  }
  Fd fd{open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600)};
  if (fd.number < 0) Fail("SETUP", path, std::string("cannot be created (") + std::strerror(errno) + ")");
  try {
    // Who finds the file unlocked removes it, and may have found it in the instant before this (see unlinkUnlocked).
    struct stat info {};
    while (flock(fd.number, LOCK_EX) != 0) {
      if (errno != EINTR) Fail("SETUP", path, std::string("cannot be locked (") + std::strerror(errno) + ")");
    }
    if (fstat(fd.number, &info) != 0 || info.st_nlink == 0) Fail("SETUP", path, "another node removed it; start again");
    uint64_t id = 0;
    if (getrandom(&id, sizeof(id), 0) != sizeof(id)) Fail("SETUP", path, "no random numbers from the kernel");
    if (ftruncate(fd.number, static_cast<off_t>(bytes)) != 0) NoSpace(path, bytes, errno);
    // Asked first: what no file system holds may not fit the address space either, and that would be the complaint.
    if (struct statvfs fs {}; fstatvfs(fd.number, &fs) == 0 && fs.f_blocks != 0 && uint64_t{fs.f_blocks} * fs.f_frsize < bytes) {
      NoSpace(path, bytes, ENOSPC);
    }
    uint8_t* base = Map(fd.number, path, bytes);
    std::shared_ptr<Arena> arena(new Arena(fd.Release(), base, bytes, id));
    threads = std::clamp(threads, 1u, 64u);
    MakeHugePages(arena->fd_, base, bytes, threads);
    if (const int error = Reserve(arena->fd_, bytes); error != 0) NoSpace(path, bytes, error);
    Touch(base, bytes, threads);
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
