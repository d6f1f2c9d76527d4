// See peer_engine.h: the loops, the listener, and the mailboxes between them and JavaScript.
#include "peer_engine.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "ip_address.h"
#include "peer_connection.h"

namespace kvtier {
namespace {

constexpr uint64_t kMailbox = 0;
constexpr uint64_t kListener = 1;
constexpr int kTickMs = 50;
constexpr int kEpollEvents = 64;
constexpr int kBacklog = 64;

SocketAddress AddressOf(const std::string& host, uint16_t port) {
  if (const auto address = IpAddress(host, port)) return *address;
  throw std::runtime_error("CONFIG: " + host + ": not an IP address");
}

}  // namespace

class PeerLoop {
 public:
  explicit PeerLoop(PeerEngine& engine)
      : engine_(engine), epoll_(epoll_create1(EPOLL_CLOEXEC)), mailbox_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_ < 0 || mailbox_ < 0) throw std::runtime_error("IO: no more files for the peer loops");
    Watch(mailbox_, kMailbox, EPOLLIN);
    thread_ = std::thread([this] { Run(); });
  }
  // Connections end before the thread does.
  ~PeerLoop() {
    Post([this] { stopping_ = true; });
    thread_.join();
    if (listener_ >= 0) close(listener_);
    close(mailbox_);
    close(epoll_);
  }

  void Post(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      posted_.push_back(std::move(work));
    }
    const uint64_t one = 1;
    if (write(mailbox_, &one, sizeof(one)) < 0) return;  // full: it is awake already
  }

  void Listen(int fd) {
    Post([this, fd] {
      listener_ = fd;
      Watch(fd, kListener, EPOLLIN);
    });
  }

  void Add(uint64_t number, int fd, bool server, const PeerSession& session, const PeerKey& key) {
    auto connection = std::make_unique<PeerConnection>(engine_, number, fd, server, events_);
    if (server) connection->StartServer();
    else connection->StartClient(session, key);
    PeerConnection& added = *(connections_[number] = std::move(connection));
    interest_[number] = EPOLLIN | EPOLLOUT;
    Watch(added.fd(), number, EPOLLIN | EPOLLOUT);
  }

  void With(uint64_t number, const std::function<void(PeerConnection&)>& work, const std::function<void()>& gone) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return gone();
    work(*found->second);
    Settle(number);
  }

  void Revoke(const PeerSession& session) {
    std::vector<uint64_t> numbers;
    for (const auto& [number, connection] : connections_) {
      if (connection->session() == session) numbers.push_back(number);
    }
    for (const uint64_t number : numbers) {
      connections_[number]->Close(PeerEnd::kEnded);
      Settle(number);
    }
  }

  std::vector<PeerEvent>& events() { return events_; }

 private:
  void Watch(int fd, uint64_t number, uint32_t what) {
    epoll_event event{};
    event.events = what;
    event.data.u64 = number;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }

  // After anything was done with a connection: forget it, or look for what it waits for now.
  void Settle(uint64_t number) {
    const auto found = connections_.find(number);
    PeerConnection& connection = *found->second;
    if (connection.closed()) {
      if (connection.isServer()) --engine_.accepted;
      connections_.erase(found);
      interest_.erase(number);
      return;
    }
    const uint32_t wanted = EPOLLIN | (connection.wantsWrite() ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    if (interest_[number] != wanted) {
      epoll_event event{};
      event.events = interest_[number] = wanted;
      event.data.u64 = number;
      epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd(), &event);
    }
    if (connection.hasMore()) again_.push_back(number);
  }

  void Accept() {
    for (;;) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) return;
      if (engine_.accepted >= engine_.options().maxConnections) {
        close(fd);
        events_.push_back({PeerEventKind::kRefused, 0, static_cast<double>(PeerEnd::kTooMany), 0, {}});
        continue;
      }
      ++engine_.accepted;
      const uint64_t number = engine_.NextNumber();
      PeerLoop& loop = engine_.LoopOf(number);
      loop.Post([&loop, number, fd] { loop.Add(number, fd, true, {}, {}); });
    }
  }

  void Mail() {
    uint64_t count = 0;
    if (read(mailbox_, &count, sizeof(count)) < 0) return;
    std::vector<std::function<void()>> work;
    {
      const std::lock_guard lock(mutex_);
      work.swap(posted_);
    }
    for (const auto& each : work) each();
  }

  void Tick(PeerClock::time_point now) {
    lastTick_ = now;
    std::vector<uint64_t> numbers;
    for (const auto& [number, connection] : connections_) numbers.push_back(number);
    for (const uint64_t number : numbers) {
      connections_[number]->OnTick(now);
      Settle(number);
    }
  }

  void Run() {
    PagePipe::BlockPipeSignal();
    epoll_event ready[kEpollEvents];
    while (!stopping_) {
      const int count = epoll_wait(epoll_, ready, kEpollEvents, again_.empty() ? kTickMs : 0);
      std::vector<uint64_t> again;
      again.swap(again_);
      for (int i = 0; i < count; ++i) {
        const uint64_t number = ready[i].data.u64;
        const uint32_t what = ready[i].events;
        if (number == kMailbox) Mail();
        else if (number == kListener) Accept();
        else if (const auto found = connections_.find(number); found != connections_.end()) {
          found->second->OnReady((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0, (what & EPOLLOUT) != 0);
          Settle(number);
        }
      }
      for (const uint64_t number : again) {
        const auto found = connections_.find(number);
        if (found == connections_.end() || !found->second->hasMore()) continue;
        found->second->OnReady(true, false);
        Settle(number);
      }
      if (const auto now = PeerClock::now(); now - lastTick_ > std::chrono::milliseconds(kTickMs)) Tick(now);
      if (!events_.empty()) engine_.Emit(std::move(events_));
      events_.clear();
    }
    Mail();
    connections_.clear();
    if (!events_.empty()) engine_.Emit(std::move(events_));
    events_.clear();
  }

  PeerEngine& engine_;
  int epoll_;
  int mailbox_;
  int listener_ = -1;
  bool stopping_ = false;  // the loop's thread only
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  // Events of this turn; connections write into it.
  std::vector<PeerEvent> events_;
  std::unordered_map<uint64_t, std::unique_ptr<PeerConnection>> connections_;
  std::unordered_map<uint64_t, uint32_t> interest_;
  std::vector<uint64_t> again_;
  PeerClock::time_point lastTick_ = PeerClock::now();
  std::thread thread_;
};

