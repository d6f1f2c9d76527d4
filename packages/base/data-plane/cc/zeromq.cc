#include "zeromq.h"

#include <dlfcn.h>
#include <link.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvtier {
namespace {

// Addons are loaded each under its own names, so it is asked for by its file.
void* Loaded() {
  std::vector<std::string> files;
  const auto note = [](dl_phdr_info* info, size_t, void* all) {
    const std::string_view name = info->dlpi_name;
    if (name.ends_with(".node")) static_cast<std::vector<std::string>*>(all)->emplace_back(name);
    return 0;
  };
  dl_iterate_phdr(note, &files);
  for (const auto& file : files) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) continue;
    if (dlsym(library, "zmq_msg_recv") != nullptr) return library;
    dlclose(library);
  }
  throw std::runtime_error("no ZeroMQ library in this process; install zeromq of the version that package.json names");
}

template <typename Function>
void Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("zeromq's library has no ") + name);
}

Zmq Open() {
  void* library = Loaded();
  Zmq zmq{};
  Find(library, "zmq_ctx_new", zmq.ctx_new);
  Find(library, "zmq_ctx_set", zmq.ctx_set);
  Find(library, "zmq_socket", zmq.socket);
  Find(library, "zmq_close", zmq.close);
  Find(library, "zmq_setsockopt", zmq.setsockopt);
  Find(library, "zmq_connect", zmq.connect);
  Find(library, "zmq_socket_monitor", zmq.socket_monitor);
  Find(library, "zmq_poll", zmq.poll);
  Find(library, "zmq_msg_init", zmq.msg_init);
  Find(library, "zmq_msg_recv", zmq.msg_recv);
  Find(library, "zmq_msg_more", zmq.msg_more);
  Find(library, "zmq_msg_move", zmq.msg_move);
  Find(library, "zmq_msg_close", zmq.msg_close);
  Find(library, "zmq_msg_data", zmq.msg_data);
  Find(library, "zmq_msg_size", zmq.msg_size);
  Find(library, "zmq_errno", zmq.errnum);
  Find(library, "zmq_strerror", zmq.strerror);
  return zmq;
}

}  // namespace

const Zmq& Zmq::Library() {
  static const Zmq zmq = Open();
  return zmq;
}

namespace {

// Of a context by default.
constexpr int kUsualSockets = 1023;
// A receiver has three, with its monitor's two ends, and there are up to 1,024 workers and as many nodes.
constexpr int kContextSockets = 3 * 2 * 1024 + 64;

void* NewContext() {
  void* context = Zmq::Library().ctx_new();
  if (context == nullptr) throw std::runtime_error("ZeroMQ has no memory for a context");
  // Some builds take fewer, as they poll: who has more sources than that has, learns it of those that get no socket.
  for (int sockets = kContextSockets; sockets > kUsualSockets; sockets /= 2) {
    if (Zmq::Library().ctx_set(context, Zmq::kMaxSockets, sockets) == 0) break;
  }
  return context;
}

}  // namespace

void* Zmq::Context() {
  static void* context = NewContext();
  return context;
}

}  // namespace kvtier
