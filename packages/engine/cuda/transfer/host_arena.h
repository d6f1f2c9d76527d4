// A cache node's arena as the GPU sees it: pinned and mapped, so that the bus moves its bytes without the CPU. Pinning walks
// every page, so it is done in chunks on several threads; where the system refuses it (a cgroup's limit, a file system or a
// driver without support), nothing stays pinned and copies go through buffers of ours.
//
// Invariant: either all chunks are registered or none is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kvtier::cuda {

struct PinOptions {
  int device = 0;
  size_t chunk_bytes = size_t{1} << 30;  // a multiple of the page size
  int threads = 0;                       // 0: as many as help, at most 8
  // Bytes that are done so far, of all; from the pinning threads, one at a time. May be empty.
  std::function<void(size_t done_bytes, size_t bytes)> progress;
  // False: nobody wants it any more. May be empty.
  std::function<bool()> wanted;
};

class HostArena {
 public:
  // `base`: page-aligned, mapped as long as this lives.
  HostArena(uint8_t* base, size_t bytes, const PinOptions& options);
  // Not pinned: copies go through buffers of ours.
  HostArena(uint8_t* base, size_t bytes) : base_(base), bytes_(bytes), chunk_bytes_(bytes) {}
  // Of another device, that has pinned it for all of them, as the current one sees it.
  explicit HostArena(std::shared_ptr<const HostArena> pinned);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  uint8_t* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool pinned() const { return pinned_; }
  // Why it is not pinned; empty when it is.
  const std::string& refusal() const { return refusal_; }
  // What kernels add offsets to; null when they cannot reach all of it through one address.
  uint8_t* view() const { return view_; }
  // No copy may cross a multiple of it.
  int64_t chunk_bytes() const { return static_cast<int64_t>(chunk_bytes_); }
  double pin_seconds() const { return pin_seconds_; }

 private:
  void Pin(const PinOptions& options);
  void View();
  void Unpin(size_t chunks);
  size_t ChunkBytes(size_t chunk) const;

  const std::shared_ptr<const HostArena> owner_;  // who registered it; null: this one, if it is pinned
  uint8_t* const base_;
  const size_t bytes_, chunk_bytes_;
  bool pinned_ = false;
  std::string refusal_;
  uint8_t* view_ = nullptr;
  double pin_seconds_ = 0;
};

}  // namespace kvtier::cuda
