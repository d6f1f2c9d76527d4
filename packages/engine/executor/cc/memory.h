// Large zero-filled memory straight from the kernel: pages appear when touched, huge pages where the kernel has them.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <utility>

namespace kvtier {

class Memory {
 public:
  Memory() = default;
  // `what` names the owner in the error of a machine that has too little memory.
  Memory(size_t bytes, const std::string& what) : bytes_(bytes == 0 ? 1 : bytes) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      base_ = nullptr;
      throw std::runtime_error("CONFIG: cannot allocate " + std::to_string(bytes) + " bytes for " + what +
                               "; choose fewer blocks, a smaller step or a smaller model");
    }
    madvise(base_, bytes_, MADV_HUGEPAGE);
  }
  Memory(Memory&& other) noexcept : base_(other.base_), bytes_(other.bytes_) { other.base_ = nullptr; }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }

  float* floats() const { return static_cast<float*>(base_); }
  uint8_t* data() const { return static_cast<uint8_t*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

// Fills the page tables of [base, base + bytes) in pieces; stops early when asked. A kernel that cannot: no harm.
inline void Populate(uint8_t* base, size_t bytes, const std::stop_token& stop = {}) {
  constexpr size_t kPiece = 32 << 20;
  for (size_t done = 0; done < bytes && !stop.stop_requested(); done += kPiece) {
    const size_t piece = bytes - done < kPiece ? bytes - done : kPiece;
    if (madvise(base + done, piece, MADV_POPULATE_WRITE) != 0) return;
  }
}

}  // namespace kvtier
