#include "block_copy.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "xxh3.h"

namespace kvtier {
namespace {

constexpr size_t kStageBytes = 16 << 10;

// Whole 64-byte lines past the caches; target aligned to 64.
void StreamLines(uint8_t* target, const uint8_t* source, size_t lines) {
  for (size_t line = 0; line < lines; ++line, target += 64, source += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
#elif defined(__AVX__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32)));
#else
    memcpy(target, source, 64);
#endif
  }
}

void StreamPiece(uint8_t* target, const uint8_t* source, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(target) % 64 != 0) {
    memcpy(target, source, bytes);
    return;
  }
  StreamLines(target, source, bytes / 64);
  memcpy(target + bytes / 64 * 64, source + bytes / 64 * 64, bytes % 64);
}

}  // namespace

uint64_t CopyAndHash(uint8_t* target, const uint8_t* source, size_t bytes) {
  alignas(64) uint8_t stage[kStageBytes];
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (size_t done = 0; done < bytes; done += kStageBytes) {
    const size_t piece = std::min(kStageBytes, bytes - done);
    memcpy(stage, source + done, piece);
    XXH3_64bits_update(&state, stage, piece);
    StreamPiece(target + done, stage, piece);
  }
  _mm_sfence();  // streaming stores are visible before anyone is told that the copy has ended
  return XXH3_64bits_digest(&state);
}

}  // namespace kvtier
