/* libkvtier: the copies between an inference engine's memory, a CPU's or a GPU's, and a cache node's arena, behind a C ABI, for engines that are not
 * ours. It maps arenas, moves blocks both ways with their checksums on threads of its own, and knows nothing of sessions: offsets
 * and checksums come from and go to whoever speaks with the node (packages/connector/python).
 *
 *   kvtier_copy ─▶ queue of its direction ─▶ threads: pieces of whole blocks ─▶ kvtier_wait: ended ─▶ kvtier_take: sums, verdicts
 *                                                │ kvtier_abandon
 *                                                ▼
 *                                   quarantine: runs on, the arena stays mapped, kvtier_wait says when it has ended
 *
 * Invariants:
 * - No call but kvtier_wait and kvtier_close waits, and these no longer than they are told.
 * - After kvtier_wait has said that a job ended, nothing touches its blocks and slots any more; before it, they are the job's,
 *   abandoned or not.
 * - An arena stays mapped as long as a job uses it; queues are bounded.
 *   A load that a GPU does not end within its deadline may still read slots, into memory of ours: its blocks are free.
 * - No torch, no Python, no CUDA at link time: CUDA's driver is opened when the first layout of a GPU is made. One object for each
 *   platform.
 *
 * Calls may come from any thread. Numbers of things are above 0 and never used twice. What fails returns a status below 0, and
 * kvtier_last_error() says the line, of this thread's last failure. A process that was forked opens a client of its own.
 */
#ifndef KVTIER_H
#define KVTIER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVTIER_API __attribute__((visibility("default")))
#else
#define KVTIER_API
#endif

/* Of this header; a library of another version is not used. */
#define KVTIER_ABI 3

/* Statuses; the words are those of docs/errors.md. */
enum {
  KVTIER_CONFIG = -1,   /* an argument is not possible */
  KVTIER_SETUP = -2,    /* the system refuses something */
  KVTIER_PROTOCOL = -3, /* a file is not the arena that was announced */
  KVTIER_BUSY = -4,     /* a queue is full */
  KVTIER_UNKNOWN = -5   /* no such arena, layout or job; it may have ended */
};

typedef struct kvtier_client kvtier_client;

typedef struct kvtier_options {
  uint32_t load_threads;   /* arena to engine, and checks: a request waits for these; 1 to 64 */
  uint32_t store_threads;  /* engine to arena */
  uint32_t store_niceness; /* 0 to 19: how far these stand back */
  uint32_t max_jobs;       /* jobs that are known at a time, 1 to 1000000 */
  /* Of each wait for a GPU, 1 to 600000. What the engine has enqueued itself may take twelve times as long. */
  uint32_t device_deadline_ms;
} kvtier_options;

KVTIER_API uint32_t kvtier_abi(void);
KVTIER_API const char* kvtier_version(void);
/* "" before the first failure; valid until the thread's next failure. */
KVTIER_API const char* kvtier_last_error(void);
/* The width of the copying code that this CPU gets: "avx512", "avx2" or "sse2". */
KVTIER_API const char* kvtier_copy_code(void);

/* NULL: kvtier_last_error. */
KVTIER_API kvtier_client* kvtier_open(const kvtier_options* options);
/* Drops what waits, lets what runs end. 1: all is freed. 0: not after wait_us. Copies that still ran and what they use are left alone
 * for ever, and so is all where no thread can be had that frees it; what a GPU holds back is freed when it lets go of it. The client is
 * gone either way: a kvtier_wait that is under way says what it knows, and later calls are CONFIG. */
KVTIER_API int32_t kvtier_close(kvtier_client* client, int64_t wait_us);

/* An arena, by what the node says of it in Attached. lock_byte: 0, or the byte of the file beside the arena (its path + ".lock") that
 * this process holds a shared lock on as long as it is mapped, so that the node sees when the last copy has ended. Without such a file
 * SETUP. */
KVTIER_API int64_t kvtier_map(kvtier_client* client, const char* path, uint64_t bytes, uint64_t id, uint64_t lock_byte);
/* No new jobs; unmapped when the last one has ended. 1: it is unmapped now, 0: later. */
KVTIER_API int32_t kvtier_unmap(kvtier_client* client, int64_t arena);

/* Where one run of a payload lies in the engine's memory. Of block b, row r: [base + b * stride + r * row_stride, + row_bytes). */
typedef struct kvtier_part {
  uint64_t base;
  uint64_t stride;
  uint64_t rows;
  uint64_t row_stride;
  uint64_t row_bytes;
} kvtier_part;

/* A block's payload is its parts one after another, each row after row. Blocks are 0 to blocks - 1. The memory is the caller's, and
 * stays as long as the layout. */
KVTIER_API int64_t kvtier_layout(kvtier_client* client, const kvtier_part* parts, size_t count, uint64_t blocks);
/* Bytes of a payload, 0 for an unknown layout. */
KVTIER_API uint64_t kvtier_payload_bytes(kvtier_client* client, int64_t layout);
/* Jobs that have begun go on. A GPU's stages of copies are freed after them, by a thread. */
KVTIER_API int32_t kvtier_forget_layout(kvtier_client* client, int64_t layout);

