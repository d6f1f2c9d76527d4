// Compiled for the CPU that it is built on. The client library is built for many: it compiles this file once for each width of
// registers, renames CopyPieces in it, and chooses at its start; nothing here may be shared between them, hence no templates.
#include "block_copy.h"

#include <immintrin.h>

#include <cstring>

#include "xxh3.h"

namespace kvtier {
namespace {

constexpr size_t kStageBytes = 2 << 10;
constexpr size_t kLineBytes = 64;
constexpr size_t kPrefetchBytes = 2 << 10;  // ahead, also over the hash of the stage; never faults

// One line to the stage and past the caches to the target, both aligned to 64; the source need not be.
inline void CopyLine(uint8_t* target, uint8_t* stage, const uint8_t* source) {
#if defined(__AVX512F__)
  const __m512i line = _mm512_loadu_si512(source);
  _mm512_store_si512(stage, line);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), line);
#else
  for (size_t i = 0; i < kLineBytes; i += 16) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm_store_si128(reinterpret_cast<__m128i*>(stage + i), part);
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), part);
  }
#endif
}

// [target, + bytes) from the source by way of the stage, which is hashed.
void CopyRun(XXH3_state_t* state, uint8_t* target, const uint8_t* source, size_t bytes) {
  alignas(kLineBytes) uint8_t stage[kStageBytes];
  const bool aligned = reinterpret_cast<uintptr_t>(target) % kLineBytes == 0;
  for (size_t done = 0; done < bytes; done += kStageBytes) {
    const size_t rest = bytes - done;
    const size_t piece = rest < kStageBytes ? rest : kStageBytes;
    if (aligned && piece == kStageBytes) {
      for (size_t i = 0; i < kStageBytes; i += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(source + done + i + kPrefetchBytes), _MM_HINT_T0);
        CopyLine(target + done + i, stage + i, source + done + i);
      }
    } else {
      memcpy(stage, source + done, piece);
      memcpy(target + done, stage, piece);
    }
    XXH3_64bits_update(state, stage, piece);
  }
}

}  // namespace

uint64_t CopyPieces(const CopyPiece* pieces, size_t count) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (size_t i = 0; i < count; ++i) {
    if (pieces[i].target == nullptr) {
      XXH3_64bits_update(&state, pieces[i].source, pieces[i].bytes);
    } else {
      CopyRun(&state, pieces[i].target, pieces[i].source, pieces[i].bytes);
    }
  }
  _mm_sfence();  // streaming stores are visible before anyone is told that the copy has ended
  return XXH3_64bits_digest(&state);
}

}  // namespace kvtier
