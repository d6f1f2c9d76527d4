// See peer_loops.h: the loops, the listener, and the mailbox from them to JavaScript.
#include "peer_loops.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <stdexcept>

#include "congestion.h"
#include "epoll_loop.h"
#include "ip_address.h"
#include "peer_connection.h"

namespace kvtier {
namespace {

constexpr uint64_t kListener = 0;
constexpr int kTickMs = 50;
constexpr int kBacklog = 64;
// Without a file to accept with, the listener would be ready again and again.
constexpr auto kAcceptPause = std::chrono::milliseconds(200);

SocketAddress PeerAddressOf(const std::string& host, uint16_t port) {
  if (const auto address = IpAddress(host, port)) return *address;
  throw std::runtime_error("CONFIG: " + host + ": not an IP address");
}

}  // namespace

class PeerLoop final : public EpollLoop {
 public:
  explicit PeerLoop(PeerLoops& loops) : EpollLoop("the peer loops"), loops_(loops) { Start(); }
  ~PeerLoop() override {
    Stop();
    if (listener_ >= 0) close(listener_);
  }

  void Listen(int fd) {
    Post([this, fd] {
      listener_ = fd;
      Watch(kListener, fd, EPOLLIN);
    });
  }

  void Add(uint64_t number, int fd, bool server, const PeerSession& session, const PeerKey& key) {
    auto connection = std::make_unique<PeerConnection>(loops_, number, fd, server, events_);
    if (server) connection->StartServer();
    else connection->StartClient(session, key);
    PeerConnection& added = *(connections_[number] = std::move(connection));
    Watch(number, added.fd(), EPOLLIN | EPOLLOUT);
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
  // After anything was done with a connection: forget it, or look for what it waits for now.
  void Settle(uint64_t number) {
    const auto found = connections_.find(number);
    PeerConnection& connection = *found->second;
    if (connection.closed()) {
      if (connection.isServer()) --loops_.accepted;
      if (connection.isServer() && connection.wasUp()) --loops_.proven;
      connections_.erase(found);
      Forget(number);
      return;
    }
    Watch(number, connection.fd(), EPOLLIN | (connection.wantsWrite() ? static_cast<uint32_t>(EPOLLOUT) : 0u));
    if (connection.hasMore()) again_.push_back(number);
  }

  void Accept() {
    for (;;) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        Watch(kListener, listener_, 0);
        acceptAgain_ = PeerClock::now() + kAcceptPause;
        return;
      }
      // Those that are about to be turned away may still be here.
      if (loops_.accepted >= loops_.options().maxConnections + 2 * loops_.options().maxStrangers) {
        close(fd);
        events_.push_back({PeerEventKind::kRefused, 0, static_cast<double>(PeerEnd::kTooMany), 0, {}});
        continue;
      }
      ++loops_.accepted;
      const uint64_t number = loops_.NextNumber();
      PeerLoop& loop = loops_.LoopOf(number);
      loop.Post([&loop, number, fd] { loop.Add(number, fd, true, {}, {}); });
      latest_.push_back(number);
      if (latest_.size() <= loops_.options().maxStrangers) continue;
      const uint64_t oldest = latest_.front();
      latest_.pop_front();
      PeerLoop& its = loops_.LoopOf(oldest);
      its.Post([&its, oldest] { its.With(oldest, [](PeerConnection& each) { each.CloseStranger(); }, [] {}); });
    }
  }

  void Tick(PeerClock::time_point now) {
    lastTick_ = now;
    if (acceptAgain_ && now >= *acceptAgain_) {
      acceptAgain_.reset();
      Watch(kListener, listener_, EPOLLIN);
    }
    std::vector<uint64_t> numbers;
    for (const auto& [number, connection] : connections_) numbers.push_back(number);
    for (const uint64_t number : numbers) {
      connections_[number]->OnTick(now);
      Settle(number);
    }
  }

  void OnStart() override { PagePipe::BlockPipeSignal(); }