/* The same in the memory of a GPU, by CUDA's number; addresses, strides and lengths are multiples of 16, a payload has at least 256
 * bytes. SETUP where there is no driver, no such GPU, or no room for the stages of copies: 16 MiB, or a payload that is larger, for each
 * thread. From now on arenas are pinned for that GPU, one after another, beside serving. */
KVTIER_API int64_t kvtier_device_layout(kvtier_client* client, int32_t device, const kvtier_part* parts, size_t count, uint64_t blocks);
/* Where the engine's stream (a CUstream; 0: the default one) stands now: copies that are given its number begin behind it, also behind a
 * step that takes longer than a copy may. Forget it when the jobs that need it have begun. */
KVTIER_API int64_t kvtier_mark(kvtier_client* client, int32_t device, void* stream);
KVTIER_API int32_t kvtier_forget_mark(kvtier_client* client, int64_t mark);
/* 1: the arena is pinned for that GPU. 0: not yet, copies go over a buffer. 2: the system refuses it, and copies go on over a buffer;
 * kvtier_last_error says why. */
KVTIER_API int32_t kvtier_pinning(kvtier_client* client, int64_t arena, int32_t device);
/* A few bytes of a GPU's memory, to look whether a layout is what it seems: 1, or SETUP when the device has not ended it in its
 * deadline. Waits. */
KVTIER_API int32_t kvtier_peek(kvtier_client* client, int32_t device, void* target, uint64_t address, size_t bytes);
KVTIER_API int32_t kvtier_poke(kvtier_client* client, int32_t device, uint64_t address, const void* source, size_t bytes);

/* Jobs. `after`: a mark, or 0; of a layout of the CPU's memory always 0. `offsets`: of payloads in the arena, as the node says them. All arrays are copied. A job's number, or a status. */

/* Of a block, what became of it. */
enum {
  KVTIER_BAD = 0,   /* its bytes were read, and have another sum */
  KVTIER_GOOD = 1,  /* copied, or checked; of a load with the sum that was expected */
  KVTIER_MISSED = 2 /* a GPU has not copied it in time: of its bytes nothing is known */
};

/* Arena to engine. sums: what is expected. What a block holds that is not good means nothing. */
KVTIER_API int64_t kvtier_load(kvtier_client* client, int64_t arena, int64_t layout, size_t count, const uint64_t* blocks,
                               const uint64_t* offsets, const uint64_t* sums, int64_t after);
/* Engine to arena; kvtier_take says the sums. */
KVTIER_API int64_t kvtier_store(kvtier_client* client, int64_t arena, int64_t layout, size_t count, const uint64_t* blocks,
                                const uint64_t* offsets, int64_t after);
/* Reads slots and compares; nothing is copied. */
KVTIER_API int64_t kvtier_check(kvtier_client* client, int64_t arena, uint64_t payload_bytes, size_t count,
                                const uint64_t* offsets, const uint64_t* sums);

/* 1: the job has ended. 0: not within wait_us, which may be 0, or before the client was closed. */
KVTIER_API int32_t kvtier_wait(kvtier_client* client, int64_t job, int64_t wait_us);
/* What an ended job found, `count` as it was begun with, and forgets the job; BUSY while it runs. sums and good may be NULL. */
KVTIER_API int32_t kvtier_take(kvtier_client* client, int64_t job, uint64_t* sums, uint8_t* good, size_t count);
/* Nobody wants the result: no block is begun any more, and the job is forgotten when it has ended. 1: it has, and blocks and slots
 * are free. 0: it is in quarantine until kvtier_wait says 1 or UNKNOWN. */
KVTIER_API int32_t kvtier_abandon(kvtier_client* client, int64_t job);

typedef struct kvtier_counts {
  uint64_t arenas;          /* mapped, also those that are only kept by jobs */
  uint64_t layouts;
  uint64_t jobs;            /* known */
  uint64_t quarantined;     /* abandoned and not ended */
  uint64_t loaded_blocks, loaded_bytes;
  uint64_t stored_blocks, stored_bytes;
  uint64_t checked_blocks;
  uint64_t bad_blocks;      /* KVTIER_BAD, of loads and checks */
  uint64_t pinned_bytes;    /* of arenas, for each GPU */
  uint64_t pins_refused;    /* arenas that are not pinned and will not be */
  uint64_t bounced_bytes;   /* that went to or from a GPU over a buffer */
  uint64_t late_blocks;     /* that a GPU has not copied within its deadline */
  uint64_t hung;            /* copies whose end a GPU has not told */
  uint64_t standing;        /* pieces that are put aside until what the engine has enqueued has ended: it takes longer than the deadline */
} kvtier_counts;

KVTIER_API void kvtier_count(kvtier_client* client, kvtier_counts* counts);

#ifdef __cplusplus
}
#endif
#endif
