// Node-API face of the arena. Mirrors the "arena" part of binding.ts, in its order. Every offset is checked here against the
// arena: a wrong one is an exception, never a wild pointer.
#include "binding_arena.h"

#include <vector>

#include "binding.h"
#include "object_header.h"
#include "xxh3.h"

namespace kvtier {
namespace {

// What JavaScript holds. Empty after arenaClose; the mapping goes with its last user (an I/O queue, a copy in flight).
struct ArenaBox {
  std::shared_ptr<Arena> arena;
};

Napi::Value Box(Napi::Env env, std::shared_ptr<Arena> arena) {
  return Napi::External<ArenaBox>::New(env, new ArenaBox{std::move(arena)},
                                       [](Napi::Env, ArenaBox* box) { delete box; });
}

template <typename Function>
auto Guard(Napi::Env env, Function function) {
  try {
    return function();
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(env, error.what());
  }
}

uint64_t OffsetOf(Napi::Env env, const Arena& arena, double value, uint64_t bytes) {
  const uint64_t offset = WholeOf(env, value, "arena offset");
  if (!arena.Contains(offset, bytes)) throw Napi::RangeError::New(env, "offset and bytes are outside the arena");
  return offset;
}

std::vector<uint64_t> OffsetsOf(Napi::Env env, const Arena& arena, const Napi::Value& value, uint64_t bytes) {
  const auto array = value.As<Napi::Float64Array>();
  std::vector<uint64_t> offsets(array.ElementLength());
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = OffsetOf(env, arena, array[i], bytes);
  return offsets;
}

Napi::Value ArenaCreate(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[0]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[1]), "bytes");
  const uint64_t threads = WholeOf(env, NumberOf(info[2]), "threads");
  return Box(env, Guard(env, [&] { return Arena::Create(path, bytes, static_cast<unsigned>(threads)); }));
}

Napi::Value ArenaOpen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string path = TextOf(info[0]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[1]), "bytes");
  bool lossless = false;
  const uint64_t id = info[2].As<Napi::BigInt>().Uint64Value(&lossless);
  return Box(env, Guard(env, [&] { return Arena::Open(path, bytes, id); }));
}

Napi::Value ArenaId(const Napi::CallbackInfo& info) {
  return Napi::BigInt::New(info.Env(), ArenaOf(info[0])->id());
}

void ArenaClose(const Napi::CallbackInfo& info) { info[0].As<Napi::External<ArenaBox>>().Data()->arena.reset(); }

void ArenaWrite(const Napi::CallbackInfo& info) {
  const auto arena = ArenaOf(info[0]);
  const auto bytes = info[2].As<Napi::Uint8Array>();
  const uint64_t offset = OffsetOf(info.Env(), *arena, NumberOf(info[1]), bytes.ByteLength());
  std::memcpy(arena->base() + offset, bytes.Data(), bytes.ByteLength());
}

Napi::Value ArenaRead(const Napi::CallbackInfo& info) {
  const auto arena = ArenaOf(info[0]);
  const uint64_t bytes = WholeOf(info.Env(), NumberOf(info[2]), "bytes");
  const uint64_t offset = OffsetOf(info.Env(), *arena, NumberOf(info[1]), bytes);
  return Napi::Buffer<uint8_t>::Copy(info.Env(), arena->base() + offset, bytes);
}

// The array keeps the mapping alive, as JavaScript may hold it longer than the arena is open.
Napi::Value ArenaView(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto arena = ArenaOf(info[0]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[2]), "bytes");
  const uint64_t offset = OffsetOf(env, *arena, NumberOf(info[1]), bytes);
  auto* base = arena->base() + offset;
  auto* owner = new std::shared_ptr<Arena>(std::move(arena));
  return Napi::Buffer<uint8_t>::New(
      env, base, bytes, [](Napi::Env, uint8_t*, std::shared_ptr<Arena>* kept) { delete kept; }, owner);
}

