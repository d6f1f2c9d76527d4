// Node-API face of byte planes: elements of `width` bytes (a bf16 has 2) taken apart into one plane for each byte of them,
// and put together again. Exponents of KV elements are alike, mantissas are noise: apart, the one compresses (after Blosc's
// shuffle filter). Mirrors the "codec" part of binding.ts.
#include <memory>
#include <vector>

#include "binding.h"
#include "binding_arena.h"

namespace kvtier {
namespace {

template <size_t kWidth>
void Split(const uint8_t* source, size_t count, uint8_t* planes) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < kWidth; ++byte) planes[byte * count + i] = source[i * kWidth + byte];
  }
}

template <size_t kWidth>
void Join(const std::vector<const uint8_t*>& planes, size_t count, uint8_t* target) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t byte = 0; byte < kWidth; ++byte) target[i * kWidth + byte] = planes[byte][i];
  }
}

uint64_t WidthOf(Napi::Env env, const Napi::Value& value) {
  const uint64_t width = WholeOf(env, NumberOf(value), "width");
  if (width != 2 && width != 4) throw Napi::RangeError::New(env, "elements are 2 or 4 bytes wide");
  return width;
}

Napi::Value ArenaSplitPlanes(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const uint64_t offset = WholeOf(env, NumberOf(info[1]), "arena offset");
  const uint64_t bytes = WholeOf(env, NumberOf(info[2]), "bytes");
  const uint64_t width = WidthOf(env, info[3]);
  if (!arena->Contains(offset, bytes)) throw Napi::RangeError::New(env, "offset and bytes are outside the arena");
  if (bytes % width != 0) throw Napi::RangeError::New(env, "bytes are whole elements");
  const auto planes = std::make_shared<std::vector<uint8_t>>(bytes);
  const auto work = [=] {
    const uint8_t* source = arena->base() + offset;
    if (width == 2) Split<2>(source, bytes / 2, planes->data());
    else Split<4>(source, bytes / 4, planes->data());
  };
  return RunOnProcessors(env, work, [planes](Napi::Env e) -> Napi::Value {
    auto* owner = new std::vector<uint8_t>(std::move(*planes));
    return Napi::Buffer<uint8_t>::New(
        e, owner->data(), owner->size(), [](Napi::Env, uint8_t*, std::vector<uint8_t>* kept) { delete kept; }, owner);
  });
}

Napi::Value ArenaJoinPlanes(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const uint64_t offset = WholeOf(env, NumberOf(info[1]), "arena offset");
  const auto given = info[2].As<Napi::Array>();
  const uint64_t width = given.Length();
  if (width != 2 && width != 4) throw Napi::RangeError::New(env, "elements are 2 or 4 bytes wide");
  std::vector<const uint8_t*> planes;
  size_t count = 0;
  for (uint32_t i = 0; i < width; ++i) {
    const auto plane = given.Get(i).As<Napi::Uint8Array>();
    if (i > 0 && plane.ByteLength() != count) throw Napi::RangeError::New(env, "planes are of one length");
    count = plane.ByteLength();
    planes.push_back(plane.Data());
  }
  if (!arena->Contains(offset, count * width)) throw Napi::RangeError::New(env, "offset and bytes are outside the arena");
  // The planes stay alive, and where they are, while JavaScript's objects do.
  const auto kept = std::make_shared<Napi::ObjectReference>(Napi::Persistent(given.As<Napi::Object>()));
  const auto work = [=] {
    uint8_t* target = arena->base() + offset;
    if (width == 2) Join<2>(planes, count, target);
    else Join<4>(planes, count, target);
  };
  return RunOnProcessors(env, work, [kept](Napi::Env e) -> Napi::Value {
    kept->Reset();
    return e.Undefined();
  });
}

}  // namespace

void RegisterCodec(Napi::Env env, Napi::Object exports) {
  exports["arenaSplitPlanes"] = Napi::Function::New(env, ArenaSplitPlanes);
  exports["arenaJoinPlanes"] = Napi::Function::New(env, ArenaJoinPlanes);
}

}  // namespace kvtier
