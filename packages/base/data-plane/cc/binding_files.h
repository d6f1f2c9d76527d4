// How the I/O queue's binding reaches the thread of a device's file system calls.
#pragma once
#include <napi.h>

#include <memory>

#include "background.h"

namespace kvtier {

// The queue of a files handle; throws when it was closed.
std::shared_ptr<WorkQueue> FilesOf(const Napi::Value& value);

}  // namespace kvtier
