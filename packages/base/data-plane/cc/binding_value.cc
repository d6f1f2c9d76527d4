// Node-API face of the Redis data plane. Mirrors the "Redis values" part of binding.ts, in its order. Every slot is checked
// here against the arena: a wrong one is an exception before anything was sent.
#include "binding.h"
#include "binding_arena.h"
#include "piece_size.h"
#include "value_mover.h"
#include "object_header.h"

namespace kvtier {
namespace {

uint64_t WholeArgument(const Napi::CallbackInfo& info, size_t index, const char* what) {
  return WholeOf(info.Env(), NumberOf(info[index]), what);
}

// What JavaScript holds. Its thread-safe function does not keep the event loop alive: whoever waits has a deadline of its own.
struct ValueBox {
  std::unique_ptr<ValueMover> mover;
  Napi::ThreadSafeFunction callback;
  Napi::FunctionReference onEvent;

  ~ValueBox() { Close(); }

  void Close() {
    if (!mover) return;
    mover.reset();
    callback.Release();
  }

  void Deliver(Napi::Env env) {
    for (const auto& event : mover->Take()) {
      const Napi::HandleScope scope(env);
      std::string results;
      for (const MoveResult result : event.results) results += static_cast<char>('0' + static_cast<int>(result));
      onEvent.Call({Napi::Number::New(env, static_cast<int>(event.kind)), Napi::Number::New(env, event.number),
                    Napi::String::New(env, results), Napi::String::New(env, event.text)});
      if (!mover) return;  // closed meanwhile
    }
  }
};
using ValuesHandle = std::shared_ptr<ValueBox>;

ValuesHandle ValuesOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not an mover of Redis values");
  const ValuesHandle box = *value.As<Napi::External<ValuesHandle>>().Data();
  if (!box->mover) throw Napi::Error::New(value.Env(), "the mover of Redis values is closed");
  return box;
}

Napi::Value ValueOpen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto box = std::make_shared<ValueBox>();
  box->onEvent = Napi::Persistent(info[1].As<Napi::Function>());
  box->callback = Napi::ThreadSafeFunction::New(env, info[1].As<Napi::Function>(), "kvtier redis", 0, 1);
  // The call may run after the box is gone: it looks first.
  const auto wake = [weak = std::weak_ptr(box), callback = box->callback] {
    auto* target = new std::weak_ptr(weak);
    const auto deliver = [](Napi::Env e, Napi::Function, std::weak_ptr<ValueBox>* waiting) {
      const ValuesHandle owner = waiting->lock();
      delete waiting;
      if (owner && owner->mover && e != nullptr) owner->Deliver(e);
    };
    if (callback.NonBlockingCall(target, deliver) != napi_ok) delete target;
  };
  try {
    box->mover = std::make_unique<ValueMover>(ArenaOf(info[0]), wake);
  } catch (const std::runtime_error& error) {
    box->callback.Release();
    throw Napi::Error::New(env, error.what());
  }
  box->callback.Unref(env);
  return Napi::External<ValuesHandle>::New(env, new ValuesHandle(box), [](Napi::Env, ValuesHandle* handle) { delete handle; });
}

Napi::Value ValueServerOf(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  ValueServer server{};
  const auto login = BytesOf(info[1]);
  server.login.assign(login.begin(), login.end());
  server.loginReplies = static_cast<unsigned>(WholeArgument(info, 2, "loginReplies"));
  server.depth = static_cast<unsigned>(WholeArgument(info, 3, "depth"));
  server.pieceBytes = WholeArgument(info, 4, "pieceBytes");
  if (server.depth < 1 || server.pieceBytes < 1) throw Napi::RangeError::New(env, "depth and pieceBytes are 1 at least");
  return Napi::Number::New(env, static_cast<double>(ValuesOf(info[0])->mover->Open(server)));
}

Napi::Value ValueConnect(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const std::string host = info[2].As<Napi::String>().Utf8Value();
  const uint64_t port = WholeArgument(info, 3, "port");
  if (port > 65535) throw Napi::RangeError::New(env, "port");
  try {
    const ValuesHandle box = ValuesOf(info[0]);
    const uint64_t number = box->mover->Connect(WholeArgument(info, 1, "server"), host, static_cast<uint16_t>(port));
    return Napi::Number::New(env, static_cast<double>(number));
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(env, error.what());
  }
}

