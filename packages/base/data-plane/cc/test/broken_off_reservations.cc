// Loaded before all else by tests: a signal breaks off every second reservation of a file's room, and each that is larger than 16 MiB, as
// one does where signals come often. What was asked for is printed: function, offset, bytes, and whether it was made.
#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstdio>

namespace {

// `calls`: of this function.
bool IsBroken(int& calls, const char* name, off_t offset, off_t bytes) {
  const bool broken = calls++ % 2 == 0 || bytes > (off_t{16} << 20);
  std::printf("%s %lld %lld %s\n", name, static_cast<long long>(offset), static_cast<long long>(bytes), broken ? "broken" : "made");
  std::fflush(stdout);
  return broken;
}

}  // namespace

extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  static int calls = 0;
  if (IsBroken(calls, "posix_fallocate", offset, bytes)) return EINTR;
  return reinterpret_cast<int (*)(int, off_t, off_t)>(dlsym(RTLD_NEXT, "posix_fallocate"))(fd, offset, bytes);
}

extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static int calls = 0;
  if (IsBroken(calls, "fallocate", offset, bytes)) {
    errno = EINTR;
    return -1;
  }
  return reinterpret_cast<int (*)(int, int, off_t, off_t)>(dlsym(RTLD_NEXT, "fallocate"))(fd, mode, offset, bytes);
}
