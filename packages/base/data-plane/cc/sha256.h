// SHA-256 (FIPS 180-4), shaped for chains of short messages.
//
// A chained block hash is sequential: message i starts with digest i-1. But only the first 64-byte piece of a message
// holds that digest. The message schedules of all later pieces depend on tokens alone, so they are computed ahead, eight
// pieces at a time in the lanes of one vector ("multi-buffer" after Gueron & Krasnov, 2012), and the chain pays for
// their 64 rounds only. With SHA-NI the instructions do both and nothing is computed ahead.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier {

using Sha256State = std::array<uint32_t, 8>;
inline constexpr Sha256State kSha256Initial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
inline constexpr size_t kSha256Piece = 64;
inline constexpr size_t kScheduleLanes = 8;

// Round inputs K[t] + W[t] of eight pieces: [t][lane].
struct alignas(64) Sha256Schedules {
  uint32_t words[64][kScheduleLanes];
};

bool HasShaInstructions();

// Compress `count` consecutive pieces into `state`.
void Sha256Compress(Sha256State& state, const uint8_t* pieces, size_t count);
// The same without SHA-NI, whatever the CPU has: the reference of the tests.
void Sha256CompressPortable(Sha256State& state, const uint8_t* pieces, size_t count);

// Schedules of pieces[0..count), count ≤ kScheduleLanes; the other lanes are left as they are.
void Sha256Prepare(const uint8_t* const* pieces, size_t count, Sha256Schedules* schedules);
// Compress the piece whose schedule is in `lane`.
void Sha256CompressPrepared(Sha256State& state, const Sha256Schedules& schedules, size_t lane);

// Append the padding to a message of `bytes` bytes at `message`; returns the padded length, a multiple of 64.
// At most 72 bytes are written behind the message.
size_t Sha256Pad(uint8_t* message, size_t bytes);
void Sha256Store(const Sha256State& state, uint8_t* digest);
// One-shot: digest is 32 bytes.
void Sha256(const uint8_t* bytes, size_t count, uint8_t* digest);

}  // namespace kvtier
