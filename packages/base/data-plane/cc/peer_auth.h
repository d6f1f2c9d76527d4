// How the two ends of a data connection prove to each other that they hold the key of the same control session.
//
//     client                                     server
//     Hello: magic, version, session, nonce  ──▶
//                                            ◀── Answer: magic, version, nonce, HMAC(key, "server", both nonces)
//     Proof: HMAC(key, "client", both nonces)──▶            then requests and replies
//
// The key itself never travels: both ends derived it on the control connection (docs/formats.md, "Peer protocol"). The
// nonces make every proof good for one connection only. HMAC-SHA256 is RFC 2104.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

namespace kvtier {

using PeerKey = std::array<uint8_t, 32>;
using PeerNonce = std::array<uint8_t, 32>;
using PeerSession = std::array<uint8_t, 16>;

inline constexpr std::array<char, 8> kPeerMagic = {'K', 'V', 'T', 'P', 'D', 'A', 'T', 'A'};
inline constexpr uint32_t kPeerVersion = 1;

struct PeerHello {
  std::array<char, 8> magic = kPeerMagic;
  uint32_t version = kPeerVersion;
  uint32_t reserved = 0;
  PeerSession session{};
  PeerNonce nonce{};
};
struct PeerAnswer {
  std::array<char, 8> magic = kPeerMagic;
  uint32_t version = kPeerVersion;
  uint32_t reserved = 0;
  PeerNonce nonce{};
  PeerKey proof{};
};
static_assert(sizeof(PeerHello) == 64 && sizeof(PeerAnswer) == 80);

// One request: "this object, if it fits". 80 bytes.
struct PeerRequest {
  uint64_t tag;
  uint64_t slotBytes;  // header and payload may fill as much
  std::array<uint8_t, 64> identity;  // namespace digest, hash zero padded
};
// A frame of requests: this, then `count` of them.
struct PeerRequestFrame {
  uint32_t magic;
  uint32_t count;
};
// What stands before an object, or in its place.
struct PeerReply {
  uint32_t magic;
  uint32_t status;  // PeerStatus
  uint64_t tag;
  uint64_t objectBytes;  // 0 unless the object follows
};
static_assert(sizeof(PeerRequest) == 80 && sizeof(PeerRequestFrame) == 8 && sizeof(PeerReply) == 24);
inline constexpr uint32_t kPeerRequestMagic = 0x51525450;  // "PTRQ"
// "So many more objects have come whole": a PeerRequestFrame of this magic, with nothing behind it. Until then they stay put.
inline constexpr uint32_t kPeerReceivedMagic = 0x43525450;  // "PTRC"
inline constexpr uint32_t kPeerReplyMagic = 0x50525450;    // "PTRP"
inline constexpr uint32_t kPeerMaxRequests = 1024;         // on one connection, answers not yet received included

enum class PeerStatus : uint32_t { kReady = 0, kMissing = 1, kFailed = 2 };

PeerKey HmacSha256(const PeerKey& key, const uint8_t* bytes, size_t count);
PeerKey PeerProof(const PeerKey& key, std::string_view side, const PeerSession& session, const PeerNonce& client,
                  const PeerNonce& server);
// In time that does not depend on where they differ.
bool SameProof(const PeerKey& left, const PeerKey& right);
// Throws std::runtime_error when the kernel has none.
PeerNonce RandomNonce();

// The sessions that may open data connections. Thread-safe.
class PeerSessions {
 public:
  void Allow(const PeerSession& session, const PeerKey& key) {
    const std::lock_guard lock(mutex_);
    keys_[session] = key;
  }
  void Revoke(const PeerSession& session) {
    const std::lock_guard lock(mutex_);
    keys_.erase(session);
  }
  std::optional<PeerKey> Find(const PeerSession& session) const {
    const std::lock_guard lock(mutex_);
    const auto found = keys_.find(session);
    if (found == keys_.end()) return std::nullopt;
    return found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<PeerSession, PeerKey> keys_;
};

}  // namespace kvtier
