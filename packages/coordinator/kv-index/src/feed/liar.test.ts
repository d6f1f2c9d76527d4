/**
 * A publisher that lies about everything that it can: other parents, chains with holes, blocks of others, removals of what it never had.
 * What is said of the others stays what they say.
 */
import { encodeBatch, type KvEvent, PackedDecoder } from '@kvtier/events';
import { ChainHasher, type HashKey, hashKeyOf } from '@kvtier/identity';
import * as fc from 'fast-check';
import { expect, it } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';
import { EngineListing } from './engine-listing.ts';
import { LieCounts, type LieKind, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';

const blockTokens = 4;
const chains = 3;
const blocks = 8;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
/** Chains that share their first half. */
const prompts = Array.from({ length: chains }, (_, chain) => {
  const tokens = Uint32Array.from({ length: blocks * blockTokens }, (_, i) =>
    i < (blocks * blockTokens) / 2 ? i : 1_000 * (chain + 1) + i,
  );
  const packed = hasher.hashBlocks(null, tokens);
  const hashes = Array.from({ length: blocks }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));
  return { tokens: [...tokens], hashes, keys: keysOfHashes(packed, 32) };
});

const stored = (blockHashes: readonly HashKey[], more: object = {}): KvEvent =>
  ({
    ...{ type: 'BlockStored', blockHashes, parentBlockHash: null, tokenIds: [], blockSize: blockTokens },
    ...{ loraId: null, loraName: null, medium: 'GPU', ...more },
  }) as KvEvent;
const removed = (blockHashes: readonly HashKey[]): KvEvent =>
  ({ type: 'BlockRemoved', blockHashes, medium: 'GPU' }) as KvEvent;

interface Teller {
  readonly say: (event: KvEvent) => void;
  readonly listing: EngineListing;
  readonly lies: Readonly<Record<LieKind, number>>;
}

function teller(index: KvIndex, foreign: boolean): Teller {
  const counts = new LieCounts();
  const lies = new Lies('worker', counts, { info: () => {}, warn: () => {} }, () => 0);
  const listing = new EngineListing({
    index,
    blockTokens,
    maxBlocks: 1_000,
    renaming: foreign ? { hasher, budget: new NamesBudget(1 << 20) } : undefined,
    lies,
  });
  const decoder = new PackedDecoder({ tokens: foreign });
  const say = (event: KvEvent): void => {
    const batch = decoder.decode(encodeBatch({ ts: 1, events: [event], dataParallelRank: 0 }, { encoding: 'map' }));
    for (const _ of listing.apply({ kind: 'batch', seq: 0, topic: '', batch }));
  };
  return { say, listing, lies: counts.byKind };
}

const place = fc.nat(blocks - 1);
const chain = fc.nat(chains - 1);
/** Of the honest one: how long a prefix of each chain it holds from now on. */
const told = fc.record({ kind: fc.constant('held' as const), chain, length: fc.nat(blocks) });
const lie = fc.record({
  kind: fc.constantFrom('hole' as const, 'parent' as const, 'shuffled' as const, 'never' as const, 'size' as const),
  ...{ chain, other: chain, from: place, to: place, at: place },
});

type Step = typeof told | typeof lie extends fc.Arbitrary<infer One> ? One : never;
const held = (chain: number, length: number): Step => ({ kind: 'held', chain, length });
const lied = (kind: 'hole' | 'parent' | 'shuffled', chain: number, other: number, from: number, to: number, at = 0) =>
  ({ kind, chain, other, from, to, at }) satisfies Step;
/** A later block of a prompt comes to lie in a run behind blocks that are others than the prompt's. */
const orders: readonly (readonly Step[])[] = [
  [held(1, 6), lied('parent', 0, 1, 6, 6, 5)],
  [lied('parent', 0, 0, 3, 0), held(0, 2), lied('shuffled', 0, 0, 0, 4), lied('parent', 0, 0, 3, 3)],
  [lied('hole', 2, 0, 4, 0), held(0, 2), lied('parent', 0, 2, 3, 3, 4)],
  [held(0, 4), lied('hole', 0, 0, 0, 2), lied('hole', 0, 0, 0, 6), lied('shuffled', 0, 0, 6, 5)],
];

it.each([false, true])('disturbs nothing of what an honest one says (it hashes otherwise: %s)', (isForeign) => {
  fc.assert(
    fc.property(fc.array(fc.oneof(told, lie), { maxLength: 60 }), (steps) => {
      const index = new KvIndex({ maxBytes: 1 << 20, countedMedia: 1 << mediumNumbers.gpu });
      const honest = teller(index, false);
      const liar = teller(index, isForeign);
      const held = Array.from({ length: chains }, () => 0);
      for (const step of steps) {
        const { hashes, tokens } = prompts[step.chain]!;
        if (step.kind === 'held') {
          const before = held[step.chain]!;
          const { length } = step;
          const parentBlockHash = before === 0 ? null : hashes[before - 1]!;
          const tokenIds = tokens.slice(before * blockTokens, length * blockTokens);
          if (length > before) honest.say(stored(hashes.slice(before, length), { parentBlockHash, tokenIds }));
          else if (length < before) honest.say(removed(hashes.slice(length, before)));
          held[step.chain] = length;
        } else {
          const part = hashes.slice(Math.min(step.from, step.to), Math.max(step.from, step.to) + 1);
          const foreign = prompts[step.other]!.hashes[step.at]!;
          const tokenIds = tokens.slice(0, part.length * blockTokens);
          if (step.kind === 'hole') liar.say(stored(part.filter((_, i) => i % 2 === 0)));
          else if (step.kind === 'parent') liar.say(stored(part, { parentBlockHash: foreign, tokenIds }));
          else if (step.kind === 'shuffled') liar.say(stored([...part].reverse(), { tokenIds }));
          else if (step.kind === 'never') liar.say(removed(part));
          else liar.say(stored(part, { blockSize: 2 * blockTokens }));
        }
        index.checkIntegrity();
        const sources = honest.listing.ranks().flatMap((groups) => groups.map((group) => group!.source));
        for (const { keys, hashes: asked } of prompts) {
          const holds = (hash: (typeof asked)[number]): boolean =>
            prompts.some((one, i) => one.hashes.slice(0, held[i]).some((each) => String(each) === String(hash)));
          const first = asked.findIndex((hash) => !holds(hash));
          expect(index.match(keys, [{ sources }])[0]!.blocks).toBe(first === -1 ? blocks : first);
        }
      }
    }),
    { numRuns: 100, examples: orders.map((steps) => [[...steps]]) },
  );
});

it('of one that hashes otherwise, blocks after a parent that it has not told of are left out in one count each', () => {
  const index = new KvIndex({ maxBytes: 1 << 20, countedMedia: 1 << mediumNumbers.gpu });
  const liar = teller(index, true);
  const { hashes, tokens } = prompts[0]!;
  liar.say(stored(hashes.slice(2, 3), { parentBlockHash: hashes[1]!, tokenIds: tokens.slice(0, blockTokens) }));
  liar.say(stored(hashes.slice(0, 2), { tokenIds: tokens.slice(0, blockTokens) }));
  expect([liar.lies.parent, liar.lies.tokens, index.stats().blocks]).toEqual([1, 1, 0]);
});