PeerEngine::PeerEngine(std::shared_ptr<Arena> arena, PeerOptions options, std::function<void()> wake)
    : arena_(std::move(arena)), options_(options), wake_(std::move(wake)) {
  if (options_.tls) tls_ = std::make_unique<PeerTls>(&sessions_);
  for (unsigned i = 0; i < options_.threads; ++i) loops_.push_back(std::make_unique<PeerLoop>(*this));
}

PeerEngine::~PeerEngine() { Close(); }

uint16_t PeerEngine::Listen(const std::string& host, uint16_t port) {
  SocketAddress address = AddressOf(host, port);
  const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address.storage), address.bytes) != 0 ||
      listen(fd, kBacklog) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0) {
    const std::string why = std::strerror(errno);
    if (fd >= 0) close(fd);
    throw std::runtime_error("IO: " + host + ":" + std::to_string(port) + ": cannot listen for peers' data (" + why +
                             "); choose another address or port");
  }
  loops_[0]->Listen(fd);
  const bool six = address.storage.ss_family == AF_INET6;
  return ntohs(six ? reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port);
}

void PeerEngine::Revoke(const PeerSession& session) {
  sessions_.Revoke(session);
  for (const auto& loop : loops_) {
    loop->Post([target = loop.get(), session] { target->Revoke(session); });
  }
}

uint64_t PeerEngine::Connect(const std::string& host, uint16_t port, const PeerSession& session, const PeerKey& key) {
  const SocketAddress address = AddressOf(host, port);
  const uint64_t number = NextNumber();
  PeerLoop& loop = LoopOf(number);
  loop.Post([&loop, address, number, session, key] {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const bool going = fd >= 0 && (connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) == 0 ||
                                   errno == EINPROGRESS);
    if (going) return loop.Add(number, fd, false, session, key);
    if (fd >= 0) close(fd);
    loop.events().push_back(
        {PeerEventKind::kDown, static_cast<double>(number), static_cast<double>(PeerEnd::kEnded), 0, {}});
  });
  return number;
}

void PeerEngine::Disconnect(uint64_t connection) {
  PeerLoop& loop = LoopOf(connection);
  loop.Post([&loop, connection] {
    loop.With(connection, [](PeerConnection& each) { each.Close(PeerEnd::kEnded); }, [] {});
  });
}

void PeerEngine::Fetch(uint64_t connection, std::vector<PeerFetch> fetches) {
  PeerLoop& loop = LoopOf(connection);
  loop.Post([&loop, connection, rows = std::move(fetches)] {
    loop.With(connection, [&rows](PeerConnection& each) { each.Fetch(rows); }, [&loop, &rows] {
      for (const auto& row : rows) {
        loop.events().push_back({PeerEventKind::kFetched, static_cast<double>(row.tag),
                                 static_cast<double>(PeerResult::kFailed), 0, {}});
      }
    });
  });
}

void PeerEngine::Answer(uint64_t connection, std::vector<PeerAnswerRow> rows) {
  PeerLoop& loop = LoopOf(connection);
  loop.Post([&loop, connection, rows = std::move(rows)] {
    loop.With(connection, [&rows](PeerConnection& each) { each.Answer(rows); }, [&loop, &rows] {
      for (const auto& row : rows) {
        if (row.status != PeerStatus::kReady) continue;
        loop.events().push_back({PeerEventKind::kSent, static_cast<double>(row.token), 0, 0, {}});
      }
    });
  });
}

void PeerEngine::Emit(std::vector<PeerEvent>&& events) {
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    wake = events_.empty();
    events_.insert(events_.end(), events.begin(), events.end());
  }
  if (wake) wake_();
}

std::vector<PeerEvent> PeerEngine::Take() {
  const std::lock_guard lock(mutex_);
  return std::move(events_);
}

void PeerEngine::Close() {
  // All loops stop before any goes: a listener still posts to its neighbours.
  loops_.clear();
}

}  // namespace kvtier
