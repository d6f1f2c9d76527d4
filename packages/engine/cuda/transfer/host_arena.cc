#include "host_arena.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../gpu/gpu.h"

namespace kvtier::cuda {
namespace {

constexpr int kMaxThreads = 8;  // beyond, the kernel's lock on the address space is what they wait for

}  // namespace

HostArena::HostArena(uint8_t* base, size_t bytes, const PinOptions& options)
    : base_(base), bytes_(bytes), chunk_bytes_(options.chunk_bytes) {
  const auto start = std::chrono::steady_clock::now();
  Pin(options);
  pin_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

HostArena::HostArena(std::shared_ptr<const HostArena> pinned)
    : owner_(std::move(pinned)), base_(owner_->base_), bytes_(owner_->bytes_), chunk_bytes_(owner_->chunk_bytes_), pinned_(true) {
  View();
}

HostArena::~HostArena() {
  if (pinned_ && !owner_) Unpin((bytes_ + chunk_bytes_ - 1) / chunk_bytes_);
}

size_t HostArena::ChunkBytes(size_t chunk) const { return std::min(chunk_bytes_, bytes_ - chunk * chunk_bytes_); }

void HostArena::Pin(const PinOptions& options) {
  const size_t chunks = (bytes_ + chunk_bytes_ - 1) / chunk_bytes_;
  const auto cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int wanted = options.threads > 0 ? options.threads : std::min(kMaxThreads, cores);
  const size_t threads = std::min(chunks, static_cast<size_t>(wanted));

  std::mutex mutex;
  std::vector<uint8_t> done(chunks, 0);
  std::string refusal;
  size_t done_bytes = 0;
  std::atomic<size_t> next{0};
  std::atomic<bool> refused{false};
  const auto work = [&] {
    try {
      gpu::Use(options.device);
      for (size_t chunk = next.fetch_add(1); chunk < chunks && !refused; chunk = next.fetch_add(1)) {
        if (options.wanted && !options.wanted()) throw std::runtime_error("nobody waits for it any more");
        gpu::RegisterHost(base_ + chunk * chunk_bytes_, ChunkBytes(chunk));
        const std::lock_guard lock(mutex);
        done[chunk] = 1;
        done_bytes += ChunkBytes(chunk);
        if (options.progress) options.progress(done_bytes, bytes_);
      }
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      if (!refused.exchange(true)) refusal = error.what();
    }
  };
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < threads) others.emplace_back(work);
  } catch (const std::exception&) {
    // No more threads are to be had: those that there are do it all.
  }
  work();
  for (std::thread& thread : others) thread.join();

  if (refused) {
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      if (done[chunk] != 0) gpu::UnregisterHost(base_ + chunk * chunk_bytes_);
    }
    refusal_ = refusal;
    return;
  }
  pinned_ = true;
  View();
}

// With unified addressing the view is the address itself. Where it is not, chunks may be mapped apart from each other.
void HostArena::View() {
  view_ = static_cast<uint8_t*>(gpu::DeviceView(base_));
  for (size_t offset = chunk_bytes_; offset < bytes_; offset += chunk_bytes_) {
    if (gpu::DeviceView(base_ + offset) != view_ + offset) view_ = nullptr;
    if (view_ == nullptr) break;
  }
}

void HostArena::Unpin(size_t chunks) {
  for (size_t chunk = 0; chunk < chunks; ++chunk) gpu::UnregisterHost(base_ + chunk * chunk_bytes_);
  pinned_ = false;
}

}  // namespace kvtier::cuda
