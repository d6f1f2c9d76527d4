// See bulk_engine.h: the loop, and the mailboxes between it and JavaScript.
#include "bulk_engine.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>
#include <unordered_map>

#include "bulk_connection.h"
#include "ip_address.h"

namespace kvtier {
namespace {

constexpr uint64_t kMailbox = 0;
constexpr int kEpollEvents = 64;

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

class BulkLoop {
 public:
  explicit BulkLoop(BulkEngine& engine)
      : engine_(engine), epoll_(epoll_create1(EPOLL_CLOEXEC)), mailbox_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_ < 0 || mailbox_ < 0) throw std::runtime_error("IO: no more files for the loop of Redis values");
    Watch(mailbox_, kMailbox, EPOLLIN, EPOLL_CTL_ADD);
    thread_ = std::thread([this] { Run(); });
  }
  // Connections end before the thread does.
  ~BulkLoop() {
    Post([this] { stopping_ = true; });
    thread_.join();
    close(mailbox_);
    close(epoll_);
  }

  void Post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      posted_.push_back(std::move(work));
      if (!sleeping_) return;  // it looks before it sleeps
      sleeping_ = false;
    }
    const uint64_t one = 1;
    if (write(mailbox_, &one, sizeof(one)) < 0) return;
  }

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
    Watch(fd, number, interest_[number] = EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
  }

  void Move(uint64_t number, BulkGroup&& group) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;  // its kDown is on the way, and ends this, too
    found->second->Move(std::move(group));
    Settle(number);
  }

  void Disconnect(uint64_t number) {
    connections_.erase(number);
    interest_.erase(number);
  }

 private:
  void Watch(int fd, uint64_t number, uint32_t what, int how) {
    epoll_event event{};
    event.events = what;
    event.data.u64 = number;
    epoll_ctl(epoll_, how, fd, &event);
  }

  // After anything was done with a connection: forget it, or look for what it waits for now.
  void Settle(uint64_t number) {
    const BulkConnection& connection = *connections_[number];
    if (connection.closed()) return Disconnect(number);
    const uint32_t wanted = EPOLLIN | (connection.wantsWrite() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    if (interest_[number] != wanted) Watch(connection.fd(), number, interest_[number] = wanted, EPOLL_CTL_MOD);
  }

  void Mail() {
    std::vector<std::function<void()>> work;
    {
      const std::lock_guard lock(mutex_);
      work.swap(posted_);
    }
    for (const auto& each : work) each();
  }

  void Run() {
    epoll_event ready[kEpollEvents];
    while (!stopping_) {
      bool sleeps;
      {
        const std::lock_guard lock(mutex_);
        sleeps = sleeping_ = posted_.empty();
      }
      const int count = epoll_wait(epoll_, ready, kEpollEvents, sleeps ? -1 : 0);
      {
        const std::lock_guard lock(mutex_);
        sleeping_ = false;
      }
      Mail();
      for (int i = 0; i < count; ++i) {
        const uint64_t number = ready[i].data.u64;
        const uint32_t what = ready[i].events;
        if (number == kMailbox) {
          uint64_t wakes = 0;
          if (read(mailbox_, &wakes, sizeof(wakes)) < 0) continue;
        } else if (const auto found = connections_.find(number); found != connections_.end()) {
          found->second->OnReady((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0, (what & EPOLLOUT) != 0);
          Settle(number);
        }
      }
      if (!events_.empty()) engine_.Emit(std::move(events_));
      events_.clear();
    }
    Mail();
    connections_.clear();
  }

  BulkEngine& engine_;
  int epoll_;
  int mailbox_;
  bool stopping_ = false;  // the loop's thread only
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  bool sleeping_ = false;  // waits for the mailbox
  // Events of this turn; connections write into it.
  std::vector<BulkEvent> events_;
  std::unordered_map<uint64_t, std::unique_ptr<BulkConnection>> connections_;
  std::unordered_map<uint64_t, uint32_t> interest_;
  std::thread thread_;
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
