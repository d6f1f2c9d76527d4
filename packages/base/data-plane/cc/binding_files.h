// What the bindings of files (binding_io.cc) and of calls to a device's file system (binding_files.cc) have of each other.
#pragma once
#include <napi.h>

#include <cstdint>
#include <memory>
#include <string>

#include "background.h"

namespace kvtier {

// Of what goes past the page cache: offsets, lengths and addresses are multiples of it.
inline constexpr uint64_t kPage = 4096;

// The queue of a files handle; throws when it was closed.
std::shared_ptr<WorkQueue> FilesOf(const Napi::Value& value);

// The file at `path` (made 0600 where there is none), open and locked (flock). Throws SystemFailure, or runtime_error "LOCKED: ...".
int OpenLocked(const std::string& path);
// The lock as JavaScript has it, until `unlock`. On JavaScript's thread.
Napi::Value KeepLock(Napi::Env env, int fd);

}  // namespace kvtier
