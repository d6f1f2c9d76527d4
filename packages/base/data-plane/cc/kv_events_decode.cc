#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "kv_events.h"

namespace kvtier {
namespace {

constexpr int32_t kRemoved = 1, kStored = 2, kCleared = 3, kStoredAgain = 4;
constexpr int32_t kBatchHead = 6, kRecordHead = 11;
constexpr int kMaxDepth = 8;

struct Other {};  // not what publishers of today write: the decoder of objects is to judge
struct Full {};

// Bytes of a number by its first byte; 0: none.
constexpr auto kNumberBytes = [] {
  std::array<uint8_t, 256> bytes{};
  for (size_t i = 0; i < 0x80; ++i) bytes[i] = 1;
  for (size_t i = 0xe0; i < 0x100; ++i) bytes[i] = 1;
  bytes[0xcc] = bytes[0xd0] = 2;
  bytes[0xcd] = bytes[0xd1] = 3;
  bytes[0xca] = bytes[0xce] = bytes[0xd2] = 5;
  bytes[0xcb] = bytes[0xcf] = bytes[0xd3] = 9;
  return bytes;
}();

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool AtEnd() const { return at_ == end_; }

  // Takes `text`, or nothing.
  template <size_t size>
  bool Takes(const char (&text)[size]) {
    if (static_cast<size_t>(end_ - at_) < size - 1 || memcmp(at_, text, size - 1) != 0) return false;
    at_ += size - 1;
    return true;
  }

  bool IsMap() const {
    Need(1);
    return (*at_ & 0xf0) == 0x80 || *at_ == 0xde || *at_ == 0xdf;
  }

  bool IsPair() const {
    Need(1);
    return *at_ == 0x92;
  }

  bool Nil() {
    Need(1);
    if (*at_ != 0xc0) return false;
    ++at_;
    return true;
  }

  bool True() {
    Need(1);
    if (*at_ != 0xc3) return false;
    ++at_;
    return true;
  }

  uint32_t Array() { return Count(0x90, 0xdc); }
  uint32_t Map() { return Count(0x80, 0xde); }

  std::string_view Text() {
    const uint8_t head = Byte();
    if ((head & 0xe0) == 0xa0) return Bytes(head & 0x1f);
    if (head == 0xd9) return Bytes(Big<uint8_t>());
    if (head == 0xda) return Bytes(Big<uint16_t>());
    if (head == 0xdb) return Bytes(Big<uint32_t>());
    throw Other{};
  }

  double Float() {
    if (Byte() != 0xcb) throw Other{};
    return std::bit_cast<double>(Big<uint64_t>());
  }

  // An integer of any sign, as 64 bits of two's complement.
  uint64_t Integer() {
    const uint8_t head = Byte();
    if (head < 0x80) return head;
    switch (head) {
      case 0xcc: return Big<uint8_t>();
      case 0xcd: return Big<uint16_t>();
      case 0xce: return Big<uint32_t>();
      case 0xcf: return Big<uint64_t>();
      case 0xd0: return static_cast<uint64_t>(static_cast<int8_t>(Big<uint8_t>()));
      case 0xd1: return static_cast<uint64_t>(static_cast<int16_t>(Big<uint16_t>()));
      case 0xd2: return static_cast<uint64_t>(static_cast<int32_t>(Big<uint32_t>()));
      case 0xd3: return Big<uint64_t>();
      default:
        if (head >= 0xe0) return static_cast<uint64_t>(static_cast<int8_t>(head));
        throw Other{};
    }
  }

  // A number that a word of a record takes.
  int32_t Small() {
    const uint64_t value = Integer();
    if (value > INT32_MAX) throw Other{};
    return static_cast<int32_t>(value);
  }

  uint64_t Hash() {
    Need(1);
    if (*at_ < 0xc4 || *at_ > 0xc6) return Integer();
    const uint8_t head = Byte();
    const uint32_t size = head == 0xc4 ? Big<uint8_t>() : head == 0xc5 ? Big<uint16_t>() : Big<uint32_t>();
    const std::string_view bytes = Bytes(size);
    if (size < 8) throw Other{};
    uint64_t last;
    memcpy(&last, bytes.data() + size - 8, 8);
    return __builtin_bswap64(last);
  }

