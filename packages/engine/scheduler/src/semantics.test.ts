/**
 * The rules of vLLM's scheduler around its KV-cache manager (prefix-cache semantics, 2.8), one case per sentence, and the
 * options of the block pool as a whole engine shows them. What does not apply: synchronous loads (there are none: a load
 * never holds up a step), hits that end inside a block and hits that a connector extends group by group (both need a Mamba group,
 * and the executor has none), blocks that must be zeroed before use (its attention reads no token that no step or load has written),
 * encoders.
 */
import { ChainHasher, type TokenIds } from '@kvtier/identity';
import { describe, expect, it } from 'vitest';
import { naiveAnswer, prompt, type RigOptions, SchedulerRig } from './testing/rig.ts';

/** A rig whose tier holds the first `length` tokens of prompt 1, and whose own pool is empty. */
async function warmTier(length: number, options: RigOptions = {}): Promise<SchedulerRig> {
  const rig = new SchedulerRig(options);
  await rig.generate('warm', prompt(1, length));
  await rig.drain();
  expect(rig.engine.resetPrefixCache()).toBe(true);
  return rig;
}

describe('the connector', () => {
  it('is asked only while nothing is computed, with the local hit in whole blocks', async () => {
    const rig = await warmTier(40);
    rig.connector.attached = false;
    await rig.generate('local', prompt(1, 22)); // 5 blocks of 4 and a rest
    rig.connector.attached = true;
    const asked: { localBlocks: number; steps: number }[] = [];
    const match = rig.connector.match.bind(rig.connector);
    rig.connector.match = (...question) => {
      asked.push({ localBlocks: question[2], steps: rig.executor.steps.length });
      return match(...question);
    };
    const steps = rig.executor.steps.length;
    await rig.generate('a', prompt(1, 60), { maxTokens: 6 });
    expect(asked.length).toBeGreaterThan(0);
    for (const one of asked) expect(one).toEqual({ localBlocks: 5, steps });
    expect(rig.outputs.get('a')![0]!.cache!.tokensByTier).toEqual({ engine: 20, arena: 20 });
  });

  it('that does not know yet has its request skipped in this step, others go on, and it is asked again', async () => {
    let silent = true;
    const rig = new SchedulerRig({ faults: { silentMatch: () => silent }, limits: { matchDeadlineMs: 50 } });
    rig.submit('asks', prompt(1, 20));
    silent = false;
    rig.submit('goes', prompt(2, 20), { maxTokens: 3 });
    await rig.world.until(() => rig.ended('goes'));
    expect(rig.tokens('asks')).toEqual([]);
    expect(rig.engine.stats()).toMatchObject({ waiting: 1, running: 0, expiredMatches: 0 });
    await rig.world.until(() => rig.ended('asks'));
    expect(rig.tokens('asks')).toEqual(naiveAnswer(prompt(1, 20), 4));
  });
});

describe('an asynchronous load', () => {
  it('takes blocks and computes nothing, and they are findable when it has ended', async () => {
    const rig = await warmTier(40, { faults: {} });
    const steps = rig.executor.steps.length;
    rig.submit('a', prompt(1, 40));
    await rig.world.until(() => rig.engine.stats().loading === 1);
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31 - 10, cachedBlocks: 0, running: 0, waiting: 0 });
    expect(rig.executor.steps).toHaveLength(steps);
    await rig.world.until(() => rig.ended('a'));
    expect(rig.engine.stats().cachedBlocks).toBe(10);
  });

  it('of a whole prompt goes back to its last token: one is computed', async () => {
    const rig = await warmTier(40);
    const steps = rig.executor.steps.length;
    await rig.generate('a', prompt(1, 40));
    const first = rig.executor.steps[steps]!;
    expect([[...first.computedTokens], [...first.queryTokens], [...first.sample]]).toEqual([[39], [1], [1]]);
  });

  it('is admitted only into what prefills in flight leave over', async () => {
    // 16 blocks; a prefill of 10 blocks is at its first chunk of 4 when the load of 10 comes: 6 are promised, 12 - 6 < 10.
    const rig = await warmTier(40, { blockCount: 17, limits: { maxStepTokens: 16 } });
    rig.submit('prefill', prompt(2, 40), { maxTokens: 1 });
    await rig.world.until(() => rig.engine.stats().running === 1);
    expect(rig.engine.stats().freeBlocks).toBe(12);
    rig.submit('load', prompt(1, 40), { maxTokens: 1 });
    await rig.world.until(() => {
      const { running, loading, exportBlocks } = rig.engine.stats();
      expect(running + loading).toBeLessThanOrEqual(1);
      return rig.allEnded() && exportBlocks === 0;
    });
    expect(rig.engine.stats()).toMatchObject({ loads: 1, preemptions: 0, freeBlocks: 16 });
    expect(rig.tokens('load')).toEqual(naiveAnswer(prompt(1, 40), 1));
  });
});

