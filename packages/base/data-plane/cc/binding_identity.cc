// Node-API face of identity: block hashes and one-shot digests. Mirrors the "identity" part of binding.ts, in its order.
// TypeScript validates; what is checked again here is only what would otherwise write outside a buffer.
#include <vector>

#include "binding.h"
#include "hash_blocks.h"
#include "object_header.h"
#include "sha256.h"

namespace kvtier {
namespace {

using Bytes = std::span<const uint8_t>;

// hashBlocks(algorithm, parent, tokens, blockTokens, extras, out): count
Napi::Value HashBlocksOf(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const uint32_t number = info[0].As<Napi::Number>().Uint32Value();
  if (number > 3) throw Napi::RangeError::New(env, "hashBlocks: algorithm is 0 to 3");
  const auto algorithm = static_cast<HashAlgorithm>(number);
  const size_t hashBytes = HashBytesOf(algorithm);
  const Bytes parent = BytesOf(info[1]);
  const auto tokens = info[2].As<Napi::TypedArray>();
  const size_t blockTokens = info[3].As<Napi::Number>().Uint32Value();
  auto out = info[5].As<Napi::Uint8Array>();

  const bool wide = tokens.TypedArrayType() == napi_biguint64_array;
  if (!wide && tokens.TypedArrayType() != napi_uint32_array) {
    throw Napi::TypeError::New(env, "hashBlocks: tokens is a Uint32Array or a BigUint64Array");
  }
  if (blockTokens == 0 || tokens.ElementLength() % blockTokens != 0) {
    throw Napi::RangeError::New(env, "hashBlocks: tokens is not a whole number of blocks");
  }
  const size_t count = tokens.ElementLength() / blockTokens;
  if (parent.size() != hashBytes) throw Napi::RangeError::New(env, "hashBlocks: parent has another length");
  if (out.ByteLength() < count * hashBytes) throw Napi::RangeError::New(env, "hashBlocks: out is too short");

  std::vector<Bytes> extras;
  if (!info[4].IsNull()) {
    const auto array = info[4].As<Napi::Array>();
    if (array.Length() != count) throw Napi::RangeError::New(env, "hashBlocks: one entry of extras per block");
    extras.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
      const Napi::HandleScope scope(env);
      const Napi::Value extra = array[i];
      if (!extra.IsNull()) extras[i] = BytesOf(extra);
    }
  }
  if (wide) {
    const uint64_t* ids = info[2].As<Napi::BigUint64Array>().Data();
    HashBlocks(algorithm, parent.data(), ids, count, blockTokens, extras, out.Data());
  } else {
    const uint32_t* ids = info[2].As<Napi::Uint32Array>().Data();
    HashBlocks(algorithm, parent.data(), ids, count, blockTokens, extras, out.Data());
  }
  return Napi::Number::New(env, static_cast<double>(count));
}

Napi::Value Sha256Of(const Napi::CallbackInfo& info) {
  const Bytes bytes = BytesOf(info[0]);
  auto out = Napi::Buffer<uint8_t>::New(info.Env(), 32);
  Sha256(bytes.data(), bytes.size(), out.Data());
  return out;
}

Napi::Value Xxh3_128(const Napi::CallbackInfo& info) {
  const Bytes bytes = BytesOf(info[0]);
  auto out = Napi::Buffer<uint8_t>::New(info.Env(), 16);
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  std::memcpy(out.Data(), canonical.digest, 16);
  return out;
}

Napi::Value Xxh3_64(const Napi::CallbackInfo& info) {
  const Bytes bytes = BytesOf(info[0]);
  return Napi::BigInt::New(info.Env(), static_cast<uint64_t>(XXH3_64bits(bytes.data(), bytes.size())));
}

}  // namespace

void RegisterIdentity(Napi::Env env, Napi::Object exports) {
  exports.Set("hashBlocks", Napi::Function::New<HashBlocksOf>(env, "hashBlocks"));
  exports.Set("sha256", Napi::Function::New<Sha256Of>(env, "sha256"));
  exports.Set("xxh3_128", Napi::Function::New<Xxh3_128>(env, "xxh3_128"));
  exports.Set("xxh3_64", Napi::Function::New<Xxh3_64>(env, "xxh3_64"));
}

}  // namespace kvtier
