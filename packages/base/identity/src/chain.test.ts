/** Native chain hashes against a naive oracle, and growth against hashing at once. */
import { createHash } from 'node:crypto';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { hashAlgorithms, hashValue, rootHash } from './algorithm.ts';
import {
  ChainHasher,
  type HashValue,
  hashKeyAt,
  type MmFeature,
  packHashKeys,
  SequenceHashes,
  unpackHashKeys,
} from './index.ts';

// Every width of the encodings, their edges included.
const edges = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1];
const tokenId = fc.oneof(fc.constantFrom(...edges), fc.nat({ max: 150_000 }));
const tokens = fc.array(tokenId, { maxLength: 400 }).map((ids) => Uint32Array.from(ids));
const blockTokens = fc.constantFrom(1, 2, 3, 4, 8, 16, 40);
const algorithm = fc.constantFrom(...hashAlgorithms);

/** Canonical CBOR of (parent, tokens, None) and SHA-256, written as plainly as can be and sharing no code. */
function naiveSha256Cbor(parent: Uint8Array, ids: readonly number[]): Buffer {
  const head = (major: number, n: number): number[] => {
    const bytes: number[] = [];
    const width = n < 24 ? 0 : n < 256 ? 1 : n < 65_536 ? 2 : 4;
    for (let i = width - 1; i >= 0; i--) bytes.push(Math.floor(n / 256 ** i) % 256);
    return [major * 32 + (width === 0 ? n : { 1: 24, 2: 25, 4: 26 }[width]!), ...bytes];
  };
  const message = [0x83, ...head(2, 32), ...parent, ...head(4, ids.length), ...ids.flatMap((id) => head(0, id)), 0xf6];
  return createHash('sha256').update(Uint8Array.from(message)).digest();
}

it('sha256_cbor equals the naive encoder over node:crypto', () => {
  fc.assert(
    fc.property(tokens, blockTokens, (ids, size) => {
      const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: size });
      const expected: Buffer[] = [];
      for (let at = 0; at + size <= ids.length; at += size) {
        expected.push(naiveSha256Cbor(expected.at(-1) ?? hasher.root, [...ids.subarray(at, at + size)]));
      }
      expect(hasher.hashBlocks(null, ids).toString('hex')).toBe(Buffer.concat(expected).toString('hex'));
    }),
  );
});

it('all algorithms, with extra keys and wide ids, equal the one-value hash', () => {
  const wide = fc.array(fc.oneof(tokenId.map(BigInt), fc.bigInt({ min: 0n, max: (1n << 64n) - 1n })), {
    maxLength: 60,
  });
  const lora = fc.option(fc.string({ minLength: 1, maxLength: 200, unit: 'grapheme' }), { nil: undefined });
  const salt = fc.option(fc.string({ maxLength: 300, unit: 'grapheme' }), { nil: undefined });
  fc.assert(
    fc.property(algorithm, wide, fc.constantFrom(1, 2, 3, 4, 7), lora, salt, (name, ids, size, loraName, cacheSalt) => {
      const hasher = new ChainHasher({ algorithm: name, blockTokens: size, rootSeed: '0' });
      const hashes = new SequenceHashes(hasher, { loraName, cacheSalt });
      hashes.append(BigUint64Array.from(ids));
      let parent = rootHash(name, '0');
      for (let i = 0; i < hashes.blockCount; i++) {
        const extra: HashValue[] = loraName ? [loraName] : [];
        if (i === 0 && cacheSalt) extra.push(cacheSalt);
        parent = hashValue(name, [parent, ids.slice(i * size, (i + 1) * size), extra.length > 0 ? extra : null]);
        expect(hashes.slice(i, i + 1).toString('hex')).toBe(parent.toString('hex'));
      }
      expect(hashes.blockCount).toBe(Math.floor(ids.length / size));
    }),
  );
});

it('a sequence that grows in any pieces has the hashes of the whole', () => {
  const cuts = fc.array(fc.nat({ max: 70 }), { maxLength: 40 });
  fc.assert(
    fc.property(algorithm, tokens, blockTokens, cuts, fc.boolean(), (name, ids, size, pieces, salted) => {
      const hasher = new ChainHasher({ algorithm: name, blockTokens: size });
      const identity = salted ? { cacheSalt: 's', loraDigest: Uint8Array.of(1, 2, 3) } : {};
      const whole = new SequenceHashes(hasher, identity);
      whole.append(ids);
      const grown = new SequenceHashes(hasher, identity);
      const views: [Buffer, string][] = [];
      let at = 0;
      for (const piece of [...pieces, ids.length]) {
        const part = Uint32Array.from(ids.subarray(at, at + piece));
        at = Math.min(at + piece, ids.length);
        grown.append(part);
        part.fill(7); // no reference is kept
        expect(grown.tokenCount).toBe(at);
        views.push([grown.packed, grown.packed.toString('hex')]);
      }
      expect(grown.packed.equals(whole.packed)).toBe(true);
      for (const [view, text] of views) expect(view.toString('hex')).toBe(text);
      const keys = unpackHashKeys(grown.packed, hasher.hashBytes);
      expect(keys).toEqual(keys.map((_, i) => grown.keyAt(i)));
      expect(keys).toEqual(keys.map((_, i) => hashKeyAt(whole.packed, i, hasher.hashBytes)));
      expect(packHashKeys(keys).equals(grown.packed)).toBe(true);
    }),
  );
});

