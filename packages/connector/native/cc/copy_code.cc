#include "copy_code.h"

namespace kvtier {

uint64_t CopyPiecesSse2(const CopyPiece* pieces, size_t count);
uint64_t CopyPiecesAvx2(const CopyPiece* pieces, size_t count);
uint64_t CopyPiecesAvx512(const CopyPiece* pieces, size_t count);

const ChosenCode& ChooseCopyCode() {
  static const ChosenCode chosen = [] {
    if (__builtin_cpu_supports("avx512f")) return ChosenCode{CopyPiecesAvx512, "avx512"};
    if (__builtin_cpu_supports("avx2")) return ChosenCode{CopyPiecesAvx2, "avx2"};
    return ChosenCode{CopyPiecesSse2, "sse2"};
  }();
  return chosen;
}

}  // namespace kvtier