void MoveValues(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const ValuesHandle box = ValuesOf(info[0]);
  ValueGroup group{WholeArgument(info, 2, "tag"), !info[6].IsNull(), {}};
  const std::string base = info[3].As<Napi::String>().Utf8Value();
  const std::string ids = info[4].As<Napi::String>().Utf8Value();
  const auto rows = info[5].As<Napi::Float64Array>();
  const size_t count = rows.ElementLength() / 3;
  if (count < 1 || rows.ElementLength() != 3 * count) throw Napi::RangeError::New(env, "rows of three");
  const uint8_t* identities = nullptr;
  if (group.isGet) {
    const auto given = info[6].As<Napi::Uint8Array>();
    if (given.ByteLength() != 64 * count) throw Napi::RangeError::New(env, "64 bytes of identity for each value");
    identities = given.Data();
  }
  group.moves.resize(count);
  for (size_t i = 0, at = 0; i < count; ++i) {
    ValueMove& move = group.moves[i];
    const size_t end = std::min(ids.find(' ', at), ids.size());
    if (at >= end) throw Napi::RangeError::New(env, "an id for each value");
    move.keys = base + ids.substr(at, end - at) + ":";
    at = end + 1;
    move.slot = WholeOf(env, rows[3 * i], "slot");
    move.bytes = WholeOf(env, rows[3 * i + 1], "bytes");
    move.partBytes = WholeOf(env, rows[3 * i + 2], "partBytes");
    if (move.partBytes < 1) throw Napi::RangeError::New(env, "partBytes");
    if (move.bytes > 0 && (move.bytes < kHeaderBytes || !box->mover->arena().Contains(move.slot, move.bytes))) {
      throw Napi::RangeError::New(env, "slot outside the arena, or no room for a header");
    }
    if (identities != nullptr) std::memcpy(move.identity.data(), identities + 64 * i, 64);
  }
  box->mover->Move(WholeArgument(info, 1, "server"), std::move(group));
}

void ValueShare(const Napi::CallbackInfo& info) {
  ValuesOf(info[0])->mover->Share(WholeArgument(info, 1, "server"), info[2].As<Napi::Boolean>().Value());
}

Napi::Value ValuePieceAfter(const Napi::CallbackInfo& info) {
  const uint64_t bytes = WholeArgument(info, 0, "bytes");
  return Napi::Number::New(info.Env(), static_cast<double>(PieceSize::After(bytes, info[1].As<Napi::Number>().DoubleValue())));
}

void ValueExpire(const Napi::CallbackInfo& info) {
  ValuesOf(info[0])->mover->Expire(WholeArgument(info, 1, "server"), WholeArgument(info, 2, "tag"));
}

void ValueDisconnect(const Napi::CallbackInfo& info) {
  ValuesOf(info[0])->mover->Disconnect(WholeArgument(info, 1, "connection"));
}

void ValueShut(const Napi::CallbackInfo& info) { ValuesOf(info[0])->mover->Shut(WholeArgument(info, 1, "server")); }

void ValueClose(const Napi::CallbackInfo& info) { ValuesOf(info[0])->Close(); }

}  // namespace

void RegisterValues(Napi::Env env, Napi::Object exports) {
  exports["valuesOpen"] = Napi::Function::New(env, ValueOpen);
  exports["valuesServer"] = Napi::Function::New(env, ValueServerOf);
  exports["valuesConnect"] = Napi::Function::New(env, ValueConnect);
  exports["valuesMove"] = Napi::Function::New(env, MoveValues);
  exports["valuesShare"] = Napi::Function::New(env, ValueShare);
  exports["valuesPieceAfter"] = Napi::Function::New(env, ValuePieceAfter);
  exports["valuesExpire"] = Napi::Function::New(env, ValueExpire);
  exports["valuesDisconnect"] = Napi::Function::New(env, ValueDisconnect);
  exports["valuesShut"] = Napi::Function::New(env, ValueShut);
  exports["valuesClose"] = Napi::Function::New(env, ValueClose);
}

}  // namespace kvtier
