// See epoll_loop.h.
#include "epoll_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "no_thread.h"

namespace kvtier {
namespace {

// No number that an owner gives.
constexpr uint64_t kMailbox = UINT64_MAX;
constexpr int kEpollEvents = 64;

}  // namespace

EpollLoop::EpollLoop(const std::string& what)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), mailbox_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_ < 0 || mailbox_ < 0) {
    if (epoll_ >= 0) close(epoll_);
    if (mailbox_ >= 0) close(mailbox_);
    throw std::runtime_error("IO: no more files for " + what);
  }
  Watch(kMailbox, mailbox_, EPOLLIN);
}

EpollLoop::~EpollLoop() {
  close(mailbox_);
  close(epoll_);
}

void EpollLoop::Start() {
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    throw std::runtime_error(NoThread(error));
  }
}

void EpollLoop::Stop() {
  Post([this] { stopping_ = true; });
  thread_.join();
}

void EpollLoop::Post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
    if (!sleeping_) return;  // it looks before it sleeps
    sleeping_ = false;
  }
  const uint64_t one = 1;
  if (write(mailbox_, &one, sizeof(one)) < 0) return;  // full: it is awake already
}

void EpollLoop::Watch(uint64_t number, int fd, uint32_t events) {
  const auto [found, isNew] = watched_.try_emplace(number, events);
  if (!isNew && found->second == events) return;
  found->second = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  epoll_ctl(epoll_, isNew ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void EpollLoop::Mail() {
  std::vector<std::function<void()>> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (const auto& each : work) each();
}

void EpollLoop::Run() {
  OnStart();
  epoll_event ready[kEpollEvents];
  int sleepMs = 0;
  while (!stopping_) {
    {
      const std::lock_guard lock(mutex_);
      sleeping_ = posted_.empty();
      if (!sleeping_) sleepMs = 0;
    }
    const int count = epoll_wait(epoll_, ready, kEpollEvents, sleepMs);
    {
      const std::lock_guard lock(mutex_);
      sleeping_ = false;
    }
    Mail();
    for (int i = 0; i < count; ++i) {
      if (ready[i].data.u64 != kMailbox) {
        OnReady(ready[i].data.u64, ready[i].events);
        continue;
      }
      uint64_t rings = 0;
      if (read(mailbox_, &rings, sizeof(rings)) < 0) continue;  // rung and read already
    }
    sleepMs = OnTurn();
  }
  Mail();
  OnEnd();
}

}  // namespace kvtier