describe('blocks', () => {
  it('of a request that ends while its step runs are free when the step is over, not before', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('a', prompt(1, 12));
    await rig.world.until(() => rig.world.pendingCount === 1); // the step runs
    expect(rig.engine.stats().freeBlocks).toBe(28);
    rig.engine.abort('a');
    expect(rig.engine.stats().freeBlocks).toBe(28);
    await rig.world.advance();
    expect(rig.engine.stats().freeBlocks).toBe(31);
  });

  it('of a step become findable when it has ended: nobody hits what is not written', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('a', prompt(1, 12));
    rig.submit('b', prompt(1, 12));
    await rig.world.until(() => rig.world.pendingCount === 1);
    expect(rig.engine.stats().cachedBlocks).toBe(0);
    await rig.world.until(() => rig.allEnded());
    expect([rig.tokens('a'), rig.tokens('b')]).toEqual(Array(2).fill(naiveAnswer(prompt(1, 12), 4)));
  });

  it('of a preempted request are let go, and it starts over with what is still cached', async () => {
    const rig = new SchedulerRig({ blockCount: 12, attached: false });
    rig.submit('older', prompt(1, 16), { maxTokens: 20 });
    rig.submit('younger', prompt(2, 16), { maxTokens: 20 });
    await rig.world.until(() => rig.engine.stats().preemptions === 1);
    expect(rig.engine.stats()).toMatchObject({ running: 1, waiting: 1 });
    await rig.world.until(() => rig.allEnded());
    // What it starts over with is no hit of its prompt; computed anew is a part of it.
    expect(rig.engine.stats()).toMatchObject({ promptTokens: 32, hitTokens: 0 });
    expect(rig.engine.stats().prefillTokens).toBeLessThan(32 + 16);
    expect(rig.tokens('younger')).toEqual(naiveAnswer(prompt(2, 16), 20));
  });

  it('a full hit of the engine’s own computes its last block again, never nothing', async () => {
    const rig = new SchedulerRig({ attached: false });
    await rig.generate('a', prompt(1, 16));
    const steps = rig.executor.steps.length;
    await rig.generate('b', prompt(1, 16));
    expect(rig.executor.steps[steps]!.tokenIds).toHaveLength(4);
    for (const step of rig.executor.steps) expect(Math.min(...step.queryTokens)).toBeGreaterThan(0);
  });
});

/** Its hashes are all equal: whatever two blocks hold, they collide. */
class CollidingHasher extends ChainHasher {
  constructor() {
    super({ algorithm: 'xxhash_cbor', blockTokens: 4 });
  }

  override hashInto(out: Uint8Array, _parent: Uint8Array | null, tokens: TokenIds): number {
    const count = tokens.length / this.blockTokens;
    out.fill(7, 0, count * this.hashBytes);
    return count;
  }
}