Napi::Value ArenaVerify(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const auto slots = OffsetsOf(env, *arena, info[1], kHeaderBytes);
  const auto given = info[2].As<Napi::Float64Array>();
  const auto names = info[3].As<Napi::Uint8Array>();
  if (given.ElementLength() != slots.size()) throw Napi::RangeError::New(env, "arenaVerify: bytes for each slot");
  if (names.ByteLength() != slots.size() * 64) throw Napi::RangeError::New(env, "64 bytes of identity a slot");
  std::vector<uint64_t> sizes(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    sizes[i] = WholeOf(env, given[i], "bytes");
    OffsetOf(env, *arena, static_cast<double>(slots[i]), sizes[i]);
  }
  const std::vector<uint8_t> identities(names.Data(), names.Data() + names.ByteLength());
  const auto faults = std::make_shared<std::vector<uint8_t>>(slots.size());
  const auto work = [arena, slots, sizes, identities, faults] {
    for (size_t i = 0; i < slots.size(); ++i) {
      ObjectHeader header;
      const uint8_t* identity = identities.data() + i * 64;
      (*faults)[i] = static_cast<uint8_t>(
          VerifyObject(arena->base() + slots[i], sizes[i], identity, identity + 32, &header));
    }
  };
  return RunOnProcessors(env, work, [faults](Napi::Env e) -> Napi::Value {
    auto out = Napi::Uint8Array::New(e, faults->size());
    std::copy(faults->begin(), faults->end(), out.Data());
    return out;
  });
}

Napi::Value ArenaCopy(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[3]), "bytes");
  const auto sources = OffsetsOf(env, *arena, info[1], bytes);
  const auto targets = OffsetsOf(env, *arena, info[2], bytes);
  if (sources.size() != targets.size()) throw Napi::RangeError::New(env, "arenaCopy: one target for each source");
  const auto work = [arena, sources, targets, bytes] {
    for (size_t i = 0; i < sources.size(); ++i) {
      std::memmove(arena->base() + targets[i], arena->base() + sources[i], bytes);
    }
  };
  return RunOnProcessors(env, work, [](Napi::Env e) { return e.Undefined(); });
}

Napi::Value ArenaChecksum(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const uint64_t bytes = WholeOf(env, NumberOf(info[2]), "bytes");
  const auto offsets = OffsetsOf(env, *arena, info[1], bytes);
  const auto sums = std::make_shared<std::vector<uint64_t>>(offsets.size());
  const auto work = [arena, offsets, bytes, sums] {
    for (size_t i = 0; i < offsets.size(); ++i) (*sums)[i] = XXH3_64bits(arena->base() + offsets[i], bytes);
  };
  return RunOnProcessors(env, work, [sums](Napi::Env e) -> Napi::Value {
    auto out = Napi::BigUint64Array::New(e, sums->size());
    std::copy(sums->begin(), sums->end(), out.Data());
    return out;
  });
}

Napi::Value ArenaObjects(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto arena = ArenaOf(info[0]);
  const auto slots = OffsetsOf(env, *arena, info[1], kHeaderBytes);
  const auto identities = info[2].As<Napi::Uint8Array>();
  if (identities.ByteLength() != slots.size() * 64) throw Napi::RangeError::New(env, "64 bytes of identity a slot");
  auto out = Napi::Float64Array::New(env, slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    ObjectHeader header;
    const uint8_t* identity = identities.Data() + i * 64;
    const bool sound = DecodeHeader(arena->base() + slots[i], &header) == HeaderFault::kNone &&
                       std::memcmp(header.namespaceDigest.data(), identity, 32) == 0 &&
                       std::memcmp(header.hash.data(), identity + 32, 32) == 0 &&
                       arena->Contains(slots[i], SlotBytesFor(header.payloadBytes));
    out[i] = sound ? static_cast<double>(SlotBytesFor(header.payloadBytes)) : 0;
  }
  return out;
}

}  // namespace

std::shared_ptr<Arena> ArenaOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not an arena handle");
  auto arena = value.As<Napi::External<ArenaBox>>().Data()->arena;
  if (!arena) throw Napi::Error::New(value.Env(), "the arena is closed");
  return arena;
}

void RegisterArena(Napi::Env env, Napi::Object exports) {
  exports["arenaCreate"] = Napi::Function::New(env, ArenaCreate);
  exports["arenaOpen"] = Napi::Function::New(env, ArenaOpen);
  exports["arenaId"] = Napi::Function::New(env, ArenaId);
  exports["arenaClose"] = Napi::Function::New(env, ArenaClose);
  exports["arenaWrite"] = Napi::Function::New(env, ArenaWrite);
  exports["arenaRead"] = Napi::Function::New(env, ArenaRead);
  exports["arenaView"] = Napi::Function::New(env, ArenaView);
  exports["arenaVerify"] = Napi::Function::New(env, ArenaVerify);
  exports["arenaCopy"] = Napi::Function::New(env, ArenaCopy);
  exports["arenaChecksum"] = Napi::Function::New(env, ArenaChecksum);
  exports["arenaObjects"] = Napi::Function::New(env, ArenaObjects);
}

}  // namespace kvtier
