// The kernels of copies, by names that a module has, too: gpu_driver.cc finds them in transfer.ptx, which is these sources as nvcc
// compiles them (npm run kernels:ptx), so that libkvtier needs neither nvcc nor CUDA's runtime.
#pragma once
#include <cstdint>

#include "../gpu/device.h"

#if defined(KVTIER_DRIVER)
#define KVTIER_KERNEL __attribute__((weak, visibility("hidden")))  // named, and never called by address
#else
#define KVTIER_KERNEL
#endif

extern "C" {

// `pieces` of `bytes`: source + source_offsets[i] to target + target_offsets[i]; streaming stores.
__global__ KVTIER_KERNEL void kvtier_gather_pieces(uint8_t* target, const uint8_t* source, const int64_t* target_offsets,
                                                   const int64_t* source_offsets, int64_t pieces, int64_t bytes);
// The same, and what was written stays in the cache.
__global__ KVTIER_KERNEL void kvtier_scatter_pieces(uint8_t* target, const uint8_t* source, const int64_t* target_offsets,
                                                    const int64_t* source_offsets, int64_t pieces, int64_t bytes);
__global__ KVTIER_KERNEL void kvtier_hash_blocks(uint64_t* sums, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks,
                                                 int64_t bytes);
__global__ KVTIER_KERNEL void kvtier_sum_rows(uint64_t* rows, const uint8_t* pool, const int64_t* pool_offsets, int64_t blocks, int64_t bytes);
__global__ KVTIER_KERNEL void kvtier_chain_rows(uint64_t* sums, const uint64_t* rows, const uint8_t* pool, const int64_t* pool_offsets,
                                                int64_t blocks, int64_t bytes);
// Both at once: whole blocks, hashed as they pass.
__global__ KVTIER_KERNEL void kvtier_export_blocks(uint64_t* sums, uint8_t* host, const uint8_t* pool, const int64_t* host_offsets,
                                                   const int64_t* pool_offsets, int64_t blocks, int64_t bytes);
__global__ KVTIER_KERNEL void kvtier_import_blocks(uint64_t* sums, uint8_t* pool, const uint8_t* host, const int64_t* pool_offsets,
                                                   const int64_t* host_offsets, int64_t blocks, int64_t bytes);

}  // extern "C"
