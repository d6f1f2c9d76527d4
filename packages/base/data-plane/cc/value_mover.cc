// See value_mover.h: the loop, and the mailbox from it to JavaScript.
#include "value_mover.h"

#include <arpa/inet.h>
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

#include "value_connection.h"
#include "congestion.h"
#include "epoll_loop.h"
#include "ip_address.h"

namespace kvtier {
namespace {

// How often a connection that others' values wait for is looked at.
constexpr int kLookMs = 20;

// `host` may be the path of a Unix socket, too.
SocketAddress ServerAddressOf(const std::string& host, uint16_t port) {
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

void Prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  BeginUnpaced(fd);
}

}  // namespace

class ValueLoop final : public EpollLoop {
 public:
  explicit ValueLoop(ValueMover& mover) : EpollLoop("the loop of Redis values"), mover_(mover) { Start(); }
  ~ValueLoop() override { Stop(); }

  void Open(uint64_t server, const ValueServer& what) { queues_[server] = std::make_shared<ValueQueue>(what, events_); }

  void Connect(uint64_t server, uint64_t number, const SocketAddress& address) {
    const auto queue = queues_.find(server);
    if (queue == queues_.end()) return;
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && address.storage.ss_family != AF_UNIX) Prepare(fd);
    const bool going = fd >= 0 && (connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) == 0 ||
                                   errno == EINPROGRESS);
    if (!going) {
      const std::string why = std::string("connect: ") + std::strerror(errno);
      if (fd >= 0) close(fd);
      events_.push_back({ValueEventKind::kDown, static_cast<double>(number), {}, why});
      return;
    }
    connections_[number] = std::make_unique<ValueConnection>(mover_.arena(), number, fd, queue->second, events_);
    Watch(number, fd, EPOLLIN | EPOLLOUT);
  }

  void Move(uint64_t server, ValueGroup&& group) {
    const auto queue = queues_.find(server);
    if (queue == queues_.end()) return;
    queue->second->Add(std::move(group));
    Serve(server);
  }

  void Share(uint64_t server, bool is_shared) {
    if (const auto queue = queues_.find(server); queue != queues_.end()) queue->second->Share(is_shared);
  }

  void Expire(uint64_t server, uint64_t tag) {
    const auto queue = queues_.find(server);
    if (queue == queues_.end()) return;
    queue->second->Drop(tag);
    for (const uint64_t number : ConnectionsOf(server)) {
      const auto found = connections_.find(number);
      if (found == connections_.end()) continue;
      if (found->second->Carries(tag)) found->second->Close("no answer within the time limit");
      Settle(number);
    }
  }

  void Disconnect(uint64_t number) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    const uint64_t server = ServerOf(*found->second);
    Remove(number);
    Serve(server);  // another one reads now
  }

  void Shut(uint64_t server) {
    for (const uint64_t number : ConnectionsOf(server)) Remove(number);
    queues_.erase(server);
  }

 private:
  std::vector<uint64_t> ConnectionsOf(uint64_t server) const {
    std::vector<uint64_t> numbers;
    const auto queue = queues_.find(server);
    if (queue == queues_.end()) return numbers;
    for (const auto& [number, connection] : connections_) {
      if (&connection->queue() == queue->second.get()) numbers.push_back(number);
    }
    return numbers;
  }

  // After anything was done with a connection: forget it, or look for what it waits for now.
  void Settle(uint64_t number) {
    const ValueConnection& connection = *connections_[number];
    if (connection.closed()) return Disconnect(number);
    Watch(number, connection.fd(), EPOLLIN | (connection.wantsWrite() ? static_cast<uint32_t>(EPOLLOUT) : 0u));
  }

  void Remove(uint64_t number) {
    connections_.erase(number);
    Forget(number);
  }

  uint64_t ServerOf(const ValueConnection& connection) const {
    for (const auto& [server, queue] : queues_) {
      if (queue.get() == &connection.queue()) return server;
    }
    return 0;
  }

  void Serve(uint64_t server) {
    for (const uint64_t number : ConnectionsOf(server)) {
      const auto found = connections_.find(number);
      if (found == connections_.end()) continue;  // it ended with one before it
      found->second->Serve();
      Settle(number);
    }
  }

  void OnStart() override { PagePipe::BlockPipeSignal(); }

  void OnReady(uint64_t number, uint32_t what) override {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    found->second->OnReady((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0, (what & EPOLLOUT) != 0);
    Settle(number);
  }

  int OnTurn() override {
    bool waits = false;
    for (const auto& [server, queue] : queues_) {
      if (queue->ChangeReader()) Serve(server);
      waits |= queue->waitsForReader();
    }
    if (!events_.empty()) mover_.Emit(std::move(events_));
    events_.clear();
    return waits ? kLookMs : -1;
  }

  void OnEnd() override {
    connections_.clear();
    queues_.clear();
  }

  ValueMover& mover_;
  // Events of this turn; connections write into it.
  std::vector<ValueEvent> events_;
  std::unordered_map<uint64_t, std::shared_ptr<ValueQueue>> queues_;  // by server
  std::unordered_map<uint64_t, std::unique_ptr<ValueConnection>> connections_;
};

ValueMover::ValueMover(std::shared_ptr<Arena> arena, std::function<void()> wake)
    : arena_(std::move(arena)), wake_(std::move(wake)), loop_(std::make_unique<ValueLoop>(*this)) {}

ValueMover::~ValueMover() { Close(); }

// Not by loop_ itself, which is null while the last of what is posted runs.
uint64_t ValueMover::Open(const ValueServer& server) {
  const uint64_t number = nextNumber_++;
  loop_->Post([loop = loop_.get(), number, server] { loop->Open(number, server); });
  return number;
}

uint64_t ValueMover::Connect(uint64_t server, const std::string& host, uint16_t port) {
  const SocketAddress address = ServerAddressOf(host, port);
  const uint64_t number = nextNumber_++;
  loop_->Post([loop = loop_.get(), server, number, address] { loop->Connect(server, number, address); });
  return number;
}

void ValueMover::Move(uint64_t server, ValueGroup group) {
  // std::function copies, so the group is shared.
  const auto shared = std::make_shared<ValueGroup>(std::move(group));
  loop_->Post([loop = loop_.get(), server, shared] { loop->Move(server, std::move(*shared)); });
}

void ValueMover::Share(uint64_t server, bool is_shared) {
  loop_->Post([loop = loop_.get(), server, is_shared] { loop->Share(server, is_shared); });
}

void ValueMover::Expire(uint64_t server, uint64_t tag) {
  loop_->Post([loop = loop_.get(), server, tag] { loop->Expire(server, tag); });
}

void ValueMover::Disconnect(uint64_t connection) {
  Do([loop = loop_.get(), connection] { loop->Disconnect(connection); });
}

void ValueMover::Shut(uint64_t server) {
  Do([loop = loop_.get(), server] { loop->Shut(server); });
}

void ValueMover::Do(std::function<void()> work) {
  std::promise<void> done;
  loop_->Post([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

void ValueMover::Emit(std::vector<ValueEvent>&& events) {
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    wake = events_.empty();
    for (auto& event : events) events_.push_back(std::move(event));
  }
  if (wake) wake_();
}

std::vector<ValueEvent> ValueMover::Take() {
  const std::lock_guard lock(mutex_);
  return std::move(events_);
}

void ValueMover::Close() { loop_.reset(); }

}  // namespace kvtier