it('in one pass, a block is keyed by exactly the multimodal inputs that overlap it', () => {
  const layout = fc.array(fc.tuple(fc.nat({ max: 9 }), fc.integer({ min: 1, max: 20 })), { maxLength: 8 });
  fc.assert(
    fc.property(layout, fc.constantFrom(1, 4, 8), (gaps, size) => {
      let end = 0;
      const mmFeatures: MmFeature[] = gaps.map(([gap, length], i) => {
        const offset = end + gap;
        end = offset + length;
        return { identifier: `image-${i}`, offset, length };
      });
      const ids = Uint32Array.from({ length: end + 2 * size }, (_, i) => i);
      const hashes = new SequenceHashes(new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: size }), {
        mmFeatures,
      });
      hashes.append(ids);
      let parent = hashes.hasher.root;
      for (let i = 0; i < hashes.blockCount; i++) {
        const start = i * size;
        const inside = mmFeatures.filter((f) => f.offset < start + size && f.offset + f.length > start);
        const extra = inside.map((f) => [f.identifier, f.offset - start]);
        const block = [...ids.subarray(start, start + size)];
        parent = hashValue('sha256_cbor', [parent, block, extra.length > 0 ? extra : null]);
        expect(hashes.slice(i, i + 1).equals(parent)).toBe(true);
      }
    }),
  );
});

it('resumed hashing sees the last image only, as vLLM does, unless it shall be exact', () => {
  const hashesOf = (first: string, mmResume: 'vllm' | 'exact') => {
    const mmFeatures = [
      { identifier: first, offset: 9, length: 1 },
      { identifier: 'B', offset: 11, length: 2 },
    ];
    const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 8 });
    const hashes = new SequenceHashes(hasher, { mmFeatures, mmResume });
    hashes.append(new Uint32Array(14));
    hashes.append(new Uint32Array(2));
    return hashes.keyAt(1);
  };
  expect(hashesOf('A', 'vllm')).toBe(hashesOf('a', 'vllm'));
  expect(hashesOf('A', 'exact')).not.toBe(hashesOf('a', 'exact'));
});

describe('what separates two requests with equal tokens', () => {
  const ids = Uint32Array.from({ length: 64 }, (_, i) => i);
  const last = (identity: ConstructorParameters<typeof SequenceHashes>[1], rootSeed?: string) => {
    const hashes = new SequenceHashes(
      new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 16, rootSeed }),
      identity,
    );
    hashes.append(ids);
    return hashes.keyAt(3);
  };
  it('adapter, salt, an image in front, the root', () => {
    const all = [
      last({}),
      last({ loraName: 'a' }),
      last({ loraDigest: Uint8Array.of(1) }),
      last({ loraDigest: Uint8Array.of(2) }),
      last({ cacheSalt: 'tenant' }),
      last({ mmFeatures: [{ identifier: 'x', offset: 2, length: 4 }] }),
      last({ mmFeatures: [{ identifier: 'y', offset: 2, length: 4 }] }),
      last({ mmFeatures: [{ identifier: 'x', offset: 3, length: 4 }] }),
      last({}, '0'),
    ];
    expect(new Set(all).size).toBe(all.length);
  });
  it('an empty salt is none; the digest wins over the name', () => {
    expect(last({ cacheSalt: '' })).toBe(last({}));
    const loraDigest = Uint8Array.of(1);
    expect(last({ loraDigest, loraName: 'a' })).toBe(last({ loraDigest, loraName: 'b' }));
  });
});

it('what cannot be hashed is refused in one line', () => {
  const config = expect.objectContaining({ code: 'CONFIG' });
  for (const size of [0, -1, 1.5, 70_000]) {
    expect(() => new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: size })).toThrow(config);
  }
  expect(() => new ChainHasher({ algorithm: 'sha256', blockTokens: 8192 })).toThrow(config);
  const hashes = new SequenceHashes(new ChainHasher({ algorithm: 'sha256', blockTokens: 4 }), {
    cacheSalt: 'x'.repeat(70_000),
  });
  expect(() => hashes.append(new Uint32Array(4))).toThrow(expect.objectContaining({ code: 'REQUEST' }));
  expect(hashes.blockCount).toBe(0);
});
