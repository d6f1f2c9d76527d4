// Loaded before all else by tests, beside an addon that calls some of Node's functions by the names below: a thread that has told JavaScript
// something stands still then, before it lets go of what it holds, and who lets go of a reference to JavaScript's on a foreign thread is
// told of. Node lets that pass, and breaks at times.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>

namespace {

thread_local bool hasTold = false;

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

extern "C" int napj_call_threadsafe_function(void* function, void* data, int mode) {
  const int status = Real<int (*)(void*, void*, int)>("napi_call_threadsafe_function")(function, data, mode);
  hasTold = gettid() != getpid();
  return status;
}

extern "C" int napj_delete_reference(void* env, void* reference) {
  if (gettid() != getpid()) std::puts("a reference is deleted on a foreign thread"), std::fflush(stdout);
  return Real<int (*)(void*, void*)>("napi_delete_reference")(env, reference);
}

extern "C" int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  static const auto real = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_unlock"));
  const int status = real(mutex);
  if (hasTold) {  // nobody waits for it any more
    hasTold = false;
    usleep(500'000);
  }
  return status;
}
