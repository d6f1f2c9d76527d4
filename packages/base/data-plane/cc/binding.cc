// The native data plane as one Node-API module. Each area registers its functions under the names of
// packages/base/data-plane/src/binding.ts; nothing is decided here.
#include "binding.h"

static Napi::Object Init(Napi::Env env, Napi::Object exports) {
  kvtier::RegisterIdentity(env, exports);
  kvtier::RegisterTokens(env, exports);
  kvtier::RegisterEvents(env, exports);
  kvtier::RegisterReceiver(env, exports);
  kvtier::RegisterArena(env, exports);
  kvtier::RegisterCodec(env, exports);
  kvtier::RegisterFiles(env, exports);
  kvtier::RegisterIo(env, exports);
  kvtier::RegisterPeer(env, exports);
  kvtier::RegisterValues(env, exports);
  kvtier::RegisterProcess(env, exports);
  return exports;
}

NODE_API_MODULE(kvtier_data_plane, Init)
