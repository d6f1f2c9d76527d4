// ZeroMQ's names for zeromq.slow.test.ts: a library that takes no more than 1,023 sockets a context, as one that polls with select(),
// and has none of them. What it is asked for goes to stdout.
#include <cerrno>
#include <cstdio>

extern "C" {

void* napi_register_module_v1(void*, void* exports) { return exports; }

void* zmq_ctx_new() {
  static int context;
  std::puts("context");
  return &context;
}
int zmq_ctx_set(void*, int, int value) {
  std::printf("%d %s\n", value, value < 1'024 ? "taken" : "refused");
  errno = EINVAL;
  return value < 1'024 ? 0 : -1;
}
void* zmq_socket(void*, int) {
  errno = EMFILE;
  return nullptr;
}
int zmq_errno() { return errno; }
const char* zmq_strerror(int) { return "no socket"; }

int zmq_close(void*) { return 0; }
int zmq_setsockopt(void*, int, const void*, unsigned long) { return 0; }
int zmq_connect(void*, const char*) { return 0; }
int zmq_socket_monitor(void*, const char*, int) { return 0; }
int zmq_poll(void*, int, long) { return 0; }
int zmq_msg_init(void*) { return 0; }
int zmq_msg_recv(void*, void*, int) { return -1; }
int zmq_msg_more(void*) { return 0; }
int zmq_msg_move(void*, void*) { return 0; }
int zmq_msg_close(void*) { return 0; }
void* zmq_msg_data(void*) { return nullptr; }
unsigned long zmq_msg_size(void*) { return 0; }

}
