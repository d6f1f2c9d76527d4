// ZeroMQ's names for zeromq.slow.test.ts: each call that a signal may break off is broken off at first, and made by the library of
// zeromq.js when it is made again.
#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

// Of the other addon that has it.
void* Other(const char* name) {
  static void* library = [] {
    void* found = nullptr;
    const auto look = [](dl_phdr_info* info, size_t, void* into) {
      const std::string_view file = info->dlpi_name;
      void* opened = file.ends_with("/addon.node") ? dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD) : nullptr;
      if (opened != nullptr && dlsym(opened, "zmq_msg_recv") != nullptr) *static_cast<void**>(into) = opened;
      return 0;
    };
    dl_iterate_phdr(look, &found);
    if (found == nullptr) std::puts("zeromq.js is not loaded"), std::exit(1);
    return found;
  }();
  return dlsym(library, name);
}

// In turn: broken off, made.
bool Broken(int& calls) {
  if (++calls % 2 == 0) return false;
  errno = EINTR;
  return true;
}

}  // namespace

#define AS_IT_IS(type, name, parameters, arguments) \
  type name parameters { return reinterpret_cast<type(*) parameters>(Other(#name)) arguments; }
#define BROKEN_OFF(name, parameters, arguments)                                              \
  int name parameters {                                                                      \
    thread_local int calls = 0;                                                              \
    return Broken(calls) ? -1 : reinterpret_cast<int(*) parameters>(Other(#name)) arguments; \
  }

extern "C" {

void* napi_register_module_v1(void*, void* exports) { return exports; }

AS_IT_IS(void*, zmq_ctx_new, (), ())
AS_IT_IS(int, zmq_ctx_set, (void* a, int b, int c), (a, b, c))
AS_IT_IS(void*, zmq_socket, (void* a, int b), (a, b))
AS_IT_IS(int, zmq_close, (void* a), (a))
AS_IT_IS(int, zmq_setsockopt, (void* a, int b, const void* c, size_t d), (a, b, c, d))
BROKEN_OFF(zmq_connect, (void* a, const char* b), (a, b))
BROKEN_OFF(zmq_socket_monitor, (void* a, const char* b, int c), (a, b, c))
BROKEN_OFF(zmq_poll, (void* a, int b, long c), (a, b, c))
AS_IT_IS(int, zmq_msg_init, (void* a), (a))
BROKEN_OFF(zmq_msg_recv, (void* a, void* b, int c), (a, b, c))
AS_IT_IS(int, zmq_msg_more, (const void* a), (a))
AS_IT_IS(int, zmq_msg_move, (void* a, void* b), (a, b))
AS_IT_IS(int, zmq_msg_close, (void* a), (a))
AS_IT_IS(void*, zmq_msg_data, (void* a), (a))
AS_IT_IS(size_t, zmq_msg_size, (const void* a), (a))
AS_IT_IS(int, zmq_errno, (), ())
AS_IT_IS(const char*, zmq_strerror, (int a), (a))

}
