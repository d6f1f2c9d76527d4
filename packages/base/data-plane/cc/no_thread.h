// What is said where the system has no further thread to give. Depends on nothing of Node.
#pragma once
#include <exception>
#include <string>

namespace kvtier {

inline std::string NoThread(const std::exception& error) {
  return std::string("SETUP: no further thread can be had (") + error.what() + "); raise the limit of processes (pids.max, RLIMIT_NPROC)";
}

}  // namespace kvtier
