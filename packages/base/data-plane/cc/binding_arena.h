// How the other bindings reach the arena behind a handle, and how they take numbers from JavaScript.
#pragma once
#include <napi.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "arena.h"
#include "background.h"

namespace kvtier {

// The arena of a handle; throws when it was closed. Whoever keeps the pointer keeps the mapping.
std::shared_ptr<Arena> ArenaOf(const Napi::Value& value);

// A JavaScript number as an offset or a count: whole, not negative, exact. Throws RangeError naming `what`.
inline uint64_t WholeOf(Napi::Env env, double value, const char* what) {
  if (!(value >= 0 && value <= 9007199254740991.0) || std::floor(value) != value) {
    throw Napi::RangeError::New(env, std::string(what) + " is not a whole number");
  }
  return static_cast<uint64_t>(value);
}

}  // namespace kvtier
