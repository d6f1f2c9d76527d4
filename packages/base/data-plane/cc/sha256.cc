// Scalar rounds and vector schedules; see sha256.h for the idea. SHA-NI is in sha256_ni.cc.
#include "sha256.h"

#include <bit>
#include <cstring>

#include "sha256_constants.h"
#include "sha256_ni.h"

namespace kvtier {
namespace {

inline uint32_t LoadBigEndian(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return __builtin_bswap32(word);
}

// One round with the eight variables renamed by the caller instead of moved. `kw` is K[t] + W[t].
// Maj(a,b,c) = ((a^b) & (b^c)) ^ b, where b^c is the a^b of the round before.
#define KVTIER_ROUND(a, b, c, d, e, f, g, h, kw)                                            \
  do {                                                                                      \
    const uint32_t t1 = h + (kw) + ((e & f) + (~e & g)) +                                   \
                        (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25));            \
    const uint32_t ab = a ^ b;                                                              \
    d += t1;                                                                                \
    h = t1 + ((ab & bc) ^ b) + (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22));     \
    bc = ab;                                                                                \
  } while (0)

// 64 rounds; kw(t) gives K[t] + W[t] and is called in order of t, in steps of 8.
template <class Words>
__attribute__((always_inline)) inline void Rounds(Sha256State& state, Words&& kw) {
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  uint32_t bc = b ^ c;
#pragma GCC unroll 8
  for (size_t t = 0; t < 64; t += 8) {
    KVTIER_ROUND(a, b, c, d, e, f, g, h, kw(t + 0));
    KVTIER_ROUND(h, a, b, c, d, e, f, g, kw(t + 1));
    KVTIER_ROUND(g, h, a, b, c, d, e, f, kw(t + 2));
    KVTIER_ROUND(f, g, h, a, b, c, d, e, kw(t + 3));
    KVTIER_ROUND(e, f, g, h, a, b, c, d, kw(t + 4));
    KVTIER_ROUND(d, e, f, g, h, a, b, c, kw(t + 5));
    KVTIER_ROUND(c, d, e, f, g, h, a, b, kw(t + 6));
    KVTIER_ROUND(b, c, d, e, f, g, h, a, kw(t + 7));
  }
  state[0] += a, state[1] += b, state[2] += c, state[3] += d;
  state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}
#undef KVTIER_ROUND

// GCC's vectors: rotates become vprord where there is AVX-512VL, shifts elsewhere.
using Lanes = uint32_t __attribute__((vector_size(4 * kScheduleLanes)));
using Quad = uint32_t __attribute__((vector_size(16)));

template <class Vector>
inline Vector Rotr(Vector x, int count) {
  return (x >> count) | (x << (32 - count));
}
template <class Vector>
inline Vector Sigma0(Vector x) {
  return Rotr(x, 7) ^ Rotr(x, 18) ^ (x >> 3);
}
template <class Vector>
inline Vector Sigma1(Vector x) {
  return Rotr(x, 17) ^ Rotr(x, 19) ^ (x >> 10);
}

// The schedule of one piece, four words at a time: words[t] = K[t] + W[t]. Written in step with the rounds, 16 words ahead
// of them, so that the vector units work while the scalar rounds wait for each other.
struct Schedule {
  Quad w[4];
  alignas(64) uint32_t words[64];

  __attribute__((always_inline)) explicit Schedule(const uint8_t* piece) {
    for (size_t i = 0; i < 4; ++i) {
      for (size_t j = 0; j < 4; ++j) w[i][j] = LoadBigEndian(piece + 16 * i + 4 * j);
      Put(i, w[i]);
    }
  }

  // Words 4i to 4i+3, i ≥ 4. The upper two need the lower two.
  __attribute__((always_inline)) void Extend(size_t i) {
    const Quad w16 = w[i % 4], w12 = w[(i + 1) % 4], w8 = w[(i + 2) % 4], w4 = w[(i + 3) % 4];
    const Quad w15 = __builtin_shuffle(w16, w12, Quad{1, 2, 3, 4});
    const Quad w7 = __builtin_shuffle(w8, w4, Quad{1, 2, 3, 4});
    const Quad zero = {};
    Quad next = w16 + Sigma0(w15) + w7;
    next += __builtin_shuffle(Sigma1(w4), zero, Quad{2, 3, 4, 4});
    next += __builtin_shuffle(Sigma1(next), zero, Quad{4, 4, 0, 1});
    w[i % 4] = next;
    Put(i, next);
  }

  __attribute__((always_inline)) void Put(size_t i, Quad quad) {
    const Quad kw = quad + *reinterpret_cast<const Quad*>(kSha256K + 4 * i);
    std::memcpy(words + 4 * i, &kw, 16);
  }
};

