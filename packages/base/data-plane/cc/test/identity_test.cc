// The native half of identity, under AddressSanitizer and UBSan: SHA-256 in its forms, chains, the object header, and what is skipped of KV
// events.
// Built and run by packages/base/data-plane/src/identity.long.test.ts with the golden folder as argument.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "../hash_blocks.h"
#include "../hash_encode.h"
#include "../kv_events.h"
#include "../object_header.h"
#include "../sha256.h"
#include "../sha256_ni.h"

namespace kvtier {
void Sha256CompressEmulated(Sha256State& state, const uint8_t* pieces, size_t count);
}

namespace {

using namespace kvtier;
using Bytes = std::vector<uint8_t>;

std::string goldenFolder;

Bytes RandomBytes(std::mt19937_64& random, size_t count) {
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

std::string Hex(const uint8_t* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

std::string Sha256Hex(const Bytes& bytes) {
  uint8_t digest[32];
  Sha256(bytes.data(), bytes.size(), digest);
  return Hex(digest, 32);
}

// FIPS 180-4 and the NIST example files.
TEST(Sha256, KnownAnswers) {
  EXPECT_EQ(Sha256Hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex({'a', 'b', 'c'}), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex(Bytes(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, AllFormsAgree) {
  std::mt19937_64 random(1);
  for (size_t count = 1; count <= kScheduleLanes; ++count) {
    const Bytes bytes = RandomBytes(random, count * kSha256Piece);
    const uint8_t* pieces[kScheduleLanes];
    for (size_t i = 0; i < count; ++i) pieces[i] = bytes.data() + i * kSha256Piece;
    Sha256Schedules schedules;
    Sha256Prepare(pieces, count, &schedules);
    Sha256State portable = kSha256Initial, prepared = kSha256Initial, emulated = kSha256Initial, chosen = kSha256Initial;
    for (size_t i = 0; i < count; ++i) Sha256CompressPrepared(prepared, schedules, i);
    Sha256CompressPortable(portable, bytes.data(), count);
    Sha256CompressEmulated(emulated, bytes.data(), count);
    Sha256Compress(chosen, bytes.data(), count);
    EXPECT_EQ(prepared, portable);
    EXPECT_EQ(emulated, portable);
    EXPECT_EQ(chosen, portable);
  }
  if (!HasShaInstructions()) std::cout << "MISSED: this CPU has no SHA instructions; only their emulation was tested\n";
}

// A chain equals one-shot digests of the same messages, for block sizes around the batch and lane counts. The serialised
// bytes themselves are pinned by packages/base/identity/vectors.
template <class Form>
void CheckChain(HashAlgorithm algorithm) {
  std::mt19937_64 random(2);
  for (const size_t blockTokens : {1, 2, 3, 4, 16, 64, 300}) {
    for (const size_t count : {0, 1, 7, 8, 9, 33}) {
      std::vector<uint32_t> tokens(count * blockTokens);
      for (auto& token : tokens) token = static_cast<uint32_t>(random()) >> (random() % 32);
      std::vector<Bytes> extraBytes;
      std::vector<std::span<const uint8_t>> extras;
      for (size_t i = 0; i < count; ++i) extraBytes.push_back(RandomBytes(random, random() % 3 == 0 ? random() % 200 : 0));
      for (const auto& extra : extraBytes) extras.emplace_back(extra);
      Bytes out(count * 32), parent = RandomBytes(random, 32);
      HashBlocks(algorithm, parent.data(), tokens.data(), count, blockTokens, extras, out.data());
      for (size_t i = 0; i < count; ++i) {
        Bytes message(MessageBytesMax<Form>(blockTokens, extras[i].size()));
        uint8_t* end =
            Form::PutBlock(message.data(), 32, tokens.data() + i * blockTokens, blockTokens, extras[i]);
        std::copy(parent.begin(), parent.end(), message.begin() + Form::kParentOffset(32));
        message.resize(static_cast<size_t>(end - message.data()));
        parent.resize(32);
        Sha256(message.data(), message.size(), parent.data());
        ASSERT_EQ(Hex(out.data() + 32 * i, 32), Hex(parent.data(), 32)) << blockTokens << " tokens, block " << i;
      }
    }
  }
}

TEST(HashBlocks, ChainsEqualOneShotDigests) {
  CheckChain<Cbor>(HashAlgorithm::kSha256Cbor);
  CheckChain<Pickle>(HashAlgorithm::kSha256);
}

Bytes Golden(const std::string& name) {
  std::ifstream file(goldenFolder + "/" + name, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

TEST(ObjectHeader, GoldenFilesAreReadAndWrittenAgain) {
  for (const char* name : {"header-root.bin", "header-child.bin", "header-xxhash.bin", "header-expires.bin"}) {
    const Bytes golden = Golden(name);
    ASSERT_EQ(golden.size(), kHeaderBytes) << name;
    ObjectHeader header;
    ASSERT_EQ(DecodeHeader(golden.data(), &header), HeaderFault::kNone) << name;
    Bytes again(kHeaderBytes + 1);
    EncodeHeader(header, again.data() + 1);
    EXPECT_EQ(Hex(again.data() + 1, kHeaderBytes), Hex(golden.data(), kHeaderBytes));
  }
  ObjectHeader child;
  DecodeHeader(Golden("header-child.bin").data(), &child);
  EXPECT_EQ(child.tokenCount, 16u);
  EXPECT_EQ(child.payloadBytes, 2097152u);
  EXPECT_EQ(child.sequence, 7u);
  EXPECT_EQ(child.payloadChecksum, 0xfedcba9876543210u);
  EXPECT_EQ(child.hash[0], 1);
  EXPECT_EQ(child.parentHash[0], 50);
  EXPECT_EQ(child.expires, 0u);
  ObjectHeader expires;
  DecodeHeader(Golden("header-expires.bin").data(), &expires);
  EXPECT_EQ(expires.expires, 4294967294u);
}

TEST(ObjectHeader, AnyOneByteChangedIsNoticed) {
  std::mt19937_64 random(3);
  ObjectHeader header{};
  header.hashBytes = header.parentHashBytes = 32;
  header.tokenCount = 16;
  Bytes object(kHeaderBytes);
  const Bytes payload = RandomBytes(random, 700);
  header.payloadBytes = payload.size();
  header.payloadChecksum = XXH3_64bits(payload.data(), payload.size());
  EncodeHeader(header, object.data());
  object.insert(object.end(), payload.begin(), payload.end());
  ObjectHeader read;
  const uint8_t zeros[32] = {}, ones[32] = {1};
  const auto verify = [&](const uint8_t* name, const uint8_t* hash) {
    return VerifyObject(object.data(), object.size(), name, hash, &read);
  };
  ASSERT_EQ(verify(zeros, zeros), HeaderFault::kNone);
  EXPECT_EQ(verify(ones, zeros), HeaderFault::kNamespace);
  EXPECT_EQ(verify(nullptr, ones), HeaderFault::kHash);
  for (size_t bytes = 0; bytes < object.size(); ++bytes) {
    ASSERT_EQ(VerifyObject(object.data(), bytes, zeros, zeros, &read), HeaderFault::kPayloadBytes) << bytes;
  }
  for (size_t at = 0; at < object.size(); ++at) {
    for (unsigned change = 1; change < 256; ++change) {
      object[at] ^= static_cast<uint8_t>(change);
      ASSERT_NE(verify(zeros, zeros), HeaderFault::kNone) << at << " ^ " << change;
      object[at] ^= static_cast<uint8_t>(change);
    }
  }
}

TEST(ObjectHeader, WhatANewerProgramWroteIsForeignAndNotDamaged) {
  ObjectHeader header{};
  header.hashBytes = 32;
  header.payloadChecksum = XXH3_64bits(nullptr, 0);
  const uint8_t zeros[32] = {}, ones[32] = {1};
  const auto fault = [&](auto change, const uint8_t* name, bool sealed = true) {
    Bytes object(kHeaderBytes);
    EncodeHeader(header, object.data());
    ObjectHeader changed;
    std::memcpy(&changed, object.data(), sizeof(changed));
    change(changed);
    if (sealed) changed.headerChecksum = HeaderChecksum(changed);
    std::memcpy(object.data(), &changed, sizeof(changed));
    ObjectHeader read;
    return VerifyObject(object.data(), object.size(), name, zeros, &read);
  };
  const auto version = [](ObjectHeader& of) { of.version = 2; };
  const auto codec = [](ObjectHeader& of) { of.codec = kLastCodec + 1; };
  const auto flag = [](ObjectHeader& of) { of.flags = 1; };
  EXPECT_EQ(fault([](ObjectHeader& of) { of.codec = kLastCodec; }, zeros), HeaderFault::kNone);
  EXPECT_EQ(fault(version, zeros), HeaderFault::kVersion);
  EXPECT_EQ(fault(version, zeros, false), HeaderFault::kHeaderChecksum);
  EXPECT_EQ(fault(codec, zeros), HeaderFault::kUnknown);
  EXPECT_EQ(fault(flag, zeros), HeaderFault::kUnknown);
  EXPECT_EQ(fault(flag, ones), HeaderFault::kNamespace);
  for (int value = 0; value <= 9; ++value) {
    EXPECT_EQ(IsForeign(static_cast<HeaderFault>(value)), value == 2 || value == 9) << value;
  }
}

// One stored block whose tokens are of these heads, each as long as it says.
std::vector<uint8_t> StoredTokens(const std::vector<uint8_t>& heads) {
  std::vector<uint8_t> bytes = {0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x95, 0xab};
  for (const char letter : std::string("BlockStored")) bytes.push_back(static_cast<uint8_t>(letter));
  bytes.insert(bytes.end(), {0x91, 1, 0xc0, 0xdc, 0, static_cast<uint8_t>(heads.size())});
  for (const uint8_t head : heads) {
    bytes.push_back(head);
    const size_t more = head < 0xcc ? 0 : head < 0xd0 ? size_t{1} << (head - 0xcc) : size_t{1} << (head - 0xd0);
    bytes.insert(bytes.end(), more, 0xff);
  }
  bytes.push_back(16);
  return bytes;
}

TEST(KvEvents, NumbersOfAllSizesAreSkippedInAnyOrder) {
  const std::vector<uint8_t> kinds = {5, 0xcc, 0xcd, 0xce, 0xcf, 0xd0, 0xd3};
  std::minstd_rand random(1);
  std::vector<int32_t> out(64);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint8_t> heads(random() % 40);
    for (auto& head : heads) head = kinds[random() % kinds.size()];
    const auto payload = StoredTokens(heads);
    ASSERT_EQ(DecodeKvEvents(payload, false, {}, out), 6 + 11 + 2);
    EXPECT_EQ(out[6 + 7], 16);  // what follows them
    EXPECT_EQ(DecodeKvEvents(std::span(payload).first(payload.size() - 1), false, {}, out), -1);
  }
}

TEST(ObjectHeader, SlotsAreWholePages) {
  EXPECT_EQ(SlotBytesFor(0), 4096u);
  EXPECT_EQ(SlotBytesFor(3840), 4096u);
  EXPECT_EQ(SlotBytesFor(3841), 8192u);
}

}  // namespace

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  if (count > 1) goldenFolder = arguments[1];
  return RUN_ALL_TESTS();
}
