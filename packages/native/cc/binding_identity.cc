#include "binding.h"

namespace kvtier {

void RegisterIdentity(Napi::Env, Napi::Object) {}

}  // namespace kvtier
