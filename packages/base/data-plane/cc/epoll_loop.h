// A thread that waits for many sockets at once, with a mailbox for work from other threads. Sockets go by numbers of their owner's
// choice, so that news of one that was closed meanwhile finds nobody. Idea: Seastar's shards; what a derived class keeps is touched
// by its loop's thread only.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace kvtier {

class EpollLoop {
 public:
  virtual ~EpollLoop();
  EpollLoop(const EpollLoop&) = delete;
  EpollLoop& operator=(const EpollLoop&) = delete;

  // Have it done by the loop's thread, in the order of posting. What was posted before the end is done before it.
  void Post(std::function<void()> work);

 protected:
  // Throws std::runtime_error (IO). `what` says whose loop it is.
  explicit EpollLoop(const std::string& what);
  // The derived constructor's last step (std::runtime_error, SETUP: no thread), and the derived destructor's first: the thread calls what they make and take apart.
  void Start();
  void Stop();

  // Of the loop's thread. `events`: EPOLLIN ..., from now on. A socket is forgotten when it is closed.
  void Watch(uint64_t number, int fd, uint32_t events);
  void Forget(uint64_t number) { watched_.erase(number); }

  virtual void OnStart() {}
  virtual void OnReady(uint64_t number, uint32_t events) = 0;
  // All that was ready has been dealt with. Returns for how many milliseconds the loop may sleep; -1: until something happens.
  virtual int OnTurn() = 0;
  virtual void OnEnd() = 0;

 private:
  void Run();
  void Mail();

  int epoll_;
  int mailbox_;
  bool stopping_ = false;
  std::unordered_map<uint64_t, uint32_t> watched_;  // what for
  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
  bool sleeping_ = false;  // nobody looks into posted_ before the mailbox is rung
  std::thread thread_;
};

}  // namespace kvtier
