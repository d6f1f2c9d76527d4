// Node-API face of the peer data plane. Mirrors the "peer" part of binding.ts, in its order. Every slot is checked here
// against the arena: a wrong one is an exception before anything was sent or awaited.
#include <map>

#include "binding.h"
#include "binding_arena.h"
#include "peer_loops.h"

namespace kvtier {
namespace {

// What JavaScript holds. Its thread-safe function does not keep the event loop alive: whoever waits has a deadline of its own.
struct PeerBox {
  std::shared_ptr<Arena> arena;
  std::unique_ptr<PeerLoops> loops;
  Napi::ThreadSafeFunction callback;
  Napi::FunctionReference onEvents;
  bool closing = false;  // JavaScript may not use it any more
  bool closed = false;   // nothing of it is left

  ~PeerBox() {
    if (closed) return;
    loops->Close();
    callback.Release();
  }

  void Deliver(Napi::Env env) {
    const auto events = loops->Take();
    if (events.empty()) return;
    size_t requestCount = 0;
    for (const auto& event : events) requestCount += event.kind == PeerEventKind::kRequest;
    auto rows = Napi::Float64Array::New(env, events.size() * 4);
    auto identities = Napi::Buffer<uint8_t>::New(env, requestCount * 64);
    size_t request = 0;
    for (size_t i = 0; i < events.size(); ++i) {
      double* row = rows.Data() + i * 4;
      row[0] = static_cast<double>(events[i].kind);
      row[1] = events[i].a;
      row[2] = events[i].b;
      row[3] = events[i].c;
      if (events[i].kind != PeerEventKind::kRequest) continue;
      std::memcpy(identities.Data() + request++ * 64, events[i].identity.data(), 64);
    }
    onEvents.Call({rows, identities});
  }
};
using PeerHandle = std::shared_ptr<PeerBox>;

PeerHandle PeerOf(const Napi::Value& value) {
  if (!value.IsExternal()) throw Napi::TypeError::New(value.Env(), "not a peer loops");
  const PeerHandle box = *value.As<Napi::External<PeerHandle>>().Data();
  if (box->closing) throw Napi::Error::New(value.Env(), "the peer loops is closed");
  return box;
}

template <size_t kBytes>
std::array<uint8_t, kBytes> ArrayOf(const Napi::Value& value) {
  const auto given = value.As<Napi::Uint8Array>();
  if (given.ByteLength() != kBytes) throw Napi::RangeError::New(value.Env(), std::to_string(kBytes) + " bytes");
  std::array<uint8_t, kBytes> bytes;
  std::memcpy(bytes.data(), given.Data(), kBytes);
  return bytes;
}

uint16_t PortOf(const Napi::Value& value) {
  const uint64_t port = WholeOf(value.Env(), NumberOf(value), "port");
  if (port > 65535) throw Napi::RangeError::New(value.Env(), "port");
  return static_cast<uint16_t>(port);
}

Napi::Value PeerOpen(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const auto given = info[1].As<Napi::Object>();
  PeerOptions options{};
  options.threads = static_cast<unsigned>(WholeOf(env, NumberOf(given.Get("threads")), "threads"));
  options.tls = given.Get("tls").As<Napi::Boolean>().Value();
  options.maxConnections =
      static_cast<unsigned>(WholeOf(env, NumberOf(given.Get("maxConnections")), "maxConnections"));
  options.maxStrangers = static_cast<unsigned>(WholeOf(env, NumberOf(given.Get("maxStrangers")), "maxStrangers"));
  options.stallMs = WholeOf(env, NumberOf(given.Get("stallMs")), "stallMs");
  if (options.threads < 1 || options.threads > 16) throw Napi::RangeError::New(env, "threads is 1 to 16");
  const auto box = std::make_shared<PeerBox>();
  box->arena = ArenaOf(info[0]);
  box->onEvents = Napi::Persistent(info[2].As<Napi::Function>());
  box->callback = Napi::ThreadSafeFunction::New(env, info[2].As<Napi::Function>(), "kvtier peer", 0, 1);
  // The call may run after the box is gone: it looks first.
  const auto wake = [weak = std::weak_ptr(box), callback = box->callback] {
    auto* target = new std::weak_ptr(weak);
    const auto deliver = [](Napi::Env e, Napi::Function, std::weak_ptr<PeerBox>* waiting) {
      const PeerHandle owner = waiting->lock();
      delete waiting;
      if (owner && !owner->closed && e != nullptr) owner->Deliver(e);
    };
    if (callback.NonBlockingCall(target, deliver) != napi_ok) delete target;
  };
  try {
    box->loops = std::make_unique<PeerLoops>(box->arena, options, wake);
  } catch (const std::exception& error) {
    box->closing = box->closed = true;
    box->callback.Release();
    throw Napi::Error::New(env, error.what());
  }
  box->callback.Unref(env);
  return Napi::External<PeerHandle>::New(env, new PeerHandle(box), [](Napi::Env, PeerHandle* handle) { delete handle; });
}

Napi::Value PeerListen(const Napi::CallbackInfo& info) {
  try {
    return Napi::Number::New(info.Env(), PeerOf(info[0])->loops->Listen(TextOf(info[1]), PortOf(info[2])));
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

void PeerAllow(const Napi::CallbackInfo& info) {
  PeerOf(info[0])->loops->sessions().Allow(ArrayOf<16>(info[1]), ArrayOf<32>(info[2]));
}

void PeerRevoke(const Napi::CallbackInfo& info) { PeerOf(info[0])->loops->Revoke(ArrayOf<16>(info[1])); }

Napi::Value PeerConnect(const Napi::CallbackInfo& info) {
  try {
    const uint64_t number = PeerOf(info[0])->loops->Connect(TextOf(info[1]), PortOf(info[2]), ArrayOf<16>(info[3]),
                                                            ArrayOf<32>(info[4]));
    return Napi::Number::New(info.Env(), static_cast<double>(number));
  } catch (const std::runtime_error& error) {
    throw Napi::Error::New(info.Env(), error.what());
  }
}

void PeerDisconnect(const Napi::CallbackInfo& info) {
  PeerOf(info[0])->loops->Disconnect(WholeOf(info.Env(), NumberOf(info[1]), "connection"));
}

void PeerFetchRows(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const PeerHandle box = PeerOf(info[0]);
  const uint64_t connection = WholeOf(env, NumberOf(info[1]), "connection");
  const auto numbers = info[2].As<Napi::Float64Array>();
  const auto identities = info[3].As<Napi::Uint8Array>();
  const size_t count = numbers.ElementLength() / 5;
  if (numbers.ElementLength() != count * 5) throw Napi::RangeError::New(env, "rows of 5 numbers");
  const size_t identityCount = identities.ByteLength() / 64;
  std::vector<PeerFetch> rows(count);
  for (size_t i = 0; i < count; ++i) {
    const double* given = numbers.Data() + i * 5;
    rows[i].tag = WholeOf(env, given[0], "tag");
    rows[i].slot = WholeOf(env, given[1], "slot");
    rows[i].slotBytes = WholeOf(env, given[2], "slotBytes");
    rows[i].limitMs = WholeOf(env, given[3], "limitMs");
    if (!box->arena->Contains(rows[i].slot, rows[i].slotBytes)) throw Napi::RangeError::New(env, "slot outside the arena");
    const uint64_t index = WholeOf(env, given[4], "index");
    if (index >= identityCount) throw Napi::RangeError::New(env, "index outside the identities");
    std::memcpy(rows[i].identity.data(), identities.Data() + index * 64, 64);
  }
  if (count > 0) box->loops->Fetch(connection, std::move(rows));
}

void PeerAnswerRows(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const PeerHandle box = PeerOf(info[0]);
  const auto numbers = info[1].As<Napi::Float64Array>();
  const size_t count = numbers.ElementLength() / 5;
  if (numbers.ElementLength() != count * 5) throw Napi::RangeError::New(env, "rows of 5 numbers");
  std::map<uint64_t, std::vector<PeerAnswerRow>> byConnection;
  for (size_t i = 0; i < count; ++i) {
    const double* given = numbers.Data() + i * 5;
    PeerAnswerRow row{};
    row.token = WholeOf(env, given[0], "token");
    const uint64_t status = WholeOf(env, given[2], "status");
    if (status > 2) throw Napi::RangeError::New(env, "status");
    row.status = static_cast<PeerStatus>(status);
    row.slot = WholeOf(env, given[3], "slot");
    row.objectBytes = WholeOf(env, given[4], "objectBytes");
    if (status == 0 && !box->arena->Contains(row.slot, row.objectBytes)) {
      throw Napi::RangeError::New(env, "slot outside the arena");
    }
    byConnection[WholeOf(env, given[1], "connection")].push_back(row);
  }
  for (auto& [connection, rows] : byConnection) box->loops->Answer(connection, std::move(rows));
}

Napi::Value PeerClose(const Napi::CallbackInfo& info) {
  const PeerHandle box = PeerOf(info[0]);
  box->closing = true;
  return RunApart(
      info.Env(), [box] { box->loops->Close(); },
      [box](Napi::Env env) -> Napi::Value {
        box->Deliver(env);  // what ended last
        box->closed = true;
        box->callback.Release();
        box->loops.reset();  // now, not when the handle is collected: the mapping goes with the last user
        box->arena.reset();
        return env.Undefined();
      });
}

}  // namespace

void RegisterPeer(Napi::Env env, Napi::Object exports) {
  exports["peerOpen"] = Napi::Function::New(env, PeerOpen);
  exports["peerListen"] = Napi::Function::New(env, PeerListen);
  exports["peerAllow"] = Napi::Function::New(env, PeerAllow);
  exports["peerRevoke"] = Napi::Function::New(env, PeerRevoke);
  exports["peerConnect"] = Napi::Function::New(env, PeerConnect);
  exports["peerDisconnect"] = Napi::Function::New(env, PeerDisconnect);
  exports["peerFetch"] = Napi::Function::New(env, PeerFetchRows);
  exports["peerAnswer"] = Napi::Function::New(env, PeerAnswerRows);
  exports["peerClose"] = Napi::Function::New(env, PeerClose);
}

}  // namespace kvtier
