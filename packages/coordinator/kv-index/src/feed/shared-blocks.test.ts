/** Shared tiers, told of by one node at a time, while others go on in the middle of its message. */
import { recordType } from '@kvtier/events';
import { describe, expect, it } from 'vitest';
import { KvIndex } from '../kv-index.ts';
import { keysOf } from '../testing/nodes.ts';
import { mediumNumbers } from './media.ts';
import type { PackedEvent } from './packed-events.ts';
import { SharedBlocks, type Teller } from './shared-blocks.ts';

const { redis } = mediumNumbers;
const nodes = Array.from({ length: 2_000 }, (_, i) => i);
const keys = keysOf(nodes);

const eventOf = (type: number): PackedEvent => ({
  ...{ type, medium: 'REDIS', group: 0, isGroupSaid: false, keys, parent: undefined, blockTokens: 0, kind: undefined },
  ...{ windowTokens: undefined, hasExtra: false, tokens: new Int32Array() },
});

function rig() {
  const index = new KvIndex({ maxBytes: 4 << 20 });
  const shared = new SharedBlocks(index, 1_000_000, () => {});
  const resyncs: string[] = [];
  const [a, b] = ['a', 'b'].map((name): Teller => ({ resync: () => void resyncs.push(name) })) as [Teller, Teller];
  const held = (source: number): number => index.match(keys, [{ sources: [source] }])[0]!.blocks;
  return { index, shared, resyncs, a, b, held };
}

describe('a node that is believed no more in the middle of its message', () => {
  const ends: Record<string, (shared: SharedBlocks, a: Teller) => void> = {
    'has left': (shared, a) => shared.left(a),
    'cannot be relied on, and another can': (shared, a) => shared.judged([], [a]),
    'has a gap': (shared, a) => shared.voided(a),
  };
  for (const [why, end] of Object.entries(ends))
    for (const type of [recordType.stored, recordType.removed] as const)
      it(`${why}: the rest of what it says (${type === recordType.stored ? 'stored' : 'removed'}) counts for nobody`, () => {
        const { index, shared, resyncs, a, b, held } = rig();
        for (const teller of [a, b]) for (const _ of shared.event(teller, 'ns', redis, eventOf(recordType.stored)));
        const work = shared.event(a, 'ns', redis, eventOf(type));
        work.next();
        end(shared, a);
        // A number that is free is given to the next publisher.
        const other = index.addSource();
        index.stored(other, redis, keysOf([1_999]), 'unknown');
        expect(shared.all('ns')).toEqual([]);
        for (const _ of work);
        expect(index.isHeld(keys[2 * 1_999]!, keys[2 * 1_999 + 1]!, { sources: [other] })).toBe(true);
        expect(
          nodes.filter((node) => index.isHeld(keys[2 * node]!, keys[2 * node + 1]!, { sources: [other] })),
        ).toEqual([1_999]);
        expect(held(other)).toBe(0);
        if (why !== 'has a gap') expect(resyncs).toEqual(['b']);
        index.checkIntegrity();
      });

  it('ends nobody’s stream where its number is free', () => {
    const { index, shared, a } = rig();
    const work = shared.event(a, 'ns', redis, eventOf(recordType.stored));
    work.next();
    shared.left(a);
    expect(index.sourceCount).toBe(0);
    expect(() => [...work]).not.toThrow();
    while (index.sweep());
    expect(index.stats().blocks).toBe(0);
  });
});

it('of more namespaces than there is room for, the one that was silent longest goes', () => {
  const { index, shared, a } = rig();
  const say = (namespace: string): void => {
    const event = { type: recordType.stored, keys: keys.subarray(0, 2) };
    for (const _ of shared.event(a, namespace, redis, event));
  };
  for (let i = 0; i < 256; i++) say(`${i}`);
  say('0');
  for (let i = 256; i < 300; i++) say(`${i}`);
  expect([index.sourceCount, shared.namespaces.length]).toEqual([256, 256]);
  const isThere = ['0', '1', '44', '45', '299'].map((namespace) => shared.all(namespace).length);
  expect(isThere).toEqual([1, 0, 0, 1, 1]);
  index.checkIntegrity();
});
