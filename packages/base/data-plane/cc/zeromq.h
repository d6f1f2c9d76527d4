// ZeroMQ's C API, of the library that zeromq.js has brought into this process: one version of it, and nothing more to build. Only what is
// needed here, with the names and numbers of libzmq's own header; its ABI is the same for all of libzmq 4 (https://api.zeromq.org).
#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace kvtier {

struct ZmqMessage {
  alignas(void*) unsigned char opaque[64];
};

struct ZmqPollItem {
  void* socket;
  int fd;
  short events;
  short revents;
};

struct Zmq {
  static constexpr int kPair = 0, kSub = 2;
  static constexpr int kSubscribe = 6, kLinger = 17, kMaxMessageBytes = 22, kReceiveHighWaterMark = 24, kIpv6 = 42, kCurvePublicKey = 48,
                       kCurveSecretKey = 49, kCurveServerKey = 50, kHeartbeatInterval = 75, kHeartbeatTimeout = 77;
  static constexpr int kDontWait = 1;
  static constexpr int kMaxSockets = 2;
  static constexpr int kEventDisconnected = 0x0200;
  static constexpr int kEventHandshake = 0x1000;
  static constexpr short kPollIn = 1;

  void* (*ctx_new)();
  int (*ctx_set)(void* context, int option, int value);
  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*setsockopt)(void* socket, int option, const void* value, size_t bytes);
  int (*connect)(void* socket, const char* endpoint);
  int (*socket_monitor)(void* socket, const char* endpoint, int events);
  int (*poll)(ZmqPollItem* items, int count, long timeout_ms);
  int (*msg_init)(ZmqMessage* message);
  int (*msg_recv)(ZmqMessage* message, void* socket, int flags);
  int (*msg_more)(const ZmqMessage* message);
  int (*msg_move)(ZmqMessage* to, ZmqMessage* from);
  int (*msg_close)(ZmqMessage* message);
  void* (*msg_data)(ZmqMessage* message);
  size_t (*msg_size)(const ZmqMessage* message);
  int (*errnum)();
  const char* (*strerror)(int error);

  // What `call` answers, made again for as long as a signal breaks it off: any call may be, also one that does not wait.
  template <typename Call>
  int Whole(Call call) const {
    int answer;
    do {
      answer = call();
    } while (answer < 0 && errnum() == EINTR);
    return answer;
  }

  // Throws std::runtime_error when zeromq.js is not loaded, or brings a library of another form.
  static const Zmq& Library();
  // One for all sockets of ours, with one thread for their connections. Never ended: threads may outlive main.
  static void* Context();
};

}  // namespace kvtier