// 32 bytes of each piece from `offset` on, as 8 big-endian words, transposed: out[t][lane] is word t of piece `lane`.
inline void LoadTransposed(const uint8_t* const* pieces, size_t count, size_t offset, Lanes* out) {
  using Bytes = uint8_t __attribute__((vector_size(32)));
  const Bytes swap = {3,  2,  1,  0,  7,  6,  5,  4,  11, 10, 9,  8,  15, 14, 13, 12,
                      19, 18, 17, 16, 23, 22, 21, 20, 27, 26, 25, 24, 31, 30, 29, 28};
  Lanes row[8], pair[8], quad[8];
  for (size_t lane = 0; lane < kScheduleLanes; ++lane) {
    Bytes bytes;
    std::memcpy(&bytes, pieces[lane < count ? lane : 0] + offset, sizeof(bytes));
    row[lane] = reinterpret_cast<Lanes>(__builtin_shuffle(bytes, swap));
  }
  for (size_t i = 0; i < 8; i += 2) {
    pair[i] = __builtin_shuffle(row[i], row[i + 1], Lanes{0, 8, 1, 9, 4, 12, 5, 13});
    pair[i + 1] = __builtin_shuffle(row[i], row[i + 1], Lanes{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (size_t i = 0; i < 8; i += 4) {
    for (size_t j = 0; j < 2; ++j) {
      quad[i + 2 * j] = __builtin_shuffle(pair[i + j], pair[i + 2 + j], Lanes{0, 1, 8, 9, 4, 5, 12, 13});
      quad[i + 2 * j + 1] = __builtin_shuffle(pair[i + j], pair[i + 2 + j], Lanes{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (size_t i = 0; i < 4; ++i) {
    out[i] = __builtin_shuffle(quad[i], quad[i + 4], Lanes{0, 1, 2, 3, 8, 9, 10, 11});
    out[i + 4] = __builtin_shuffle(quad[i], quad[i + 4], Lanes{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

}  // namespace

void Sha256CompressPortable(Sha256State& state, const uint8_t* pieces, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Schedule schedule(pieces + i * kSha256Piece);
    Rounds(state, [&](size_t t) __attribute__((always_inline)) {
      if (t % 4 == 0 && t < 48) schedule.Extend(t / 4 + 4);
      return schedule.words[t];
    });
  }
}

void Sha256Compress(Sha256State& state, const uint8_t* pieces, size_t count) {
  static const bool instructions = HasShaInstructions();
  if (instructions) {
    Sha256CompressNi(state, pieces, count);
  } else {
    Sha256CompressPortable(state, pieces, count);
  }
}

void Sha256Prepare(const uint8_t* const* pieces, size_t count, Sha256Schedules* schedules) {
  Lanes w[16];
  LoadTransposed(pieces, count, 0, w);
  LoadTransposed(pieces, count, 32, w + 8);
  auto* out = reinterpret_cast<Lanes*>(schedules->words);
  for (size_t t = 0; t < 16; ++t) out[t] = w[t] + kSha256K[t];
#pragma GCC unroll 16
  for (size_t t = 16; t < 64; ++t) {
    Lanes& next = w[t % 16];
    next += Sigma0(w[(t + 1) % 16]) + w[(t + 9) % 16] + Sigma1(w[(t + 14) % 16]);
    out[t] = next + kSha256K[t];
  }
}

void Sha256CompressPrepared(Sha256State& state, const Sha256Schedules& schedules, size_t lane) {
  Rounds(state, [&](size_t t) { return schedules.words[t][lane]; });
}

size_t Sha256Pad(uint8_t* message, size_t bytes) {
  const size_t padded = (bytes + 9 + kSha256Piece - 1) / kSha256Piece * kSha256Piece;
  message[bytes] = 0x80;
  std::memset(message + bytes + 1, 0, padded - bytes - 9);
  const uint64_t bits = __builtin_bswap64(uint64_t{bytes} * 8);
  std::memcpy(message + padded - 8, &bits, 8);
  return padded;
}

void Sha256Store(const Sha256State& state, uint8_t* digest) {
  for (size_t i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(digest + 4 * i, &word, 4);
  }
}

void Sha256(const uint8_t* bytes, size_t count, uint8_t* digest) {
  Sha256State state = kSha256Initial;
  const size_t whole = count / kSha256Piece;
  Sha256Compress(state, bytes, whole);
  // The last, partial piece and its padding: at most two pieces.
  uint8_t tail[2 * kSha256Piece];
  const size_t rest = count % kSha256Piece;
  if (rest > 0) std::memcpy(tail, bytes + whole * kSha256Piece, rest);
  const size_t padded = Sha256Pad(tail, rest);
  const uint64_t bits = __builtin_bswap64(uint64_t{count} * 8);
  std::memcpy(tail + padded - 8, &bits, 8);
  Sha256Compress(state, tail, padded / kSha256Piece);
  Sha256Store(state, digest);
}

}  // namespace kvtier
