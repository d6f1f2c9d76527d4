// Node-API face of identity: block hashes and one-shot digests. Mirrors the "identity" part of binding.ts.
#include "binding.h"
#include "object_header.h"

namespace kvtier {
namespace {

Napi::Value Xxh3_64(const Napi::CallbackInfo& info) {
  const auto bytes = info[0].As<Napi::Uint8Array>();
  return Napi::BigInt::New(info.Env(), static_cast<uint64_t>(XXH3_64bits(bytes.Data(), bytes.ByteLength())));
}

Napi::Value Xxh3_128(const Napi::CallbackInfo& info) {
  const auto bytes = info[0].As<Napi::Uint8Array>();
  auto out = Napi::Buffer<uint8_t>::New(info.Env(), 16);
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.Data(), bytes.ByteLength()));
  std::memcpy(out.Data(), canonical.digest, 16);
  return out;
}

}  // namespace

void RegisterIdentity(Napi::Env env, Napi::Object exports) {
  exports.Set("xxh3_128", Napi::Function::New<Xxh3_128>(env, "xxh3_128"));
  exports.Set("xxh3_64", Napi::Function::New<Xxh3_64>(env, "xxh3_64"));
}

}  // namespace kvtier
