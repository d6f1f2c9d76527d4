#include "kv_events.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace kvtier {
namespace {

using namespace std::string_view_literals;

constexpr uint32_t kObject = 0, kRemoved = 1, kStored = 2;
constexpr uint32_t kRemovedHead = 4, kStoredHead = 10;
constexpr uint32_t kMaxHashWords = 8;
constexpr uint32_t kNoWindow = ~0u;
// No word becomes more than 5 bytes; the names around an event's are fewer than this.
constexpr size_t kBytesPerWord = 5, kBytesPerEvent = 320;

uint16_t BigEndian(uint16_t value) { return __builtin_bswap16(value); }
uint32_t BigEndian(uint32_t value) { return __builtin_bswap32(value); }
uint64_t BigEndian(uint64_t value) { return __builtin_bswap64(value); }

class Writer {
 public:
  explicit Writer(uint8_t* out) : at_(out) {}
  uint8_t* at() const { return at_; }

  void Raw(std::string_view bytes) {
    memcpy(at_, bytes.data(), bytes.size());
    at_ += bytes.size();
  }
  void Raw(std::span<const uint8_t> bytes) {
    memcpy(at_, bytes.data(), bytes.size());
    at_ += bytes.size();
  }
  void Byte(uint8_t byte) { *at_++ = byte; }
  void Nil() { Byte(0xc0); }
  void Text(std::string_view text) {  // shorter than 32
    Byte(static_cast<uint8_t>(0xa0 | text.size()));
    Raw(text);
  }
  void Integer(uint64_t value) {
    if (value < 0x80) {
      Byte(static_cast<uint8_t>(value));
    } else if (value < 0x100) {
      Byte(0xcc);
      Byte(static_cast<uint8_t>(value));
    } else if (value < 0x10000) {
      Big(0xcd, static_cast<uint16_t>(value));
    } else if (value < 0x100000000) {
      Big(0xce, static_cast<uint32_t>(value));
    } else {
      Big(0xcf, value);
    }
  }
  // As Integer, without branches, because ids of tokens are of any size. Writes 8 bytes, of which those after its own are void.
  void Token(uint32_t value) {
    constexpr uint8_t kHead[] = {0, 0xcc, 0xcd, 0xce}, kUnused[] = {24, 24, 16, 0}, kHeadBits[] = {0, 8, 8, 8}, kBytes[] = {1, 2, 3, 5};
    const unsigned size = (value >= 0x80) + (value >= 0x100) + (value >= 0x10000);
    const uint64_t bytes = kHead[size] | static_cast<uint64_t>(BigEndian(value) >> kUnused[size]) << kHeadBits[size];
    memcpy(at_, &bytes, sizeof bytes);
    at_ += kBytes[size];
  }
  void Float(double value) { Big(0xcb, std::bit_cast<uint64_t>(value)); }
  void Array(uint32_t count) {
    if (count < 0x10) {
      Byte(static_cast<uint8_t>(0x90 | count));
    } else if (count < 0x10000) {
      Big(0xdc, static_cast<uint16_t>(count));
    } else {
      Big(0xdd, count);
    }
  }
  void Map(uint8_t count) { Byte(0x80 | count); }  // fewer than 16

  void Hash(const uint32_t* words, uint32_t count, KvEventFormat format) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    const uint32_t size = count * 4;
    if (format.full_hashes) {
      Byte(0xc4);
      Byte(static_cast<uint8_t>(size));
      Raw(std::span(bytes, size));
      return;
    }
    uint64_t last;
    memcpy(&last, bytes + size - 8, 8);
    Integer(BigEndian(last));
  }

 private:
  template <class T>
  void Big(uint8_t head, T value) {
    Byte(head);
    const T swapped = BigEndian(value);
    memcpy(at_, &swapped, sizeof swapped);
    at_ += sizeof swapped;
  }
  uint8_t* at_;
};

struct Stored {
  uint32_t group, hash_words, hashes, tokens, block_tokens, window;
  bool has_parent;
  std::string_view kind;
  const uint32_t* words;  // of the parent, the hashes, the tokens
};

void WriteHashes(Writer& out, const Stored& stored, const uint32_t* hashes, KvEventFormat format) {
  out.Array(stored.hashes);
  for (uint32_t i = 0; i < stored.hashes; ++i) out.Hash(hashes + i * stored.hash_words, stored.hash_words, format);
}

