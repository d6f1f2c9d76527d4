// An IP address in text and a port as the sockets API wants them.
#pragma once
#include <arpa/inet.h>
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

// IPv4 or IPv6; names are resolved above, by Node. Nothing when it is neither.
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
  if (inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    address.bytes = sizeof(*six);
    return address;
  }
  return std::nullopt;
}

}  // namespace kvtier
