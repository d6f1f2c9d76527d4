#pragma once
#include <napi.h>

#include <cstdint>
#include <span>
#include <string>

namespace kvtier {

inline std::string TextOf(const Napi::Value& value) { return value.As<Napi::String>().Utf8Value(); }
inline double NumberOf(const Napi::Value& value) { return value.As<Napi::Number>().DoubleValue(); }
inline std::span<const uint8_t> BytesOf(const Napi::Value& value) {
  const auto array = value.As<Napi::Uint8Array>();
  return {array.Data(), array.ByteLength()};
}

void RegisterIdentity(Napi::Env env, Napi::Object exports);
void RegisterTokens(Napi::Env env, Napi::Object exports);
void RegisterEvents(Napi::Env env, Napi::Object exports);
void RegisterReceiver(Napi::Env env, Napi::Object exports);
void RegisterArena(Napi::Env env, Napi::Object exports);
void RegisterCodec(Napi::Env env, Napi::Object exports);
void RegisterFiles(Napi::Env env, Napi::Object exports);
void RegisterIo(Napi::Env env, Napi::Object exports);
void RegisterValues(Napi::Env env, Napi::Object exports);
void RegisterPeer(Napi::Env env, Napi::Object exports);
void RegisterProcess(Napi::Env env, Napi::Object exports);

}  // namespace kvtier
