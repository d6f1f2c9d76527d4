/** What the engine says about its prefix cache, through the wire's encoding into a router's index, is what it holds. */
import { decodeBatch, encodeBatch } from '@kvtier/events';
import { NaiveHolders } from '@kvtier/events/testing';
import { type KvCacheEvent, prefixCacheKinds } from '@kvtier/prefix-cache';
import { expect, it } from 'vitest';
import { prompt, SchedulerRig } from './testing/rig.ts';

it.each(prefixCacheKinds)(
  'an index that follows the events of %s knows what can be hit, step after step',
  async (prefixCache) => {
    const index = new NaiveHolders();
    const removed: KvCacheEvent[] = [];
    // A router that comes when much has been stored and evicted already.
    let late: NaiveHolders | undefined;
    let seq = 0;
    const onEvents = (events: readonly KvCacheEvent[]): void => {
      expect(events.length).toBeGreaterThan(0);
      removed.push(...events.filter(({ type }) => type === 'BlockRemoved'));
      const batch = decodeBatch(encodeBatch({ ts: seq, events, dataParallelRank: 0 }));
      index.apply('engine', { kind: 'batch', seq, topic: '', batch });
      late?.apply('engine', { kind: 'batch', seq, topic: '', batch });
      seq++;
    };
    const rig = new SchedulerRig({ attached: false, blockCount: 16, onEvents, prefixCache });
    for (let i = 0; i < 40; i++) {
      // Few different prompts over a pool that holds about four: hits, evictions, and duplicates by running at once.
      await Promise.all([i % 5, (i * i) % 7].map((which, j) => rig.generate(`${i} ${j}`, prompt(which, 9 + which))));
      expect(index.blocks).toBe(rig.engine.stats().cachedBlocks);
      expect(late?.blocks ?? index.blocks).toBe(index.blocks);
      if (i !== 20) continue;
      late = new NaiveHolders();
      for (const events of rig.engine.heldEvents()) {
        const batch = decodeBatch(encodeBatch({ ts: 0, events, dataParallelRank: 0 }));
        late.apply('engine', { kind: 'batch', seq, topic: '', batch });
      }
      expect(late.blocks).toBe(index.blocks);
    }
    expect(late?.unknownRemovals).toBe(0);
    expect(removed.length).toBeGreaterThan(20);
    expect(index.unknownRemovals).toBe(0);
    expect(rig.engine.takeEvents()).toEqual([]);

    expect(rig.engine.resetPrefixCache()).toBe(true);
    expect(index.blocks).toBe(0);
  },
);
