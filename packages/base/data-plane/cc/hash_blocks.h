// Chained block hashes of a whole prompt: H(parent, tokens, extra keys) per block, byte for byte as vLLM V1 computes them.
//
//   CBOR    83 | bytes(parent) | array(tokens) | F6 or the extra keys        (RFC 8949, deterministic encoding)
//   pickle  80 05 95 <frame length> | bytes(parent) 94 | tuple(tokens) 94 | 4E or the extra keys | 87 94 2E   (protocol 5)
//
// Source: vllm/utils/hashing.py and vllm/v1/core/kv_cache_utils.py; vectors in packages/base/identity/vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

// Numbered as in binding.ts.
enum class HashAlgorithm : uint32_t { kSha256 = 0, kSha256Cbor = 1, kXxhash = 2, kXxhashCbor = 3 };

constexpr size_t HashBytesOf(HashAlgorithm algorithm) {
  return algorithm == HashAlgorithm::kSha256 || algorithm == HashAlgorithm::kSha256Cbor ? 32 : 16;
}

// Hash `blockCount` blocks of `blockTokens` (≥ 1) tokens each. `parent` is the root or the hash before the first block.
// `extras`: empty, or one span per block, the extra keys serialised for this algorithm, empty for none.
// `out` receives blockCount × HashBytesOf(algorithm) bytes. Token is uint32_t, or uint64_t for ids that need it.
template <class Token>
void HashBlocks(HashAlgorithm algorithm, const uint8_t* parent, const Token* tokens, size_t blockCount,
                size_t blockTokens, std::span<const std::span<const uint8_t>> extras, uint8_t* out);

}  // namespace kvtier
