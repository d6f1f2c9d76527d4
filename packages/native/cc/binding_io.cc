#include "binding.h"

namespace kvtier {

void RegisterIo(Napi::Env, Napi::Object) {}

}  // namespace kvtier
