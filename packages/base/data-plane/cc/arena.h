// The shared arena: one memory-mapped file that holds the object slots of a cache node and that engines map too.
//
// Byte table in docs/formats.md ("Arena file"). Invariants: all of its space is reserved before it is touched, so that a small
// /dev/shm is an error at start and never a SIGBUS; nobody touches memory outside [kArenaHeaderBytes, bytes) through an
// offset that came from elsewhere. Depends on nothing of Node, so that the executor can share it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

namespace kvtier {

inline constexpr std::array<char, 8> kArenaMagic = {'K', 'V', 'T', 'I', 'E', 'R', 'A', 'R'};
inline constexpr uint32_t kArenaVersion = 1;
// The first page; slots begin behind it.
inline constexpr uint64_t kArenaHeaderBytes = 4096;

struct ArenaHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t headerBytes;
  uint64_t bytes;  // of the whole file
  uint64_t id;     // random; tells an arena from its successor at the same path
};
static_assert(sizeof(ArenaHeader) == 32 && offsetof(ArenaHeader, bytes) == 16 && offsetof(ArenaHeader, id) == 24);

// Why the mapped file at `base` is not the arena that was asked for; "" if it is.
inline std::string ArenaFault(const void* base, uint64_t bytes, uint64_t id) {
  ArenaHeader header;
  std::memcpy(&header, base, sizeof(header));
  if (header.magic != kArenaMagic) return "is not an arena file";
  if (header.version != kArenaVersion || header.headerBytes != kArenaHeaderBytes) return "has another arena format";
  if (header.bytes != bytes) return "has another size than announced";
  if (header.id != id) return "is another node's arena, or that of a former life";
  return "";
}

class Arena {
 public:
  // Create the file (0600, must not exist), map and reserve `bytes`, in huge pages where the kernel has any to give, and touch its
  // pages with `threads` threads.
  // Throws std::runtime_error("CODE: ...") and leaves no file behind.
  static std::shared_ptr<Arena> Create(const std::string& path, uint64_t bytes, unsigned threads);
  // Map an existing arena. Throws what ArenaFault says.
  static std::shared_ptr<Arena> Open(const std::string& path, uint64_t bytes, uint64_t id);

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t id() const { return id_; }
  // The arena's file, open as long as the arena is; for system calls that move its pages without a copy.
  int fd() const { return fd_; }

  // Whether [offset, offset + count) lies in the arena, behind its header.
  bool Contains(uint64_t offset, uint64_t count) const {
    return offset >= kArenaHeaderBytes && offset <= bytes_ && count <= bytes_ - offset;
  }

 private:
  Arena(int fd, uint8_t* base, uint64_t bytes, uint64_t id) : fd_(fd), base_(base), bytes_(bytes), id_(id) {}
  int fd_;
  uint8_t* base_;
  uint64_t bytes_;
  uint64_t id_;
};

}  // namespace kvtier
