// Host memory as a cache node's arena is, and transfers that must succeed.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <stdexcept>

#include "../transfer/transfers.h"
#include "bench.h"

namespace kvtier::cuda::bench {

class Shared {
 public:
  explicit Shared(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("no host memory for an arena of " + std::to_string(bytes) + " bytes");
  }
  ~Shared() { munmap(data_, bytes_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* data_;
};

// A figure of an arena that is not pinned is one of the CPU.
inline int Registered(const Transfers::Registration& made) {
  if (!made.pinned) throw std::runtime_error("the arena is not pinned: " + made.refusal);
  fprintf(stderr, "arena pinned in %.3f s\n", made.seconds);
  return made.arena;
}
inline void Require(const TransferResult& result) {
  if (result.outcome != TransferResult::Outcome::kDone) throw std::runtime_error(result.error);
}

inline void RequireGood(std::span<const uint8_t> good) {
  if (std::ranges::count(good, uint8_t{0}) > 0) throw std::runtime_error("a block arrived wrong");
}

}  // namespace kvtier::cuda::bench