describe('options of the block pool', () => {
  it('hashes that collide cost hits and no wrong answer', async () => {
    const rig = new SchedulerRig({ attached: false, hasher: new CollidingHasher() });
    for (const which of [1, 2, 1])
      expect(await rig.generate(`${which} ${rig.outputs.size}`, prompt(which, 21))).toEqual(
        naiveAnswer(prompt(which, 21), 4),
      );
    expect(rig.engine.stats().hitTokens).toBe(20);
    rig.engine.checkIntegrity();
  });

  it('de-duplication: the step after the one that filled equal blocks names one of them', async () => {
    const rig = new SchedulerRig({ attached: false, dedupBlocks: true, limits: { maxStepTokens: 64 } });
    rig.submit('a', prompt(1, 9), { maxTokens: 6 });
    rig.submit('b', prompt(1, 9), { maxTokens: 6 });
    await rig.world.until(() => rig.allEnded());
    const [first, second] = rig.executor.steps.map(({ blockTables, blockTableStride: stride }) => [
      [...blockTables.slice(0, stride)],
      [...blockTables.slice(stride, 2 * stride)],
    ]);
    expect(first).toEqual([
      [1, 2, 3],
      [4, 5, 6],
    ]); // prettier-ignore
    expect(second).toEqual([
      [1, 2, 3],
      [1, 2, 6],
    ]); // prettier-ignore
    expect([rig.tokens('a'), rig.tokens('b')]).toEqual(Array(2).fill(naiveAnswer(prompt(1, 9), 6)));
    rig.engine.checkIntegrity();
  });

  it('a pinned prefix is hit after any number of others, and takes its share of what a request can be', async () => {
    const rig = new SchedulerRig({ attached: false, blockCount: 17, maxPinnedBlocks: 4 });
    expect(rig.engine.maxTotalTokens).toBe(12 * 4);
    await rig.generate('system', prompt(1, 16), { maxTokens: 1 });
    // As whoever cannot tell whether the first one was taken asks again.
    for (let again = 0; again < 2; again++)
      expect(rig.engine.pinPrefix('system', Int32Array.from(prompt(1, 16)))).toBe(16);
    for (let i = 0; i < 6; i++) await rig.generate(`other ${i}`, prompt(2 + i, 44), { maxTokens: 4 });
    await rig.generate('again', [...prompt(1, 16), 3]);
    expect(rig.outputs.get('again')![0]!.cache!.cachedTokens).toBe(16);
    expect(rig.engine.resetPrefixCache()).toBe(false);
    expect([rig.engine.unpinPrefix('system'), rig.engine.unpinPrefix('system')]).toEqual([true, false]);
    expect(rig.engine.resetPrefixCache()).toBe(true);
  });

  it.each<[string, RigOptions]>([
    ['dedupBlocks', { dedupBlocks: true }],
    ['evictionPolicy', { evictionPolicy: 'lfu' }],
    ['maxPinnedBlocks', { maxPinnedBlocks: 1 }],
  ])('are refused with the radix tree: %s', (_name, options) => {
    expect(() => new SchedulerRig({ ...options, prefixCache: 'radix' })).toThrow(
      'are options of hashed blocks; set prefixCache (--prefix-cache) to blocks or leave them out',
    );
  });

  it('events tell the hits of a request that asks for all of its blocks, and of no other', async () => {
    const types: string[] = [];
    const rig = new SchedulerRig({
      attached: false,
      onEvents: (events) => types.push(...events.map(({ type }) => type)),
    });
    await rig.generate('a', prompt(1, 9), { maxTokens: 1 });
    await rig.generate('again', prompt(1, 9), { maxTokens: 1 });
    expect(types).toEqual(['BlockStored']);
    await rig.generate('full', prompt(1, 9), { maxTokens: 1, kvCacheReportMode: 'full' });
    expect(types).toEqual(['BlockStored', 'BlockStored']);
    expect(() => rig.submit('odd', prompt(1, 9), { kvCacheReportMode: 'odd' })).toThrow(
      'kvCacheReportMode is "odd"; use "full" or leave it out',
    );
  });

  it('events tell the tokens, the salt and the parents of what is stored', async () => {
    const stored: unknown[] = [];
    const rig = new SchedulerRig({ attached: false, onEvents: (events) => stored.push(...events) });
    await rig.generate('a', prompt(1, 9), { maxTokens: 1, cacheSalt: 'tenant' });
    expect(stored).toMatchObject([
      {
        type: 'BlockStored',
        parentBlockHash: null,
        tokenIds: prompt(1, 8),
        blockSize: 4,
        extraKeys: [['tenant'], null],
        loraName: null,
      },
    ]);
  });
});
