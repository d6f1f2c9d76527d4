#pragma once
#include <napi.h>

namespace kvtier {

void RegisterExecutor(Napi::Env env, Napi::Object exports);
// Content digests of files, and the machine's limits for the benches (binding_tools.cc).
void RegisterTools(Napi::Env env, Napi::Object exports);

}  // namespace kvtier
