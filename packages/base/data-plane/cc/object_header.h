// The object header: the 256 bytes in front of every stored payload, in every tier below the arena and on the wire.
//
// The byte table is docs/formats.md ("Object header"); packages/base/identity/src/header.ts is the TypeScript mirror and
// packages/base/identity/golden/ pins both. Invariant: an object is used only when its header verifies, names the namespace
// and hash that were asked for, and the payload matches `payloadChecksum` (law 1). All numbers are little-endian.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "xxh3.h"

namespace kvtier {

static_assert(std::endian::native == std::endian::little, "the object header is read in place");

inline constexpr std::array<char, 8> kHeaderMagic = {'K', 'V', 'T', 'I', 'E', 'R', 'O', 'B'};
inline constexpr uint16_t kHeaderVersion = 1;
inline constexpr uint16_t kHeaderBytes = 256;
// The largest `codec` that this program knows; of `flags` it knows none.
inline constexpr uint16_t kLastCodec = 1;
// What follows the header in a slot or segment starts and ends on this boundary (O_DIRECT).
inline constexpr uint64_t kSlotAlignment = 4096;

enum class HeaderFault : int {
  kNone = 0,
  kMagic = 1,           // not an object at all
  kVersion = 2,         // a sound header of another version: IsForeign
  kHeaderChecksum = 3,  // torn or flipped header
  kFields = 4,          // checksum holds but a field is outside its range: a defect of the writer
  kNamespace = 5,       // a sound header of another namespace
  kHash = 6,            // a sound header of another block
  kPayloadBytes = 7,    // the payload does not fit into what was read
  kPayloadChecksum = 8, // torn or flipped payload
  kUnknown = 9,         // a sound header of this block, with a codec or flags that this program does not know: IsForeign
};

// Not damage: written by a newer program, and left to who can read it.
constexpr bool IsForeign(HeaderFault fault) { return fault == HeaderFault::kVersion || fault == HeaderFault::kUnknown; }

struct ObjectHeader {
  std::array<char, 8> magic;
  uint16_t version;
  uint16_t headerBytes;
  uint16_t hashBytes;        // 16 or 32
  uint16_t parentHashBytes;  // 0 at the root of a chain, else hashBytes
  std::array<uint8_t, 32> namespaceDigest;
  std::array<uint8_t, 32> hash;        // zero padded
  std::array<uint8_t, 32> parentHash;  // zero padded
  uint32_t tokenCount;
  uint16_t codec;  // 0 = none
  uint16_t flags;  // none defined in version 1
  uint64_t payloadBytes;
  uint64_t sequence;         // the writer's: the disk tier stamps its segment generation; 0 elsewhere
  uint64_t payloadChecksum;  // XXH3-64, seed 0
  uint32_t expires;          // Unix second from which on the object may not be used; 0: none
  std::array<uint8_t, 100> reserved;  // zero in version 1
  uint64_t headerChecksum;   // XXH3-64, seed 0, of the 248 bytes before it
};

static_assert(sizeof(ObjectHeader) == kHeaderBytes && std::is_trivially_copyable_v<ObjectHeader>);
static_assert(offsetof(ObjectHeader, version) == 8 && offsetof(ObjectHeader, headerBytes) == 10);
static_assert(offsetof(ObjectHeader, hashBytes) == 12 && offsetof(ObjectHeader, parentHashBytes) == 14);
static_assert(offsetof(ObjectHeader, namespaceDigest) == 16 && offsetof(ObjectHeader, hash) == 48);
static_assert(offsetof(ObjectHeader, parentHash) == 80 && offsetof(ObjectHeader, tokenCount) == 112);
static_assert(offsetof(ObjectHeader, codec) == 116 && offsetof(ObjectHeader, flags) == 118);
static_assert(offsetof(ObjectHeader, payloadBytes) == 120 && offsetof(ObjectHeader, sequence) == 128);
static_assert(offsetof(ObjectHeader, payloadChecksum) == 136 && offsetof(ObjectHeader, expires) == 144);
static_assert(offsetof(ObjectHeader, reserved) == 148 && offsetof(ObjectHeader, headerChecksum) == 248);

inline uint64_t HeaderChecksum(const ObjectHeader& header) {
  return XXH3_64bits(&header, offsetof(ObjectHeader, headerChecksum));
}

// Header and payload rounded up to whole pages: what one object occupies in an arena slot and in a segment.
constexpr uint64_t SlotBytesFor(uint64_t payloadBytes) {
  return (kHeaderBytes + payloadBytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Fill the fixed fields and the header checksum of `header`; every other field is the caller's. `target` may be
// unaligned.
inline void EncodeHeader(ObjectHeader header, void* target) {
  header.magic = kHeaderMagic;
  header.version = kHeaderVersion;
  header.headerBytes = kHeaderBytes;
  header.reserved.fill(0);
  header.headerChecksum = HeaderChecksum(header);
  std::memcpy(target, &header, sizeof(header));
}

// Whether the 256 bytes at `source` are a sound header of a version that this program reads; copies them to `header`.
// The same checks in the same order as decodeHeader in header.ts.
inline HeaderFault DecodeHeader(const void* source, ObjectHeader* header) {
  std::memcpy(header, source, sizeof(*header));
  if (header->magic != kHeaderMagic) return HeaderFault::kMagic;
  // First the checksum, which lies there in every version: what is torn tells nothing of its version.
  if (header->headerChecksum != HeaderChecksum(*header)) return HeaderFault::kHeaderChecksum;
  if (header->version != kHeaderVersion || header->headerBytes != kHeaderBytes) return HeaderFault::kVersion;
  const bool hashes = (header->hashBytes == 16 || header->hashBytes == 32) &&
                      (header->parentHashBytes == 0 || header->parentHashBytes == header->hashBytes);
  constexpr uint64_t kLargest = (uint64_t{1} << 53) - 1;  // exact as a JavaScript number
  if (!hashes || header->payloadBytes > kLargest || header->sequence > kLargest) return HeaderFault::kFields;
  return HeaderFault::kNone;
}

// Whether the 256 bytes at `object` are the header of the block that was asked for, and this program can use it.
// `namespaceDigest` (32 bytes) and `hash` (zero padded to 32 bytes); either may be null to accept any.
inline HeaderFault MatchHeader(const void* object, const uint8_t* namespaceDigest, const uint8_t* hash,
                               ObjectHeader* header) {
  if (const HeaderFault fault = DecodeHeader(object, header); fault != HeaderFault::kNone) return fault;
  if (namespaceDigest != nullptr && std::memcmp(header->namespaceDigest.data(), namespaceDigest, 32) != 0) {
    return HeaderFault::kNamespace;
  }
  if (hash != nullptr && std::memcmp(header->hash.data(), hash, 32) != 0) return HeaderFault::kHash;
  return header->codec > kLastCodec || header->flags != 0 ? HeaderFault::kUnknown : HeaderFault::kNone;
}

// Verify a whole object of which `availableBytes` were read to `object` (header first), as MatchHeader has it. Reads the
// payload once.
inline HeaderFault VerifyObject(const void* object, uint64_t availableBytes, const uint8_t* namespaceDigest,
                                const uint8_t* hash, ObjectHeader* header) {
  if (availableBytes < kHeaderBytes) return HeaderFault::kPayloadBytes;
  if (const HeaderFault fault = MatchHeader(object, namespaceDigest, hash, header); fault != HeaderFault::kNone) {
    return fault;
  }
  if (header->payloadBytes > availableBytes - kHeaderBytes) return HeaderFault::kPayloadBytes;
  const auto* payload = static_cast<const uint8_t*>(object) + kHeaderBytes;
  if (XXH3_64bits(payload, header->payloadBytes) != header->payloadChecksum) return HeaderFault::kPayloadChecksum;
  return HeaderFault::kNone;
}

}  // namespace kvtier
