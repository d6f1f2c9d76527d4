#pragma once
#include <napi.h>

namespace kvtier {

void RegisterIdentity(Napi::Env env, Napi::Object exports);
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
