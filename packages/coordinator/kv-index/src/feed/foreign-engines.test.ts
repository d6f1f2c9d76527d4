/** What vLLM and SGLang say in their own ways, from their payloads into the index: each case as their code writes it. */
import { type PackedBatch, PackedDecoder } from '@kvtier/events';
import { Continuity, foreignBatch } from '@kvtier/events/testing';
import { ChainHasher } from '@kvtier/identity';
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';
import { EngineListing } from './engine-listing.ts';
import { LieCounts, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';
import { matchView } from './views.ts';

const blockTokens = 4;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
const prompt = Array.from({ length: 8 * blockTokens }, (_, i) => 100 + i);
const keys = keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(prompt)), hasher.hashBytes);
const tokensOf = (from: number, to: number): number[] => prompt.slice(from * blockTokens, to * blockTokens);

function rig(maxBlocks = 1_000) {
  const index = new KvIndex({ maxBytes: 1 << 20, countedMedia: 1 << mediumNumbers.gpu });
  const counts = new LieCounts();
  const lines: string[] = [];
  const log = { info: () => undefined, warn: (_: object, message: string) => void lines.push(message) };
  const lies = new Lies('pod', counts, log, () => 0);
  const renaming = { hasher, budget: new NamesBudget(1 << 20) };
  const listing = new EngineListing({ index, blockTokens, maxBlocks, renaming, lies });
  const decoder = new PackedDecoder({ tokens: true });
  const stream = new Continuity<PackedBatch>((payload) => decoder.decode(payload), { replay: null }, '');
  let seq = 0;
  /** The kinds of what its stream made of a batch of these events. */
  const say = (events: readonly unknown[], rank = 0): string[] => {
    const item = stream.next({ seq: seq++, topic: '', payload: foreignBatch(events, rank) })!;
    for (const _ of listing.apply(item));
    return [item.kind];
  };
  /** Its turns, one after another. */
  const turns = (events: readonly unknown[]) =>
    listing.apply(stream.next({ seq: seq++, topic: '', payload: foreignBatch(events, 0) })!);
  const match = () => {
    const ranks = listing.ranks().map((groups) =>
      groups.map((part) => ({
        sources: [part!.source],
        windowBlocks: part!.window.tokens && Math.max(1, Math.ceil((part!.window.tokens - 1) / blockTokens)),
      })),
    );
    return ranks.length === 0 ? undefined : matchView(index, keys, ranks);
  };
  const blocks = (): number => match()?.blocks ?? 0;
  return { index, listing, say, turns, match, blocks, lies: counts.byKind, lines };
}

const noLies = Object.fromEntries(Object.keys(new LieCounts().byKind).map((kind) => [kind, 0]));

describe('SGLang', () => {
  const stored = (hashes: number[], parent: number | null, tokens: unknown[], medium: string, ...more: object[]) =>
    ['BlockStored', hashes, parent, tokens, blockTokens, null, medium, ...more] as const;

  it('tells of a salted prompt beside others: it is left out, and all that was said before stays', () => {
    const { say, blocks, lies } = rig();
    expect(say([stored([1, 2], null, tokensOf(0, 2), 'GPU')])).toEqual(['batch']);
    const salt = { cache_salt: 'tenant-a' };
    const salted = [stored([900], null, tokensOf(0, 1), 'GPU', salt), stored([901], 900, tokensOf(1, 2), 'GPU', salt)];
    expect([say(salted), blocks()]).toEqual([['batch'], 2]);
    say([['BlockRemoved', [900, 901], 'GPU'], stored([3], 2, tokensOf(2, 3), 'GPU')]);
    expect([blocks(), lies]).toEqual([3, noLies]);
  });

  it('tells pairs of neighbours with EAGLE: its blocks are those of their first tokens', () => {
    const { say, blocks, lies } = rig();
    const pairs = tokensOf(0, 2).map((token) => [token, token + 1]);
    say([stored([1, 2], null, pairs, 'GPU')]);
    expect([blocks(), lies]).toEqual([2, noLies]);
    say([['BlockRemoved', [2], 'GPU']]);
    expect(blocks()).toBe(1);
  });

  it('clears its host memory with the GPU, of that rank alone', () => {
    const { index, say, blocks } = rig();
    for (const rank of [0, 1])
      for (const medium of ['GPU', 'CPU_PINNED']) say([stored([1, 2], null, tokensOf(0, 2), medium)], rank);
    say([['AllBlocksCleared']], 0);
    expect([blocks(), index.stats().blocks]).toEqual([0, 2]);
    say([['AllBlocksCleared']], 1);
    index.sweep();
    expect(index.stats().blocks).toBe(0);
  });

  it('tells of a pool that many share, which is nobody’s', () => {
    const { say, match, lies } = rig();
    say([stored([1, 2], null, tokensOf(0, 2), 'GPU'), stored([1, 2, 3], null, tokensOf(0, 3), 'EXTERNAL')]);
    say([['BlockRemoved', [1], 'EXTERNAL']]);
    expect([match()!.blocks, match()!.byMedium[mediumNumbers.gpu], lies]).toEqual([2, 2, noLies]);
  });
});

