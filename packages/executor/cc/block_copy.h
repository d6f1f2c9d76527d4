// A block's bytes between the KV pool and the shared arena, with their XXH3-64 (seed 0) on the way.
//
//   source (DRAM) --memcpy--> stage (16 KiB, stays in L1) --hash
//                                        `--streaming stores--> target (DRAM)
//
// Each byte is read from DRAM once, and streaming stores save reading the target's lines. The hash is taken of the stage,
// so it is the hash of the bytes that arrive, even if another process scribbles over the source meanwhile.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvtier {

uint64_t CopyAndHash(uint8_t* target, const uint8_t* source, size_t bytes);
// The same path without the hash.
void StreamCopy(uint8_t* target, const uint8_t* source, size_t bytes);

// A cache node's arena, mapped; unmapped with the last copy that uses it.
class ArenaMap {
 public:
  // Throws std::runtime_error("IO: ...") when the file is not that arena.
  ArenaMap(const std::string& path, uint64_t bytes, uint64_t id);
  ~ArenaMap();
  ArenaMap(const ArenaMap&) = delete;
  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace kvtier