  void SkipNumbers(uint32_t count) {
    const uint8_t* at = at_;
    // Ids of tokens are most of a batch, of all sizes, and each is found by the one before it: so several by one read, without branches.
    while (count >= 3 && end_ - at >= 24) {
      uint64_t bytes;
      memcpy(&bytes, at, sizeof bytes);
      const unsigned first = Step(bytes);
      const unsigned second = Step(bytes >> (8 * first % 64));  // 8, which is too many, shifts by nothing
      if (first > 5 || first + second > 7) {  // beyond these eight bytes, or no integer of this kind
        Skip1(at);
        --count;
        continue;
      }
      const unsigned third = Step(bytes >> (8 * (first + second)));
      if (third > 5) {
        at += first + second;
        count -= 2;
        Skip1(at);
        --count;
        continue;
      }
      at += first + second + third;
      count -= 3;
    }
    for (; count > 0; --count) Skip1(at);
    at_ = at;
  }

  // Anything but maps and extensions.
  void Skip(int depth = 0) {
    Need(1);
    const uint8_t head = *at_;
    if (kNumberBytes[head] > 0) return SkipNumbers(1);
    if (head == 0xc0 || head == 0xc2 || head == 0xc3) {
      ++at_;
    } else if (head >= 0xc4 && head <= 0xc6) {
      ++at_;
      Bytes(head == 0xc4 ? Big<uint8_t>() : head == 0xc5 ? Big<uint16_t>() : Big<uint32_t>());
    } else if ((head & 0xf0) == 0x90 || head == 0xdc || head == 0xdd) {
      if (depth == kMaxDepth) throw Other{};
      for (uint32_t count = Array(); count > 0; --count) Skip(depth + 1);
    } else {
      Text();
    }
  }