describe('vLLM', () => {
  const stored = (hashes: number[], from: number, parent: number | null = null, more: object = {}) => ({
    ...{ type: 'BlockStored', block_hashes: hashes, parent_block_hash: parent },
    ...{ token_ids: tokensOf(from, from + hashes.length), block_size: blockTokens, lora_id: null },
    ...{ medium: 'GPU', lora_name: null, group_idx: 0, ...more },
  });
  const removed = (hash: number, group_idx = 0) => ({
    ...{ type: 'BlockRemoved', block_hashes: [hash], medium: 'GPU', group_idx },
  });

  it('tells of each group of a hybrid model without what it needs: the first one stands for all', () => {
    const { say, blocks, lies } = rig();
    const placeholder = { token_ids: [], block_size: 0, medium: 'CPU' };
    say([stored([1, 2], 0)]);
    say([stored([1, 2], 0, null, { group_idx: 1 }), stored([2], 1, 1, { group_idx: 40 })]);
    say([stored([1, 2], 0, null, { group_idx: 1, ...placeholder }), stored([1, 2], 0, null, placeholder)]);
    expect([blocks(), lies]).toEqual([2, noLies]);
    say([removed(2, 1)]);
    expect(blocks()).toBe(2);
  });

  it('tells of groups with a window before the one that sees everything: this one stands for all, whatever its number', () => {
    const { say, blocks, lies } = rig();
    const window = { kv_cache_spec_kind: 'sliding_window', kv_cache_spec_sliding_window: 2 * blockTokens };
    const whole = { group_idx: 1, kv_cache_spec_kind: 'full_attention' };
    // Loaded: of the window's group only the last blocks are there, and nobody names the one before them.
    say([stored([7, 8], 6, 6, window), stored([1, 2, 3, 4, 5, 6, 7, 8], 0, null, whole)]);
    expect([blocks(), lies]).toEqual([8, noLies]);
    say([removed(7, 0), removed(8, 0)]);
    expect(blocks()).toBe(8);
    say([removed(8, 1)]);
    expect(blocks()).toBe(7);
    say([stored([8], 7, 7, window), stored([8], 7, 7, whole)]);
    expect([blocks(), lies]).toEqual([8, noLies]);
  });

  it.each(['full_attention', 'mla_attention', 'sink_full_attention'])(
    'tells of a state that leaves out blocks with the tokens of all, before a batch with %s: that alone counts from then on',
    (kind) => {
      const { say, blocks, lies } = rig();
      const state = { kv_cache_spec_kind: 'mamba' };
      say([stored([1, 4], 0, null, { ...state, token_ids: tokensOf(0, 4) }), stored([2], 1, 1, state)]);
      say([stored([1], 0, null, state)]);
      expect(blocks()).toBe(1); // it is all that was told of
      say([stored([1, 2, 3], 0, null, { group_idx: 3, kv_cache_spec_kind: kind }), removed(1, 0), removed(2, 0)]);
      expect([blocks(), lies]).toEqual([3, noLies]);
    },
  );

  it('removes very many blocks at once: each turn deals with some thousands of events', () => {
    const { say, turns } = rig();
    const removals = Array.from({ length: 50_000 }, (_, i) => removed(100 + i));
    const most = 4_096;
    const once = Math.floor(removals.length / most);
    // Looked at for a group that sees everything, and then for themselves.
    expect([...turns(removals)].length).toBe(2 * once);
    // Who names no kind is not looked through for one.
    expect([...turns([stored([1], 0), ...removals])].length).toBe(once);
    say([stored([1], 0, null, { kv_cache_spec_kind: 'full_attention' })]);
    expect([...turns(removals)].length).toBe(once);
    expect([...turns(removals.map((event) => ({ ...event, group_idx: 1 })))].length).toBe(once);
  });

  it.each([
    ['of another group that sees everything', 2, { group_idx: 1, kv_cache_spec_kind: 'full_attention' }],
    ['too many', 1, {}],
  ])('tells of blocks %s: a source that is gone is nobody else’s until that is told', (_, maxBlocks, more) => {
    const { index, listing, say, turns } = rig(maxBlocks);
    say([stored([1], 0, null, { kv_cache_spec_kind: 'sliding_window' })]);
    const { source } = listing.ranks()[0]![0]!;
    const removals = Array.from({ length: 10_000 }, (_, i) => removed(100 + i));
    const last = { ...stored([1, 2], 0, null, more), block_hashes: [8, 9] };
    const work = turns([...('group_idx' in more ? [...removals, last] : [last, ...removals])]);
    let step = work.next();
    let count = 0;
    for (; step.done !== true; step = work.next(), count++) expect(index.addSource()).not.toBe(source);
    expect([step.value, count > 1]).toEqual([true, true]);
    expect(index.addSource()).toBe(source);
  });

  it('tells hits without a mark when a client asks: they go with the block', () => {
    const { say, blocks } = rig();
    say([stored([1, 2], 0)]);
    for (let i = 0; i < 3; i++) say([stored([1, 2], 0)]);
    say([stored([1, 2, 3], 0)]); // a third one came: of the first two, this is a copy more
    say([removed(2), removed(3)]);
    expect(blocks()).toBe(2);
    say([removed(2)]);
    expect(blocks()).toBe(1);
  });

  it.each(['hit', 'again'] as const)('holds each block that is claimed, whatever is removed and told (%s)', (more) => {
    const blocksAtMost = 6;
    const action = fc.record({ kind: fc.constantFrom('computed', 'removed', more), length: fc.nat(blocksAtMost) });
    fc.assert(
      fc.property(fc.array(action, { maxLength: 40 }), (actions) => {
        const { index, say, blocks } = rig();
        const copies = Array.from({ length: blocksAtMost }, () => 0);
        const heldOf = (): number => [...copies, 0].indexOf(0);
        const namesOf = (from: number, to: number): number[] =>
          Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i + 1);
        for (const { kind, length } of actions) {
          const held = heldOf();
          if (kind === 'removed') {
            if (held === 0) continue;
            copies[held - 1]!--;
            say([removed(held)]);
          } else {
            // Two prompts computed at once begin at the root, both; else at what is held.
            const [from, to] = kind === 'computed' ? [held, length] : [0, kind === 'hit' ? held : length];
            const names = namesOf(from, to);
            if (names.length === 0) continue;
            if (kind !== 'hit') for (const name of names) copies[name - 1]!++;
            say([stored(names, from, from === 0 ? null : from)]);
          }
          if (more === 'hit') expect(blocks()).toBe(heldOf());
          else expect(blocks()).toBeLessThanOrEqual(heldOf());
          index.checkIntegrity();
        }
      }),
      { numRuns: 200 },
    );
  });

  it('tells of blocks without tokens', () => {
    const { say, match, lies } = rig();
    say([stored([1, 2], 0), stored([1], 0, null, { token_ids: null, block_size: 0, medium: 'STORAGE' })]);
    say([removed(2), removed(1)]);
    expect([match()!.blocks, match()!.byMedium[mediumNumbers.disk], lies]).toEqual([1, 1, noLies]);
  });

  it('numbers ranks over all hosts: a high one is indexed, and more than there is room for are not', () => {
    const { say, blocks, lies, lines } = rig();
    say([stored([1, 2], 0)], 70);
    expect([blocks(), lies]).toEqual([2, noLies]);
    for (let rank = 71; rank < 71 + 64; rank++) say([stored([1, 2], 0)], rank);
    say([stored([1, 2], 0)], 65_536);
    expect(lies).toMatchObject({ too_many_parts: 1, rank: 1 });
    expect(lines).toEqual([
      'KV events of pod: more than 64 ranks and groups; ignored',
      'KV events of pod: data-parallel rank 65536; at most 65535; ignored',
    ]);
  });
});

