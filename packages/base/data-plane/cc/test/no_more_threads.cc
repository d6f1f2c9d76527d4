// Loaded before all else by tests: from when KVTIER_TEST_THREADS_LEFT is set, so many further threads are to be had, as in a group of
// processes that is full.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* given) {
  static std::atomic<int> taken{0};
  const char* left = std::getenv("KVTIER_TEST_THREADS_LEFT");
  if (left != nullptr && taken++ >= std::atoi(left)) return EAGAIN;
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, run, given);
}
