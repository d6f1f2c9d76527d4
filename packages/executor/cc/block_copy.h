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

namespace kvtier {

uint64_t CopyAndHash(uint8_t* target, const uint8_t* source, size_t bytes);

}  // namespace kvtier
