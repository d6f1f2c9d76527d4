// See congestion.h. Of the two headers that know TCP_INFO, only the kernel's has the least round trip.
#include "congestion.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <string_view>

namespace kvtier {
namespace {

// Longer than within a machine room.
constexpr unsigned kFarUs = 1000;
constexpr int kLooks = 16;

std::string NameOf(int fd) {
  char name[16] = {};  // TCP_CA_NAME_MAX
  socklen_t bytes = sizeof(name) - 1;
  return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &bytes) == 0 ? name : "";
}

// Empty where nothing has to be given back.
const std::string& PacingDefault() {
  static const std::string name = [] {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return std::string();
    std::string found = NameOf(fd);
    close(fd);
    return found.starts_with("bbr") ? found : std::string();
  }();
  return name;
}

}  // namespace

void BeginUnpaced(int fd) {
  if (PacingDefault().empty()) return;
  // Reno is everywhere and for everybody; CUBIC, not always, finds long paths sooner.
  for (const std::string_view name : {"cubic", "reno"}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0) return;
  }
}

void Congestion::Look(int fd) {
  if (looks_ == kLooks) return;
  if (PacingDefault().empty()) {
    looks_ = kLooks;
    return;
  }
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  ++looks_;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return;
  if (info.tcpi_min_rtt < kFarUs) {
    looks_ = kLooks;
  } else if (looks_ == kLooks) {
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, PacingDefault().c_str(), PacingDefault().size());
  }
}

}  // namespace kvtier