it('what of them cannot be read is counted, and told in one line: blocks stored alone, or all that was said', () => {
  const { say, blocks, lies, lines } = rig();
  const good = ['BlockStored', [1, 2], null, tokensOf(0, 2), blockTokens, null, 'GPU'];
  const bad = ['BlockStored', [3], 2, 'x', blockTokens, null, 'GPU'];
  // Those after them are no lie.
  const child = ['BlockStored', [4], 3, tokensOf(3, 4), blockTokens, null, 'GPU'];
  for (let i = 0; i < 2; i++) say([good, bad, bad, child]);
  expect([blocks(), lies]).toEqual([2, { ...noLies, unreadable: 4 }]);
  for (let i = 0; i < 2; i++) expect(say([['BlockRemoved', ['x'], 'GPU']])).toEqual(['gap']);
  expect([blocks(), lies]).toEqual([0, { ...noLies, unreadable: 4, unreadable_batch: 2 }]);
  const whose = "does the publisher speak vLLM's encoding?; ignored";
  expect(lines).toEqual([
    `KV events of pod: blocks stored that cannot be read: token_ids is not an array: ${whose}`,
    `KV events of pod: a batch that cannot be read, and all before it: block_hashes: a hash is an integer or at least 8 bytes: ${whose}`,
  ]);
});
