// Serialisation of one block in the two forms of hash_blocks.h, written straight into a message buffer.
//
// The encoders of 32-bit ids are branch-free, because whether an id takes three bytes or five is a coin toss that the
// branch predictor loses: they store eight bytes and advance by the length. So the buffer needs 8 bytes of slack.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvtier {

inline uint8_t* PutBytes(uint8_t* at, const void* bytes, size_t count) {
  std::memcpy(at, bytes, count);
  return at + count;
}

inline size_t BitCount(uint64_t value) { return 64 - static_cast<size_t>(std::countl_zero(value)); }

// ---- CBOR -----------------------------------------------------------------------------------------------------------

struct Cbor {
  static constexpr size_t kParentOffset(size_t hashBytes) { return hashBytes < 24 ? 2 : 3; }
  static constexpr size_t kTokenBytesMax = 9;

  // Head of a major type with its argument in the shortest form.
  static uint8_t* PutHead(uint8_t* at, uint8_t major, uint64_t value) {
    const auto type = static_cast<uint8_t>(major << 5);
    if (value < 24) {
      *at = static_cast<uint8_t>(type | value);
      return at + 1;
    }
    // Argument bytes 1, 2, 4 or 8.
    const size_t bytes = std::bit_ceil((BitCount(value) + 7) / 8);
    *at = static_cast<uint8_t>(type | (24 + std::countr_zero(bytes)));
    const uint64_t big = __builtin_bswap64(value) >> (64 - 8 * bytes);
    return PutBytes(at + 1, &big, bytes);
  }

  static uint8_t* PutToken(uint8_t* at, uint64_t id) { return PutHead(at, 0, id); }

  static uint8_t* PutToken(uint8_t* at, uint32_t id) {
    struct Shape {
      uint8_t head, bytes;
    };
    // By the number of significant bits.
    static constexpr auto shapes = [] {
      std::array<Shape, 33> table{};
      for (size_t bits = 0; bits <= 32; ++bits) {
        table[bits] = bits <= 8 ? Shape{0x18, 1} : bits <= 16 ? Shape{0x19, 2} : Shape{0x1a, 4};
      }
      return table;
    }();
    Shape shape = shapes[BitCount(id)];
    if (id < 24) shape = Shape{0, 0};
    const uint64_t word = uint64_t{shape.head} << 56 | uint64_t{id} << (56 - 8 * shape.bytes);
    const uint64_t big = __builtin_bswap64(word);
    std::memcpy(at, &big, 8);
    return at + 1 + shape.bytes;
  }

  // The parent's bytes are left out: written later, at kParentOffset.
  template <class Token>
  static uint8_t* PutBlock(uint8_t* at, size_t hashBytes, const Token* tokens, size_t count,
                           std::span<const uint8_t> extra) {
    *at++ = 0x83;
    at = PutHead(at, 2, hashBytes) + hashBytes;
    at = PutHead(at, 4, count);
    for (size_t i = 0; i < count; ++i) at = PutToken(at, tokens[i]);
    if (!extra.empty()) return PutBytes(at, extra.data(), extra.size());
    *at = 0xf6;
    return at + 1;
  }
};

// ---- pickle, protocol 5 ---------------------------------------------------------------------------------------------

struct Pickle {
  static constexpr size_t kFrameOffset = 11;  // 80 05, 95 and the frame's length
  static constexpr size_t kParentOffset(size_t) { return kFrameOffset + 2; }
  static constexpr size_t kTokenBytesMax = 11;

  static uint8_t* PutToken(uint8_t* at, uint32_t id) {
    // BININT1 4B x · BININT2 4D xxxx · BININT 4A xxxxxxxx · LONG1 8A 05 xxxxxxxx 00, by the number of significant bits.
    struct Shape {
      uint32_t head;
      uint8_t shift, bytes;
    };
    static constexpr auto shapes = [] {
      std::array<Shape, 33> table{};
      for (size_t bits = 0; bits <= 32; ++bits) {
        table[bits] = bits <= 8    ? Shape{0x4b, 8, 2}
                      : bits <= 16 ? Shape{0x4d, 8, 3}
                      : bits <= 31 ? Shape{0x4a, 8, 5}
                                   : Shape{0x058a, 16, 7};
      }
      return table;
    }();
    const Shape& shape = shapes[BitCount(id)];
    const uint64_t word = shape.head | uint64_t{id} << shape.shift;
    std::memcpy(at, &word, 8);
    return at + shape.bytes;
  }

  static uint8_t* PutToken(uint8_t* at, uint64_t id) {
    if (id >> 32 == 0) return PutToken(at, static_cast<uint32_t>(id));
    // LONG1: little-endian two's complement in as few bytes as hold the sign bit too.
    const size_t bytes = BitCount(id) / 8 + 1;
    *at++ = 0x8a;
    *at++ = static_cast<uint8_t>(bytes);
    std::memcpy(at, &id, 8);
    at[8] = 0;
    return at + bytes;
  }

  template <class Token>
  static uint8_t* PutBlock(uint8_t* start, size_t hashBytes, const Token* tokens, size_t count,
                           std::span<const uint8_t> extra) {
    uint8_t* at = start + kFrameOffset;
    *at++ = 0x43;
    *at++ = static_cast<uint8_t>(hashBytes);
    at += hashBytes;
    *at++ = 0x94;
    if (count > 3) *at++ = 0x28;
    for (size_t i = 0; i < count; ++i) at = PutToken(at, tokens[i]);
    *at++ = static_cast<uint8_t>(count > 3 ? 0x74 : 0x84 + count);  // TUPLE, or TUPLE1 to TUPLE3
    *at++ = 0x94;
    if (extra.empty()) {
      *at++ = 0x4e;
    } else {
      at = PutBytes(at, extra.data(), extra.size());
    }
    *at++ = 0x87;
    *at++ = 0x94;
    *at++ = 0x2e;
    const uint64_t frameBytes = static_cast<uint64_t>(at - start) - kFrameOffset;
    start[0] = 0x80, start[1] = 0x05, start[2] = 0x95;
    std::memcpy(start + 3, &frameBytes, 8);
    return at;
  }
};

// An upper bound of one serialised block, padding of SHA-256 and the encoders' slack included.
template <class Form>
constexpr size_t MessageBytesMax(size_t blockTokens, size_t extraBytes) {
  return 64 + 9 + Form::kTokenBytesMax * blockTokens + extraBytes + 3 + 72;
}

}  // namespace kvtier
