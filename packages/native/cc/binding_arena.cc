#include "binding.h"

namespace kvtier {

void RegisterArena(Napi::Env, Napi::Object) {}

}  // namespace kvtier
