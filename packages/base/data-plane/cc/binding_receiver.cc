// Node-API face of the receiver of KV events: each has a thread of its own, which waits where nobody waits for it.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "background.h"
#include "binding.h"
#include "kv_event_receiver.h"

namespace kvtier {
namespace {

struct ReceiverBox {
  explicit ReceiverBox(const EventSource& source) : receiver(std::make_shared<KvEventReceiver>(source)) {}
  ~ReceiverBox() { Close(); }
  // The socket is closed where it is used, when that has ended.
  void Close() {
    if (!receiver) return;
    words = {};
    receiver->End();
    thread.Push([last = std::move(receiver)]() mutable { last.reset(); });
    receiver = nullptr;
  }
  std::shared_ptr<KvEventReceiver> receiver;
  std::span<const int32_t> words;  // of the burst told last
  WorkQueue thread{1};
};
using ReceiverHandle = std::shared_ptr<ReceiverBox>;

Napi::Value Open(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto options = info[0].As<Napi::Object>();
  EventSource source;
  source.endpoint = TextOf(options.Get("endpoint"));
  source.topic = TextOf(options.Get("topic"));
  source.high_water_mark = options.Get("highWaterMark").As<Napi::Number>().Int32Value();
  source.max_message_bytes = options.Get("maxMessageBytes").As<Napi::Number>().Int64Value();
  source.ipv6 = options.Get("ipv6").As<Napi::Boolean>().Value();
  source.heartbeat_ms = options.Get("heartbeatMs").As<Napi::Number>().Int32Value();
  source.server_key = TextOf(options.Get("serverKey"));
  source.public_key = TextOf(options.Get("publicKey"));
  source.secret_key = TextOf(options.Get("secretKey"));
  try {
    const auto box = std::make_shared<ReceiverBox>(source);
    return Napi::External<ReceiverHandle>::New(env, new ReceiverHandle(box), [](Napi::Env, ReceiverHandle* handle) { delete handle; });
  } catch (const std::invalid_argument& error) {
    throw Napi::RangeError::New(env, error.what());
  } catch (const std::exception& error) {
    throw Napi::Error::New(env, error.what());
  }
}

ReceiverHandle ReceiverOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not a receiver of KV events");
  return *value.As<Napi::External<ReceiverHandle>>().Data();
}

// `words`: where those of the burst stand until the next one is asked for.
Napi::Value Told(Napi::Env env, const EventBurst& burst, std::span<const int32_t>& words) {
  if (burst.ended) return env.Null();
  words = burst.words;
  auto told = Napi::Object::New(env);
  told["wordCount"] = Napi::Number::New(env, static_cast<double>(burst.words.size()));
  told["messages"] = Napi::Number::New(env, burst.messages);
  auto topics = Napi::Array::New(env, burst.topics.size());
  for (uint32_t i = 0; i < burst.topics.size(); ++i) topics[i] = Napi::String::New(env, burst.topics[i]);
  told["topics"] = topics;
  auto payloads = Napi::Array::New(env, burst.payloads.size());
  for (uint32_t i = 0; i < burst.payloads.size(); ++i) {
    payloads[i] = Napi::Buffer<uint8_t>::Copy(env, burst.payloads[i].data(), burst.payloads[i].size());
  }
  told["payloads"] = payloads;
  told["last"] = Napi::Buffer<uint8_t>::Copy(env, burst.last.data(), burst.last.size());
  told["foreign"] = Napi::Number::New(env, burst.foreign);
  told["disconnects"] = Napi::Number::New(env, burst.disconnects);
  told["handshakes"] = Napi::Number::New(env, burst.handshakes);
  told["connected"] = Napi::Boolean::New(env, burst.connected);
  return told;
}

Napi::Value Next(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const ReceiverHandle box = ReceiverOf(info[0]);
  if (!box->receiver) {
    const auto none = Napi::Promise::Deferred::New(env);
    none.Resolve(env.Null());
    return none.Promise();
  }
  const bool packed = !info[1].IsNull(), tokens = info[2].As<Napi::Boolean>().Value();
  std::vector<uint8_t> names;
  if (packed) {
    const auto given = info[1].As<Napi::Uint8Array>();
    names.assign(given.Data(), given.Data() + given.ByteLength());
  }
  const auto burst = std::make_shared<EventBurst>();
  const auto work = [receiver = box->receiver, burst, packed, tokens, names = std::move(names)] {
    *burst = receiver->Fill({packed, tokens, names});
  };
  box->words = {};
  // Closed meanwhile: the words are the receiver's, and may have ended with it.
  return RunOn(box->thread, env, work, [box, burst](Napi::Env e) { return box->receiver ? Told(e, *burst, box->words) : e.Null(); });
}

// Words of the last burst, as many as there are or as fit; 0 when it is closed.
Napi::Value Words(const Napi::CallbackInfo& info) {
  const ReceiverHandle box = ReceiverOf(info[0]);
  auto into = info[1].As<Napi::Int32Array>();
  const size_t count = std::min(into.ElementLength(), box->words.size());
  if (count > 0) memcpy(into.Data(), box->words.data(), count * sizeof(int32_t));
  return Napi::Number::New(info.Env(), static_cast<double>(count));
}

void Close(const Napi::CallbackInfo& info) { ReceiverOf(info[0])->Close(); }

}  // namespace

void RegisterReceiver(Napi::Env env, Napi::Object exports) {
  exports.Set("kvEventsOpen", Napi::Function::New<Open>(env, "kvEventsOpen"));
  exports.Set("kvEventsNext", Napi::Function::New<Next>(env, "kvEventsNext"));
  exports.Set("kvEventsWords", Napi::Function::New<Words>(env, "kvEventsWords"));
  exports.Set("kvEventsClose", Napi::Function::New<Close>(env, "kvEventsClose"));
}

}  // namespace kvtier
