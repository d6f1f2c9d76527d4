// Loaded before all else by a test: the threads of exports begin when the file is there that KVTIER_TEST_EXPORTS_BEGIN names.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

extern "C" int pthread_setname_np(pthread_t thread, const char* name) {
  static const auto real = reinterpret_cast<decltype(&pthread_setname_np)>(dlsym(RTLD_NEXT, "pthread_setname_np"));
  const bool held = std::strcmp(name, "kvtier-export") == 0;
  while (held && access(std::getenv("KVTIER_TEST_EXPORTS_BEGIN"), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return real(thread, name);
}
