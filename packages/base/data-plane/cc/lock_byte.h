// Locks on single bytes of a file, of open file descriptions: whoever has mapped an arena holds one, shared, on a byte of the file beside
// it, and the cache node sees that it is gone, also across pid and mount namespaces. They end with the last descriptor, however the
// process ends. Depends on nothing of Node, so that other engines' library can share it.
#pragma once
#include <fcntl.h>

#include <cerrno>
#include <cstdint>

namespace kvtier {

inline struct flock OneByte(short type, uint64_t byte) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(byte);
  lock.l_len = 1;
  return lock;
}

// False: the file system has no such locks, or somebody holds it for himself alone.
inline bool HoldByte(int fd, uint64_t byte) {
  struct flock lock = OneByte(F_RDLCK, byte);
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Whether somebody holds it, by another description than this one. What cannot be asked counts as held.
inline bool IsByteHeld(int fd, uint64_t byte) {
  struct flock lock = OneByte(F_WRLCK, byte);
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace kvtier
