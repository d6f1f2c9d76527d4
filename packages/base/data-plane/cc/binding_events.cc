#include <memory>
#include <stdexcept>
#include <vector>

#include "background.h"
#include "binding.h"
#include "binding_pages.h"
#include "kv_events.h"

namespace kvtier {
namespace {

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
  return RunOnProcessors(info.Env(), work, [pages](Napi::Env env) { return Pages::Give(env, std::move(*pages)); });
}

void KeepPages(const Napi::CallbackInfo& info) { Pages::KeepMore(info[0].As<Napi::Number>().Int64Value()); }

}  // namespace

void RegisterEvents(Napi::Env env, Napi::Object exports) {
  exports.Set("encodeKvEvents", Napi::Function::New<EncodeEvents>(env, "encodeKvEvents"));
  exports.Set("decodeKvEvents", Napi::Function::New<DecodeEvents>(env, "decodeKvEvents"));
  exports.Set("allocatePages", Napi::Function::New<AllocatePages>(env, "allocatePages"));
  exports.Set("preparePages", Napi::Function::New<PreparePages>(env, "preparePages"));
  exports.Set("keepPages", Napi::Function::New<KeepPages>(env, "keepPages"));
}

}  // namespace kvtier