  void OnReady(uint64_t number, uint32_t what) override {
    if (number == kListener) return Accept();
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    found->second->OnReady((what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0, (what & EPOLLOUT) != 0);
    Settle(number);
  }

  int OnTurn() override {
    std::vector<uint64_t> again;
    again.swap(again_);
    for (const uint64_t number : again) {
      const auto found = connections_.find(number);
      if (found == connections_.end() || !found->second->hasMore()) continue;
      found->second->OnReady(true, false);
      Settle(number);
    }
    if (const auto now = PeerClock::now(); now - lastTick_ > std::chrono::milliseconds(kTickMs)) Tick(now);
    Tell();
    return again_.empty() ? kTickMs : 0;
  }

  void OnEnd() override {
    connections_.clear();
    Tell();
  }

  void Tell() {
    if (!events_.empty()) loops_.Emit(std::move(events_));
    events_.clear();
  }

  PeerLoops& loops_;
  int listener_ = -1;
  // While nothing can be accepted: when to try again.
  std::optional<PeerClock::time_point> acceptAgain_;
  // The connections accepted last: those before them have proved themselves, or make room.
  std::deque<uint64_t> latest_;
  // Events of this turn; connections write into it.
  std::vector<PeerEvent> events_;
  std::unordered_map<uint64_t, std::unique_ptr<PeerConnection>> connections_;
  // Those that have more than they could deal with in their turn.
  std::vector<uint64_t> again_;
  PeerClock::time_point lastTick_ = PeerClock::now();
};

PeerLoops::PeerLoops(std::shared_ptr<Arena> arena, PeerOptions options, std::function<void()> wake)
    : arena_(std::move(arena)), options_(options), wake_(std::move(wake)) {
  if (options_.tls) tls_ = std::make_unique<PeerTls>(&sessions_);
  for (unsigned i = 0; i < options_.threads; ++i) loops_.push_back(std::make_unique<PeerLoop>(*this));
}

PeerLoops::~PeerLoops() { Close(); }

uint16_t PeerLoops::Listen(const std::string& host, uint16_t port) {
  SocketAddress address = PeerAddressOf(host, port);
  const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd >= 0) BeginUnpaced(fd);
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

void PeerLoops::Revoke(const PeerSession& session) {
  sessions_.Revoke(session);
  for (const auto& loop : loops_) {
    loop->Post([target = loop.get(), session] { target->Revoke(session); });
  }
}

uint64_t PeerLoops::Connect(const std::string& host, uint16_t port, const PeerSession& session, const PeerKey& key) {
  const SocketAddress address = PeerAddressOf(host, port);
  const uint64_t number = NextNumber();
  PeerLoop& loop = LoopOf(number);
  loop.Post([&loop, address, number, session, key] {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0) BeginUnpaced(fd);
    const bool going = fd >= 0 && (connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.bytes) == 0 ||
                                   errno == EINPROGRESS);
    if (going) return loop.Add(number, fd, false, session, key);
    if (fd >= 0) close(fd);
    loop.events().push_back(
        {PeerEventKind::kDown, static_cast<double>(number), static_cast<double>(PeerEnd::kEnded), 0, {}});
  });
  return number;
}

void PeerLoops::Disconnect(uint64_t connection) {
  PeerLoop& loop = LoopOf(connection);
  loop.Post([&loop, connection] {
    loop.With(connection, [](PeerConnection& each) { each.Close(PeerEnd::kEnded); }, [] {});
  });
}

void PeerLoops::Fetch(uint64_t connection, std::vector<PeerFetch> fetches) {
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

void PeerLoops::Answer(uint64_t connection, std::vector<PeerAnswerRow> rows) {
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

void PeerLoops::Emit(std::vector<PeerEvent>&& events) {
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    wake = events_.empty();
    events_.insert(events_.end(), events.begin(), events.end());
  }
  if (wake) wake_();
}

std::vector<PeerEvent> PeerLoops::Take() {
  const std::lock_guard lock(mutex_);
  return std::move(events_);
}

void PeerLoops::Close() {
  // All loops stop before any goes: a listener still posts to its neighbours.
  loops_.clear();
}

}  // namespace kvtier
