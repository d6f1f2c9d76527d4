// Node-API face of token ids as they travel: in JSON, and as protobuf's packed uint32. Ten thousand of them are a prompt; a loop of
// JavaScript is compiled anew by each process, and takes several times as long until then. Mirrors the "tokens" part of binding.ts.
#include <cstring>
#include <memory>

#include "binding.h"

namespace kvtier {
namespace {

constexpr uint64_t kMostId = 0xffff'ffff;

bool IsJsonSpace(uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }
bool IsDigit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

// readIds(text, from): {ids, end} or null
Napi::Value ReadIds(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto text = BytesOf(info[0]);
  const double from = NumberOf(info[1]);
  if (!(from >= 0) || from > static_cast<double>(text.size())) return env.Null();
  const uint8_t* at = text.data() + static_cast<size_t>(from);
  const uint8_t* const end = text.data() + text.size();
  const auto* close = static_cast<const uint8_t*>(std::memchr(at, ']', static_cast<size_t>(end - at)));
  if (close == nullptr) return env.Null();
  size_t count = 1;
  for (const uint8_t* one = at; one < close; one++) count += *one == ',';
  auto ids = Napi::Uint32Array::New(env, count);
  uint32_t* to = ids.Data();
  for (size_t i = 0; i < count; i++) {
    while (IsJsonSpace(*at)) at++;
    const uint8_t* const first = at;
    uint64_t id = 0;
    for (; IsDigit(*at); at++) {
      id = 10 * id + (*at - '0');
      if (id > kMostId) return env.Null();
    }
    if (at == first || (*first == '0' && at - first > 1)) return env.Null();
    to[i] = static_cast<uint32_t>(id);
    while (IsJsonSpace(*at)) at++;
    if (*at != (i + 1 < count ? ',' : ']')) return env.Null();
    at++;
  }
  auto result = Napi::Object::New(env);
  result["ids"] = ids;
  result["end"] = Napi::Number::New(env, static_cast<double>(at - text.data()));
  return result;
}

size_t VarintBytes(uint32_t id) { return id < 1U << 7 ? 1 : id < 1U << 14 ? 2 : id < 1U << 21 ? 3 : id < 1U << 28 ? 4 : 5; }

Napi::Value PackIds(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  auto ids = info[0].As<Napi::Uint32Array>();
  if (ids.TypedArrayType() != napi_uint32_array) throw Napi::TypeError::New(env, "packIds: ids is a Uint32Array");
  size_t bytes = 0;
  for (size_t i = 0; i < ids.ElementLength(); i++) bytes += VarintBytes(ids.Data()[i]);
  auto out = Napi::Buffer<uint8_t>::New(env, bytes);
  uint8_t* to = out.Data();
  for (size_t i = 0; i < ids.ElementLength(); i++) {
    uint32_t id = ids.Data()[i];
    for (; id >= 1U << 7; id >>= 7) *to++ = static_cast<uint8_t>(id | 0x80);
    *to++ = static_cast<uint8_t>(id);
  }
  return out;
}

// Of numbers beyond 32 bits, and of what ends within one: null.
Napi::Value UnpackIds(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto bytes = BytesOf(info[0]);
  if (!bytes.empty() && bytes.back() >= 0x80) return env.Null();
  size_t count = 0;
  for (const uint8_t byte : bytes) count += byte < 0x80;
  auto ids = Napi::Uint32Array::New(env, count);
  uint32_t* to = ids.Data();
  for (size_t at = 0; at < bytes.size();) {
    uint64_t id = 0;
    int shift = 0;
    for (; bytes[at] >= 0x80; at++, shift += 7) {
      if (shift >= 28) return env.Null();
      id |= static_cast<uint64_t>(bytes[at] & 0x7f) << shift;
    }
    id |= static_cast<uint64_t>(bytes[at++]) << shift;
    if (id > kMostId) return env.Null();
    *to++ = static_cast<uint32_t>(id);
  }
  return ids;
}

}  // namespace

void RegisterTokens(Napi::Env env, Napi::Object exports) {
  exports["readIds"] = Napi::Function::New(env, ReadIds);
  exports["packIds"] = Napi::Function::New(env, PackIds);
  exports["unpackIds"] = Napi::Function::New(env, UnpackIds);
}

}  // namespace kvtier
