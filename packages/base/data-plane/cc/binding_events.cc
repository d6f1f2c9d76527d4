#include <sys/mman.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "background.h"
#include "binding.h"
#include "kv_events.h"

namespace kvtier {
namespace {

std::span<const uint8_t> BytesOf(const Napi::Value& value) {
  const auto array = value.As<Napi::Uint8Array>();
  return {array.Data(), array.ByteLength()};
}

Napi::Value EncodeEvents(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto words = info[0].As<Napi::Uint32Array>();
  const uint32_t count = info[1].As<Napi::Number>().Uint32Value();
  if (count > words.ElementLength()) throw Napi::RangeError::New(env, "encodeKvEvents: more words than there are");
  const KvEventBatch batch{info[3].As<Napi::Number>().DoubleValue(), info[4].As<Napi::Number>().Int64Value()};
  const KvEventFormat format{info[5].As<Napi::Boolean>().Value(), info[6].As<Napi::Boolean>().Value()};
  std::vector<std::span<const uint8_t>> objects;
  if (!info[8].IsNull()) {
    const auto array = info[8].As<Napi::Array>();
    for (uint32_t i = 0; i < array.Length(); ++i) objects.push_back(BytesOf(array.Get(i)));
  }
  auto out = info[9].As<Napi::Uint8Array>();
  const uint32_t from = info[10].As<Napi::Number>().Uint32Value();
  if (from > out.ByteLength()) throw Napi::RangeError::New(env, "encodeKvEvents: past the end of out");
  try {
    const size_t bytes = EncodeKvEvents({words.Data(), count}, info[2].As<Napi::Number>().Uint32Value(), batch, format, BytesOf(info[7]),
                                        objects, {out.Data() + from, out.ByteLength() - from});
    return Napi::Number::New(env, static_cast<double>(bytes));
  } catch (const std::invalid_argument& error) {
    throw Napi::RangeError::New(env, error.what());
  }
}

Napi::Value DecodeEvents(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto out = info[3].As<Napi::Int32Array>();
  const uint32_t from = info[4].As<Napi::Number>().Uint32Value();
  if (from > out.ElementLength()) throw Napi::RangeError::New(env, "decodeKvEvents: past the end of out");
  const int64_t words = DecodeKvEvents(BytesOf(info[0]), info[1].As<Napi::Boolean>().Value(), BytesOf(info[2]),
                                       {out.Data() + from, out.ElementLength() - from});
  return Napi::Number::New(env, static_cast<double>(words));
}

constexpr size_t kPageBytes = 4096, kHugePageBytes = 2 << 20;

// Memory in huge pages, where the kernel has some: a first write to each small page costs more than what is then written there.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_((bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes) {
    const size_t mapped = bytes_ + kHugePageBytes;
    void* map = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw SystemFailure("mmap", errno);
    auto* from = static_cast<uint8_t*>(map);
    at_ = from + (kHugePageBytes - reinterpret_cast<uintptr_t>(from) % kHugePageBytes) % kHugePageBytes;
    if (at_ > from) munmap(from, static_cast<size_t>(at_ - from));
    if (const size_t after = static_cast<size_t>(from + mapped - (at_ + bytes_)); after > 0) munmap(at_ + bytes_, after);
    madvise(at_, bytes_, MADV_HUGEPAGE);
  }
  ~Pages() { munmap(at_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void Touch() {
    for (size_t at = 0; at < bytes_; at += kPageBytes) const_cast<volatile uint8_t*>(at_)[at] = 0;
  }

  // Those that were used before, if there are some, else new ones.
  static std::unique_ptr<Pages> Take(size_t bytes, bool touch) {
    {
      const std::lock_guard lock(used_mutex);
      if (bytes <= kHugePageBytes && !used.empty()) {
        auto pages = std::move(used.back());
        used.pop_back();
        return pages;
      }
    }
    auto pages = std::make_unique<Pages>(bytes);
    if (touch) pages->Touch();
    return pages;
  }

  static Napi::Value Give(Napi::Env env, std::unique_ptr<Pages> pages) {
    auto* given = pages.release();
    const auto collected = [](Napi::Env, void*, Pages* unused) { Keep(std::unique_ptr<Pages>(unused)); };
    return Napi::ArrayBuffer::New(env, given->at_, given->bytes_, collected, given);
  }

 private:
  static void Keep(std::unique_ptr<Pages> pages) {
    const std::lock_guard lock(used_mutex);
    if (pages->bytes_ == kHugePageBytes && used.size() < kMostUsed) used.push_back(std::move(pages));
  }

  static constexpr size_t kMostUsed = 8;
  // Never destroyed: threads may outlive main.
  static inline auto& used_mutex = *new std::mutex;
  static inline auto& used = *new std::vector<std::unique_ptr<Pages>>;
  size_t bytes_;
  uint8_t* at_;
};

Napi::Value AllocatePages(const Napi::CallbackInfo& info) {
  try {
    return Pages::Give(info.Env(), Pages::Take(static_cast<size_t>(info[0].As<Napi::Number>().Int64Value()), false));
  } catch (const SystemFailure& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

Napi::Value PreparePages(const Napi::CallbackInfo& info) {
  const auto bytes = static_cast<size_t>(info[0].As<Napi::Number>().Int64Value());
  auto pages = std::make_shared<std::unique_ptr<Pages>>();
  const auto work = [pages, bytes] { *pages = Pages::Take(bytes, true); };
  return RunOn(Processors(), info.Env(), work, [pages](Napi::Env env) { return Pages::Give(env, std::move(*pages)); });
}

}  // namespace

void RegisterEvents(Napi::Env env, Napi::Object exports) {
  exports.Set("encodeKvEvents", Napi::Function::New<EncodeEvents>(env, "encodeKvEvents"));
  exports.Set("decodeKvEvents", Napi::Function::New<DecodeEvents>(env, "decodeKvEvents"));
  exports.Set("allocatePages", Napi::Function::New<AllocatePages>(env, "allocatePages"));
  exports.Set("preparePages", Napi::Function::New<PreparePages>(env, "preparePages"));
}

}  // namespace kvtier
