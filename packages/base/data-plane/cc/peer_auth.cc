// See peer_auth.h.
#include "peer_auth.h"

#include <sys/random.h>

#include <stdexcept>
#include <vector>

#include "sha256.h"

namespace kvtier {

PeerKey HmacSha256(const PeerKey& key, const uint8_t* bytes, size_t count) {
  constexpr size_t kBlock = 64;
  std::vector<uint8_t> inner(kBlock + count);
  std::array<uint8_t, kBlock + 32> outer{};
  for (size_t i = 0; i < kBlock; ++i) {
    const uint8_t byte = i < key.size() ? key[i] : 0;
    inner[i] = byte ^ 0x36;
    outer[i] = byte ^ 0x5c;
  }
  std::memcpy(inner.data() + kBlock, bytes, count);
  Sha256(inner.data(), inner.size(), outer.data() + kBlock);
  PeerKey digest;
  Sha256(outer.data(), outer.size(), digest.data());
  return digest;
}

PeerKey PeerProof(const PeerKey& key, std::string_view side, const PeerSession& session, const PeerNonce& client,
                  const PeerNonce& server) {
  std::vector<uint8_t> text(side.begin(), side.end());
  text.insert(text.end(), session.begin(), session.end());
  text.insert(text.end(), client.begin(), client.end());
  text.insert(text.end(), server.begin(), server.end());
  return HmacSha256(key, text.data(), text.size());
}

bool SameProof(const PeerKey& left, const PeerKey& right) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < left.size(); ++i) difference = difference | (left[i] ^ right[i]);
  return difference == 0;
}

PeerNonce RandomNonce() {
  PeerNonce nonce;
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw std::runtime_error("IO: the kernel gives no random bytes");
  }
  return nonce;
}

}  // namespace kvtier
