#include "hash_blocks.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "hash_encode.h"
#include "sha256.h"
#include "xxh3.h"

namespace kvtier {
namespace {

// Blocks whose messages are written ahead of the chain.
constexpr size_t kBatchBlocks = 8;

using Extras = std::span<const std::span<const uint8_t>>;

std::span<const uint8_t> ExtraOf(Extras extras, size_t block) {
  return extras.empty() ? std::span<const uint8_t>() : extras[block];
}

size_t ExtraBytesMax(Extras extras) {
  size_t most = 0;
  for (const auto& extra : extras) most = std::max(most, extra.size());
  return most;
}

template <class Form, class Token>
void HashSha256(const uint8_t* parent, const Token* tokens, size_t blockCount, size_t blockTokens, Extras extras,
                uint8_t* out) {
  const size_t room = (MessageBytesMax<Form>(blockTokens, ExtraBytesMax(extras)) + 63) / 64 * 64;
  const auto messages = std::make_unique_for_overwrite<uint8_t[]>(room * kBatchBlocks);
  static const bool ahead = !HasShaInstructions();  // a virtual machine takes 13 us to answer CPUID
  std::vector<const uint8_t*> tails;  // the pieces behind the first of each message, in the order of the chain
  Sha256Schedules schedules;

  for (size_t first = 0; first < blockCount; first += kBatchBlocks) {
    const size_t batch = std::min(kBatchBlocks, blockCount - first);
    size_t padded[kBatchBlocks];
    tails.clear();
    for (size_t i = 0; i < batch; ++i) {
      uint8_t* message = messages.get() + i * room;
      const uint8_t* end =
          Form::PutBlock(message, 32, tokens + (first + i) * blockTokens, blockTokens, ExtraOf(extras, first + i));
      padded[i] = Sha256Pad(message, static_cast<size_t>(end - message));
      for (size_t at = kSha256Piece; at < padded[i]; at += kSha256Piece) tails.push_back(message + at);
    }
    size_t tail = 0;
    for (size_t i = 0; i < batch; ++i) {
      uint8_t* message = messages.get() + i * room;
      std::memcpy(message + Form::kParentOffset(32), parent, 32);
      Sha256State state = kSha256Initial;
      if (!ahead) {
        Sha256Compress(state, message, padded[i] / kSha256Piece);
      } else {
        Sha256Compress(state, message, 1);
        for (size_t at = kSha256Piece; at < padded[i]; at += kSha256Piece, ++tail) {
          const size_t lane = tail % kScheduleLanes;
          if (lane == 0) {
            Sha256Prepare(tails.data() + tail, std::min(kScheduleLanes, tails.size() - tail), &schedules);
          }
          Sha256CompressPrepared(state, schedules, lane);
        }
      }
      Sha256Store(state, out);
      parent = out;
      out += 32;
    }
  }
}

template <class Form, class Token>
void HashXxh3(const uint8_t* parent, const Token* tokens, size_t blockCount, size_t blockTokens, Extras extras,
              uint8_t* out) {
  const auto message =
      std::make_unique_for_overwrite<uint8_t[]>(MessageBytesMax<Form>(blockTokens, ExtraBytesMax(extras)));
  for (size_t block = 0; block < blockCount; ++block) {
    const uint8_t* end =
        Form::PutBlock(message.get(), 16, tokens + block * blockTokens, blockTokens, ExtraOf(extras, block));
    std::memcpy(message.get() + Form::kParentOffset(16), parent, 16);
    XXH128_canonical_t digest;  // big-endian, as Python's xxhash gives it
    XXH128_canonicalFromHash(&digest, XXH3_128bits(message.get(), static_cast<size_t>(end - message.get())));
    std::memcpy(out, digest.digest, 16);
    parent = out;
    out += 16;
  }
}

}  // namespace

template <class Token>
void HashBlocks(HashAlgorithm algorithm, const uint8_t* parent, const Token* tokens, size_t blockCount,
                size_t blockTokens, Extras extras, uint8_t* out) {
  switch (algorithm) {
    case HashAlgorithm::kSha256:
      return HashSha256<Pickle>(parent, tokens, blockCount, blockTokens, extras, out);
    case HashAlgorithm::kSha256Cbor:
      return HashSha256<Cbor>(parent, tokens, blockCount, blockTokens, extras, out);
    case HashAlgorithm::kXxhash:
      return HashXxh3<Pickle>(parent, tokens, blockCount, blockTokens, extras, out);
    case HashAlgorithm::kXxhashCbor:
      return HashXxh3<Cbor>(parent, tokens, blockCount, blockTokens, extras, out);
  }
}

template void HashBlocks<uint32_t>(HashAlgorithm, const uint8_t*, const uint32_t*, size_t, size_t, Extras, uint8_t*);
template void HashBlocks<uint64_t>(HashAlgorithm, const uint8_t*, const uint64_t*, size_t, size_t, Extras, uint8_t*);

}  // namespace kvtier
