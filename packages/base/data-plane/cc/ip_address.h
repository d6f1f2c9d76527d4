// An IP address in text and a port as the sockets API wants them.
#pragma once
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

namespace kvtier {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
};

// IPv4 or IPv6, a link-local one with the interface that it is meant on ("fe80::1%eth0"); names are resolved above, by Node.
// Nothing when it is neither, or that interface is not here.
inline std::optional<SocketAddress> IpAddress(const std::string& host, uint16_t port) {
  SocketAddress address;
  auto* four = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    address.bytes = sizeof(*four);
    return address;
  }
  const size_t zone = host.find('%');
  if (inet_pton(AF_INET6, host.substr(0, zone).c_str(), &six->sin6_addr) == 1) {
    if (zone != std::string::npos) {
      six->sin6_scope_id = if_nametoindex(host.c_str() + zone + 1);
      if (six->sin6_scope_id == 0) return std::nullopt;
    }
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    address.bytes = sizeof(*six);
    return address;
  }
  return std::nullopt;
}

}  // namespace kvtier
