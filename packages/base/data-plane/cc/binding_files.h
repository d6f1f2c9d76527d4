// How the I/O queue's binding reaches the thread of a device's file system calls.
#pragma once
#include <napi.h>

#include <cstdint>
#include <memory>

#include "background.h"

namespace kvtier {

// Of what goes past the page cache: offsets, lengths and addresses are multiples of it.
inline constexpr uint64_t kPage = 4096;

// The queue of a files handle; throws when it was closed.
std::shared_ptr<WorkQueue> FilesOf(const Napi::Value& value);

}  // namespace kvtier
