#include "binding_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "background.h"

namespace kvtier {
namespace {

constexpr size_t kPageBytes = 4096, kFewSlabs = 8;

// Never destroyed: threads may outlive main.
auto& used_mutex = *new std::mutex;
auto& used = *new std::vector<std::unique_ptr<Pages>>;
int64_t asked_bytes = 0;

size_t MostSlabs() { return kFewSlabs + static_cast<size_t>(std::max<int64_t>(asked_bytes, 0)) / Pages::kSlabBytes; }

}  // namespace

Pages::Pages(size_t bytes) : bytes_((bytes + kSlabBytes - 1) / kSlabBytes * kSlabBytes) {
  const size_t mapped = bytes_ + kSlabBytes;
  void* map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw SystemFailure("mmap", errno);
  auto* from = static_cast<uint8_t*>(map);
  at_ = from + (kSlabBytes - reinterpret_cast<uintptr_t>(from) % kSlabBytes) % kSlabBytes;
  if (at_ > from) munmap(from, static_cast<size_t>(at_ - from));
  if (const size_t after = static_cast<size_t>(from + mapped - (at_ + bytes_)); after > 0) munmap(at_ + bytes_, after);
  madvise(at_, bytes_, MADV_HUGEPAGE);
}

Pages::~Pages() { munmap(at_, bytes_); }

void Pages::Touch() {
  for (size_t at = 0; at < bytes_; at += kPageBytes) const_cast<volatile uint8_t*>(at_)[at] = 0;
}

std::unique_ptr<Pages> Pages::Take(size_t bytes, bool touch) {
  {
    const std::lock_guard lock(used_mutex);
    if (bytes <= kSlabBytes && !used.empty()) {
      auto pages = std::move(used.back());
      used.pop_back();
      return pages;
    }
  }
  auto pages = std::make_unique<Pages>(bytes);
  if (touch) pages->Touch();
  return pages;
}

Napi::ArrayBuffer Pages::Give(Napi::Env env, std::unique_ptr<Pages> pages) {
  auto* given = pages.release();
  const auto collected = [](Napi::Env, void*, Pages* unused) { Keep(std::unique_ptr<Pages>(unused)); };
  return Napi::ArrayBuffer::New(env, given->at_, given->bytes_, collected, given);
}

void Pages::KeepMore(int64_t bytes) {
  std::vector<std::unique_ptr<Pages>> surplus;  // unmapped after the lock
  const std::lock_guard lock(used_mutex);
  asked_bytes += bytes;
  for (; used.size() > MostSlabs(); used.pop_back()) surplus.push_back(std::move(used.back()));
}

void Pages::Keep(std::unique_ptr<Pages> pages) {
  const std::lock_guard lock(used_mutex);
  if (pages->bytes_ == kSlabBytes && used.size() < MostSlabs()) used.push_back(std::move(pages));
}

}  // namespace kvtier