void WriteStored(Writer& out, const Stored& stored, KvEventFormat format) {
  const uint32_t* hashes = stored.words + (stored.has_parent ? stored.hash_words : 0);
  const uint32_t* tokens = hashes + stored.hashes * stored.hash_words;
  const bool has_window = stored.window != kNoWindow, has_extra = stored.hashes > 0;
  const auto parent = [&] { stored.has_parent ? out.Hash(stored.words, stored.hash_words, format) : out.Nil(); };
  const auto all_tokens = [&] {
    out.Array(stored.tokens);
    for (uint32_t i = 0; i < stored.tokens; ++i) out.Token(tokens[i]);
  };
  const auto extras = [&] {
    out.Array(stored.hashes);
    memset(out.at(), 0xc0, stored.hashes);
    out = Writer(out.at() + stored.hashes);
  };
  if (format.array) {
    out.Array(12);
    out.Text("BlockStored");
    WriteHashes(out, stored, hashes, format);
    parent();
    all_tokens();
    out.Integer(stored.block_tokens);
    out.Nil();
    out.Text("GPU");
    out.Nil();
    has_extra ? extras() : out.Nil();
    out.Integer(stored.group);
    out.Text(stored.kind);
    has_window ? out.Integer(stored.window) : out.Nil();
    return;
  }
  out.Map(static_cast<uint8_t>(10 + has_extra + has_window));
  out.Raw("\xa4type\xab" "BlockStored\xac" "block_hashes"sv);
  WriteHashes(out, stored, hashes, format);
  out.Raw("\xb1parent_block_hash"sv);
  parent();
  out.Raw("\xa9token_ids"sv);
  all_tokens();
  out.Raw("\xaa" "block_size"sv);
  out.Integer(stored.block_tokens);
  out.Raw("\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0"sv);
  if (has_extra) {
    out.Raw("\xaa" "extra_keys"sv);
    extras();
  }
  out.Raw("\xa9group_idx"sv);
  out.Integer(stored.group);
  out.Raw("\xb2kv_cache_spec_kind"sv);
  out.Text(stored.kind);
  if (has_window) {
    out.Raw("\xbckv_cache_spec_sliding_window"sv);
    out.Integer(stored.window);
  }
}

void WriteRemoved(Writer& out, uint32_t group, std::span<const uint32_t> hashes, uint32_t hash_words, KvEventFormat format) {
  const auto all = [&] {
    out.Array(static_cast<uint32_t>(hashes.size() / hash_words));
    for (size_t at = 0; at < hashes.size(); at += hash_words) out.Hash(hashes.data() + at, hash_words, format);
  };
  if (format.array) {
    out.Array(4);
    out.Text("BlockRemoved");
    all();
    out.Text("GPU");
    out.Integer(group);
    return;
  }
  out.Map(4);
  out.Raw("\xa4type\xac" "BlockRemoved\xac" "block_hashes"sv);
  all();
  out.Raw("\xa6medium\xa3GPU\xa9group_idx"sv);
  out.Integer(group);
}

std::string_view KindAt(std::span<const uint8_t> kinds, uint32_t index) {
  for (size_t at = 0; at < kinds.size(); at += 1 + kinds[at]) {
    if (kinds[at] > 31 || at + 1 + kinds[at] > kinds.size()) break;
    if (index-- == 0) return {reinterpret_cast<const char*>(kinds.data()) + at + 1, kinds[at]};
  }
  throw std::invalid_argument("kv events: a kind without a name");
}

void Require(bool holds) {
  if (!holds) throw std::invalid_argument("kv events: a record of another form");
}

}  // namespace

size_t EncodeKvEvents(std::span<const uint32_t> words, uint32_t events, const KvEventBatch& batch, KvEventFormat format,
                      std::span<const uint8_t> kinds, const std::vector<std::span<const uint8_t>>& objects,
                      std::span<uint8_t> out) {
  size_t most = 64 + words.size() * kBytesPerWord + static_cast<size_t>(events) * kBytesPerEvent;
  for (const auto& object : objects) most += object.size();
  if (out.size() < most) return 0;

  Writer writer(out.data());
  writer.Array(3);
  writer.Float(batch.ts);
  writer.Array(events);
  size_t at = 0, object = 0;
  for (uint32_t event = 0; event < events; ++event) {
    Require(words.size() - at >= 2 && words[at + 1] >= 2 && words[at + 1] <= words.size() - at);
    const uint32_t* record = words.data() + at;
    const uint64_t length = record[1];
    at += length;
    switch (record[0]) {
      case kObject:
        Require(object < objects.size());
        writer.Raw(objects[object++]);
        break;
      case kRemoved:
        Require(length > kRemovedHead && record[3] >= 2 && record[3] <= kMaxHashWords && (length - kRemovedHead) % record[3] == 0);
        WriteRemoved(writer, record[2], {record + kRemovedHead, length - kRemovedHead}, record[3], format);
        break;
      case kStored: {
        Require(length >= kStoredHead);
        const Stored stored{record[2], record[3], record[4], record[5], record[6], record[7], record[8] == 1,
                            KindAt(kinds, record[9]), record + kStoredHead};
        Require(stored.hash_words >= 2 && stored.hash_words <= kMaxHashWords);
        Require(length == kStoredHead + (static_cast<uint64_t>(stored.hashes) + stored.has_parent) * stored.hash_words + stored.tokens);
        WriteStored(writer, stored, format);
        break;
      }
      default: Require(false);
    }
  }
  Require(at == words.size() && object == objects.size());
  batch.rank < 0 ? writer.Nil() : writer.Integer(static_cast<uint64_t>(batch.rank));
  return static_cast<size_t>(writer.at() - out.data());
}

}  // namespace kvtier
