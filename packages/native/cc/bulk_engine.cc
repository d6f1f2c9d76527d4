// See bulk_engine.h: the loop, and the mailbox from it to JavaScript.
#include "bulk_engine.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>
#include <unordered_map>

#include "bulk_connection.h"
#include "epoll_loop.h"
#include "ip_address.h"

namespace kvtier {
namespace {

// `host` may be the path of a Unix socket, too.
SocketAddress AddressOf(const std::string& host, uint16_t port) {
  SocketAddress address;
  auto* path = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (host.starts_with('/') && host.size() < sizeof(path->sun_path)) {
    path->sun_family = AF_UNIX;
    std::memcpy(path->sun_path, host.c_str(), host.size() + 1);
    address.bytes = sizeof(*path);
    return address;
  }
  if (const auto ip = IpAddress(host, port)) return *ip;
  throw std::runtime_error("CONFIG: " + host + ": neither an IP address nor the path of a socket");
}

}  // namespace

class BulkLoop final : public EpollLoop {
 public:
  explicit BulkLoop(BulkEngine& engine) : EpollLoop("the loop of Redis values"), engine_(engine) { Start(); }
  ~BulkLoop() override { Stop(); }

  void Connect(uint64_t number, const SocketAddress& address, const BulkServer& server) {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const int on = 1;
    if (fd >= 0 && address.storage.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const bool going = fd >= 0 && (connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) == 0 ||
                                   errno == EINPROGRESS);
    if (!going) {
      const std::string why = std::string("connect: ") + std::strerror(errno);
      if (fd >= 0) close(fd);
      events_.push_back({BulkEventKind::kDown, static_cast<double>(number), {}, why});
      return;
    }
    connections_[number] = std::make_unique<BulkConnection>(engine_.arena(), number, fd, server, events_);
    Watch(number, fd, EPOLLIN | EPOLLOUT);
  }

  void Move(uint64_t number, BulkGroup&& group) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;  // its kDown is on the way, and ends this, too
    found->second->Move(std::move(group));
    Settle(number);
  }

  void Disconnect(uint64_t number) {
    connections_.erase(number);
    Forget(number);
  }

 private:
  // After anything was done with a connection: forget it, or look for what it waits for now.
  void Settle(uint64_t number) {
    const BulkConnection& connection = *connections_[number];
    if (connection.closed()) return Disconnect(number);
    Watch(number, connection.fd(), EPOLLIN | (connection.wantsWrite() ? static_cast<uint32_t>(EPOLLOUT) : 0u));
  }

  void OnReady(uint64_t number, uint32_t what) override {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    found->second->OnReady((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0, (what & EPOLLOUT) != 0);
    Settle(number);
  }

  int OnTurn() override {
    if (!events_.empty()) engine_.Emit(std::move(events_));
    events_.clear();
    return -1;
  }

  void OnEnd() override { connections_.clear(); }

  BulkEngine& engine_;
  // Events of this turn; connections write into it.
  std::vector<BulkEvent> events_;
  std::unordered_map<uint64_t, std::unique_ptr<BulkConnection>> connections_;
};

BulkEngine::BulkEngine(std::shared_ptr<Arena> arena, std::function<void()> wake)
    : arena_(std::move(arena)), wake_(std::move(wake)), loop_(std::make_unique<BulkLoop>(*this)) {}

BulkEngine::~BulkEngine() { Close(); }

uint64_t BulkEngine::Connect(const BulkServer& server) {
  const SocketAddress address = AddressOf(server.host, server.port);
  const uint64_t number = nextNumber_++;
  // Not by loop_, which is null while the last of these run.
  loop_->Post([loop = loop_.get(), number, address, server] { loop->Connect(number, address, server); });
  return number;
}

void BulkEngine::Move(uint64_t connection, BulkGroup group) {
  // std::function copies, so the group is shared.
  const auto shared = std::make_shared<BulkGroup>(std::move(group));
  loop_->Post([loop = loop_.get(), connection, shared] { loop->Move(connection, std::move(*shared)); });
}

void BulkEngine::Disconnect(uint64_t connection) {
  std::promise<void> done;
  loop_->Post([loop = loop_.get(), connection, &done] {
    loop->Disconnect(connection);
    done.set_value();
  });
  done.get_future().wait();
}

void BulkEngine::Emit(std::vector<BulkEvent>&& events) {
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    wake = events_.empty();
    for (auto& event : events) events_.push_back(std::move(event));
  }
  if (wake) wake_();
}

std::vector<BulkEvent> BulkEngine::Take() {
  const std::lock_guard lock(mutex_);
  return std::move(events_);
}

void BulkEngine::Close() { loop_.reset(); }

}  // namespace kvtier
