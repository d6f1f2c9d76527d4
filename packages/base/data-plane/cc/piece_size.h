// How much to ask a server for at once. It serves nobody else while it makes an answer, and an answer costs it some 35 us besides its
// bytes on a slow machine. So pieces are large while nobody else uses it; else such that one keeps it for 50 us at most.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kvtier {

class PieceSize {
 public:
  static constexpr uint64_t kPieceUs = 50;
  static constexpr uint64_t kAloneBytes = 1 << 20;
  static constexpr uint64_t kSizes[] = {32 << 10, 48 << 10, 64 << 10, 96 << 10, 128 << 10, 192 << 10, 256 << 10, 384 << 10, 512 << 10};

  // The largest one that would have taken no longer than kPieceUs if its time were all bytes' time. As what a piece costs by itself
  // makes that too few in one step up and too many in one down, what follows from it, over and over, comes to rest: it never swings.
  static uint64_t After(uint64_t piece_bytes, double piece_us) {
    const double most = static_cast<double>(piece_bytes) * kPieceUs / std::max(piece_us, 0.001);
    uint64_t next = kSizes[0];
    for (const uint64_t size : kSizes) {
      if (static_cast<double>(size) <= most) next = size;
    }
    return next;
  }

  explicit PieceSize(uint64_t shared_bytes) : shared_bytes_(shared_bytes) {}

  uint64_t bytes() const { return is_shared_ ? shared_bytes_ : kAloneBytes; }

  // Whether others use the server. What was measured with pieces of another size counts no more.
  void Share(bool is_shared) {
    if (is_shared == is_shared_) return;
    is_shared_ = is_shared;
    Begin();
  }

  // A piece took that long behind the one before it.
  void Arrived(uint64_t bytes, double us) {
    ++pieces_;
    arrived_bytes_ += bytes;
    arriving_us_ += us;
    if (!is_shared_ || arrived_bytes_ < kMeasuredBytes) return;
    const auto count = static_cast<double>(pieces_);
    shared_bytes_ = After(static_cast<uint64_t>(static_cast<double>(arrived_bytes_) / count), arriving_us_ / count);
    Begin();
  }

 private:
  static constexpr uint64_t kMeasuredBytes = 4 << 20;

  void Begin() { arrived_bytes_ = pieces_ = 0, arriving_us_ = 0; }

  bool is_shared_ = true;
  uint64_t shared_bytes_;
  uint64_t pieces_ = 0, arrived_bytes_ = 0;
  double arriving_us_ = 0;
};

}  // namespace kvtier
