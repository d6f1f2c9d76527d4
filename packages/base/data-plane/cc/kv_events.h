// KV event batches as msgpack, as vLLM writes them (packages/base/events/src/codec.ts says how), straight from the words in which a
// block pool notes its changes: no object and no string is made for an event. Format of a record, in 32-bit words:
//
//   removed   1, words of the record, group, words per hash, one hash or several
//   stored    2, words of the record, group, words per hash, hashes, tokens, block tokens, window or ~0, has a parent, kind,
//             parent if it has one, the hashes, the tokens
//   object    0, 2: the next of those that were encoded elsewhere
//
// A hash's words are its bytes as they lie in memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

struct KvEventFormat {
  bool array;        // the encoding before June 2026
  bool full_hashes;  // all bytes of a hash instead of its last eight as an integer
};

// Of a batch around its events.
struct KvEventBatch {
  double ts;
  int64_t rank;  // -1: nil
};

// Bytes written to `out`; 0 where it is too small. `kinds`: names of kinds of attention, each one byte of length and its text.
// Throws std::invalid_argument for records that are none.
size_t EncodeKvEvents(std::span<const uint32_t> words, uint32_t events, const KvEventBatch& batch, KvEventFormat format,
                      std::span<const uint8_t> kinds, const std::vector<std::span<const uint8_t>>& objects,
                      std::span<uint8_t> out);

// The other way: a batch as words, without an object for an event. What publishers of today write is read here; what is not of that form
// (fields in another order or beyond these, hits that are told again, numbers that are fractions, names that are not among `names`,
// what is no batch at all) is left to the decoder of objects, which knows all versions and says what is wrong. What is read here, that one reads, too, and equally.
//
//   batch     its words, events, rank or -1, 0, ts (a double); then a record for each event:
//   record    type (1 removed, 2 stored, 3 cleared), words of the record, medium, locality (places in `names` or -1), group or -1,
//             hashes, parents (0 or 1), tokens of a block, kind of attention (a place in `names` or -1), tokens of its window or
//             -1, 1 where an adapter or extra keys are part of the hashes; the hashes, the parent: low word, high word of its
//             integer form; then the ids of the tokens, if they are asked for
//
// Returns the words written to `out`; 0: it is too small; -1: not read here. `names`: each one byte of length and its text.
int64_t DecodeKvEvents(std::span<const uint8_t> payload, bool tokens, std::span<const uint8_t> names, std::span<int32_t> out);

}  // namespace kvtier