 private:
  // Bytes of the unsigned number that begins here, if it is one of at most four; else many.
  static unsigned Step(uint64_t bytes) {
    const unsigned head = bytes & 0xff;
    const unsigned wide = head - 0xcc;
    return head < 0x80 ? 1 : wide < 3 ? 1 + (1u << wide) : 8;
  }
  void Skip1(const uint8_t*& at) const {
    if (at >= end_) throw Other{};
    const size_t bytes = kNumberBytes[*at];
    if (bytes == 0 || bytes > static_cast<size_t>(end_ - at)) throw Other{};
    at += bytes;
  }
  void Need(size_t bytes) const {
    if (static_cast<size_t>(end_ - at_) < bytes) throw Other{};
  }
  uint8_t Byte() {
    Need(1);
    return *at_++;
  }
  std::string_view Bytes(size_t size) {
    Need(size);
    const std::string_view bytes(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return bytes;
  }
  template <class T>
  T Big() {
    Need(sizeof(T));
    T value;
    memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    if constexpr (sizeof(T) == 2) return __builtin_bswap16(value);
    if constexpr (sizeof(T) == 4) return __builtin_bswap32(value);
    if constexpr (sizeof(T) == 8) return __builtin_bswap64(value);
    return value;
  }
  uint32_t Count(uint8_t fixed, uint8_t wide) {
    const uint8_t head = Byte();
    if ((head & 0xf0) == fixed) return head & 0x0f;
    if (head == wide) return Big<uint16_t>();
    if (head == wide + 1) return Big<uint32_t>();
    throw Other{};
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

class Words {
 public:
  explicit Words(std::span<int32_t> out) : from_(out.data()), at_(from_), end_(from_ + out.size()) {}
  int32_t* Take(size_t words) {
    if (static_cast<size_t>(end_ - at_) < words) throw Full{};
    int32_t* taken = at_;
    at_ += words;
    return taken;
  }
  void Hash(uint64_t hash) {
    int32_t* key = Take(2);
    key[0] = static_cast<int32_t>(hash);
    key[1] = static_cast<int32_t>(hash >> 32);
  }
  size_t count() const { return static_cast<size_t>(at_ - from_); }

 private:
  int32_t* from_;
  int32_t* at_;
  int32_t* end_;
};

int32_t PlaceOf(std::string_view name, std::span<const uint8_t> names) {
  int32_t place = 0;
  for (size_t at = 0; at < names.size() && at + 1 + names[at] <= names.size(); at += 1 + names[at], ++place) {
    if (name.size() == names[at] && memcmp(name.data(), names.data() + at + 1, name.size()) == 0) return place;
  }
  throw Other{};
}

// In the order in which they are written, as an array and as a map.
enum Field : int { kHashes, kParent, kTokens, kBlockSize, kLoraId, kMedium, kLoraName, kExtraKeys, kGroup, kKind, kWindow, kLocality, kReused, kFields, kUnknown };
constexpr std::string_view kNames[kFields] = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
                                              "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
                                              "kv_cache_spec_sliding_window", "locality", "reused"};
constexpr Field kStoredFields[] = {kHashes, kParent, kTokens, kBlockSize, kLoraId, kMedium, kLoraName, kExtraKeys, kGroup, kKind, kWindow, kLocality, kReused};
constexpr Field kRemovedFields[] = {kHashes, kMedium, kGroup, kLocality};
constexpr Field kClearedFields[] = {kMedium};

std::span<const Field> FieldsOf(int32_t type) {
  if (type == kStored) return kStoredFields;
  if (type == kRemoved) return kRemovedFields;
  return kClearedFields;
}

// Of those after `last`: what comes twice or in another order is for others to read.
Field FieldOf(std::string_view name, int last, int32_t type) {
  for (int field = last + 1; field < kFields; ++field) {
    if (name.size() != kNames[field].size() || memcmp(name.data(), kNames[field].data(), name.size()) != 0) continue;
    for (const Field known : FieldsOf(type)) {
      if (known == field) return known;
    }
    return kUnknown;
  }
  for (int field = 0; field <= last; ++field) {
    if (name == kNames[field]) throw Other{};
  }
  if (name == "type") throw Other{};
  return kUnknown;
}

int32_t TypeOf(std::string_view tag) {
  if (tag == "BlockRemoved") return kRemoved;
  if (tag == "BlockStored") return kStored;
  if (tag == "AllBlocksCleared") return kCleared;
  throw Other{};
}

class Event {
 public:
  Event(Reader& in, Words& out, bool tokens, std::span<const uint8_t> names) : in_(in), out_(out), tokens_(tokens), names_(names) {}

  void Read(bool is_map) {
    const size_t from = out_.count();
    head_ = out_.Take(kRecordHead);
    if (is_map && ReadUsualRemoval()) return;
    const uint32_t count = is_map ? in_.Map() : in_.Array();
    if (count == 0 || (is_map && in_.Text() != "type")) throw Other{};
    const int32_t type = TypeOf(in_.Text());
    const auto fields = FieldsOf(type);
    const int32_t empty[] = {type, 0, -1, -1, -1, 0, 0, 0, -1, -1, 0};
    memcpy(head_, empty, sizeof empty);
    uint32_t seen = 0;
    int last = -1;
    for (uint32_t i = 1; i < count; ++i) {
      if (!is_map && i > fields.size()) throw Other{};
      const Field field = is_map ? FieldOf(in_.Text(), last, type) : fields[i - 1];
      if (field == kUnknown) {
        in_.Skip();
        continue;
      }
      last = field;
      seen |= 1u << field;
      Value(field);
    }
    const uint32_t wanted = type == kStored ? 1u << kHashes | 1u << kTokens | 1u << kBlockSize : type == kRemoved ? 1u << kHashes : 0;
    if ((seen & wanted) != wanted) throw Other{};
    head_[1] = static_cast<int32_t>(out_.count() - from);
  }

 private:
  // Most events of an engine are of this form.
  bool ReadUsualRemoval() {
    const Reader before = in_;
    if (!in_.Takes("\x84\xa4type\xac" "BlockRemoved\xac" "block_hashes\x91")) return false;
    const uint64_t hash = in_.Hash();
    if (!in_.Takes("\xa6medium")) return in_ = before, false;
    const int32_t medium = in_.Nil() ? -1 : PlaceOf(in_.Text(), names_);
    if (!in_.Takes("\xa9group_idx")) return in_ = before, false;
    const int32_t group = in_.Nil() ? -1 : in_.Small();
    const int32_t head[] = {kRemoved, kRecordHead + 2, medium, -1, group, 1, 0, 0, -1, -1, 0};
    memcpy(head_, head, sizeof head);
    out_.Hash(hash);
    return true;
  }

  void Value(Field field) {
    switch (field) {
      case kHashes:
        head_[5] = static_cast<int32_t>(in_.Array());
        for (uint32_t i = static_cast<uint32_t>(head_[5]); i > 0; --i) out_.Hash(in_.Hash());
        break;
      case kParent:
        if (in_.Nil()) break;
        head_[6] = 1;
        out_.Hash(in_.Hash());
        break;
      case kTokens:
        if (!in_.Nil()) Tokens(in_.Array());
        break;
      case kBlockSize: head_[7] = in_.Small(); break;
      case kMedium: Name(2); break;
      case kLocality: Name(3); break;
      case kGroup:
        if (!in_.Nil()) head_[4] = in_.Small();
        break;
      case kLoraId:
        if (in_.Nil()) break;
        in_.SkipNumbers(1);
        head_[10] = 1;
        break;
      case kWindow:
        if (!in_.Nil()) head_[9] = in_.Small();
        break;
      case kLoraName:
        if (in_.Nil()) break;
        // SGLang has a map with the salt here.
        if (in_.IsMap()) {
          for (uint32_t pairs = in_.Map(); pairs > 0; --pairs) in_.Text(), in_.Skip();
        } else {
          in_.Text();
        }
        head_[10] = 1;
        break;
      case kKind: Name(8); break;
      case kExtraKeys:
        if (in_.Nil()) break;
        for (uint32_t keys = in_.Array(); keys > 0; --keys) {
          if (in_.Nil()) continue;
          head_[10] = 1;
          for (uint32_t parts = in_.Array(); parts > 0; --parts) in_.Skip();
        }
        break;
      case kReused:
        if (in_.True()) head_[0] = kStoredAgain;
        else in_.Skip();
        break;
      default: throw Other{};
    }
  }

  void Name(int word) {
    if (!in_.Nil()) head_[word] = PlaceOf(in_.Text(), names_);
  }

  // SGLang with EAGLE tells each token with the one after it.
  void Tokens(uint32_t count) {
    const bool pairs = count > 0 && in_.IsPair();
    if (!tokens_ && !pairs) return in_.SkipNumbers(count);
    for (; count > 0; --count) {
      if (pairs && in_.Array() != 2) throw Other{};
      if (tokens_) Token();
      else in_.SkipNumbers(1);
      if (pairs) in_.SkipNumbers(1);
    }
  }

  void Token() {
    const uint64_t token = in_.Integer();
    if (token > UINT32_MAX) throw Other{};
    *out_.Take(1) = static_cast<int32_t>(token);
  }

  Reader& in_;
  Words& out_;
  const bool tokens_;
  const std::span<const uint8_t> names_;
  int32_t* head_ = nullptr;
};

}  // namespace

int64_t DecodeKvEvents(std::span<const uint8_t> payload, bool tokens, std::span<const uint8_t> names, std::span<int32_t> out) {
  try {
    Reader in(payload);
    Words words(out);
    int32_t* head = words.Take(kBatchHead);
    const uint32_t parts = in.Array();
    if (parts != 2 && parts != 3) return -1;
    const double ts = in.Float();
    const uint32_t events = in.Array();
    for (uint32_t i = 0; i < events; ++i) Event(in, words, tokens, names).Read(in.IsMap());
    head[2] = parts == 2 || in.Nil() ? -1 : in.Small();
    if (!in.AtEnd() || words.count() > INT32_MAX) return -1;
    head[0] = static_cast<int32_t>(words.count());
    head[1] = static_cast<int32_t>(events);
    head[3] = 0;
    memcpy(head + 4, &ts, sizeof ts);
    return static_cast<int64_t>(words.count());
  } catch (const Other&) {
    return -1;
  } catch (const Full&) {
    return 0;
  }
}

}  // namespace kvtier
