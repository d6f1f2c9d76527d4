// sha256_ni.cc over emulated instructions, so that it is tested on CPUs without them. The emulation follows the pseudocode
// of Intel's manual (SHA256RNDS2, SHA256MSG1, SHA256MSG2).
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>

#define HasShaInstructions HasShaInstructionsUnused
#define Sha256CompressNi Sha256CompressEmulated

namespace {

using Words = std::array<uint32_t, 4>;

Words Split(__m128i x) { return std::bit_cast<Words>(x); }
__m128i Join(Words x) { return std::bit_cast<__m128i>(x); }

__m128i Rounds2(__m128i cdghIn, __m128i abefIn, __m128i kwIn) {
  const Words cdgh = Split(cdghIn), abef = Split(abefIn), kw = Split(kwIn);
  uint32_t a = abef[3], b = abef[2], e = abef[1], f = abef[0];
  uint32_t c = cdgh[3], d = cdgh[2], g = cdgh[1], h = cdgh[0];
  for (int i = 0; i < 2; ++i) {
    const uint32_t t1 = h + kw[i] + ((e & f) ^ (~e & g)) + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25));
    const uint32_t t2 = ((a & b) ^ (a & c) ^ (b & c)) + (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  return Join({f, e, b, a});
}

uint32_t Sigma0(uint32_t x) { return std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3); }
uint32_t Sigma1(uint32_t x) { return std::rotr(x, 17) ^ std::rotr(x, 19) ^ (x >> 10); }

__m128i Message1(__m128i low, __m128i high) {
  const Words w = Split(low);
  return Join({w[0] + Sigma0(w[1]), w[1] + Sigma0(w[2]), w[2] + Sigma0(w[3]), w[3] + Sigma0(Split(high)[0])});
}

__m128i Message2(__m128i sumIn, __m128i lastIn) {
  const Words sum = Split(sumIn), last = Split(lastIn);
  const uint32_t w16 = sum[0] + Sigma1(last[2]), w17 = sum[1] + Sigma1(last[3]);
  return Join({w16, w17, sum[2] + Sigma1(w16), sum[3] + Sigma1(w17)});
}

}  // namespace

#define _mm_sha256rnds2_epu32 Rounds2
#define _mm_sha256msg1_epu32 Message1
#define _mm_sha256msg2_epu32 Message2
#include "../sha256_ni.cc"
