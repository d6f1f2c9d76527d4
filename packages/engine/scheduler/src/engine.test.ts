/** What the engine promises, one rule at a time, over an executor whose outputs show every wrong block. */
import { describe, expect, it } from 'vitest';
import type { Faults } from './testing/faulty-connector.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import type { EngineLimits } from './types.ts';

describe('answers', () => {
  it('are those of a model without blocks, in chunks and token by token', async () => {
    const rig = new SchedulerRig();
    expect(await rig.generate('a', prompt(1, 41), { maxTokens: 9 })).toEqual(naiveAnswer(prompt(1, 41), 9));
    expect(rig.last('a').finishReason).toBe('length');
    expect(rig.executor.steps.map((step) => step.tokenIds.length)).toEqual([16, 16, 9, 1, 1, 1, 1, 1, 1, 1, 1]);
    expect(rig.executor.steps.map((step) => step.sample[0])).toEqual([0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    expect(rig.connector.prefills).toEqual([16, 16, 9]);
  });

  it('end at an end-of-sequence token, which is put out, and not when it is to be ignored', async () => {
    const answer = naiveAnswer(prompt(2, 10), 20);
    const eos = answer[3]!;
    const stopped = naiveAnswer(prompt(2, 10), 20, [eos]);
    const rig = new SchedulerRig({ eosTokenIds: [eos] });
    expect(await rig.generate('a', prompt(2, 10), { maxTokens: 20 })).toEqual(stopped);
    expect(rig.last('a').finishReason).toBe('stop');
    expect(await rig.generate('b', prompt(2, 10), { maxTokens: 20, ignoreEos: true })).toEqual(answer);
    const params = { maxTokens: 20, ignoreEos: true, stopTokenIds: [eos] };
    expect(await rig.generate('c', prompt(2, 10), params)).toEqual(stopped);
  });

  it('end where the model or the pool ends', async () => {
    const model = new SchedulerRig({ maxModelTokens: 20 });
    expect(await model.generate('a', prompt(1, 15), { maxTokens: 50 })).toHaveLength(5);
    const pool = new SchedulerRig({ blockCount: 6 });
    expect(await pool.generate('a', prompt(1, 15), { maxTokens: 50 })).toHaveLength(5);
    expect(pool.last('a').finishReason).toBe('length');
  });

  it('are drawn by seed and position alone', async () => {
    const sampled = { temperature: 1, seed: 42n, maxTokens: 12 };
    const rig = new SchedulerRig();
    const alone = await rig.generate('a', prompt(1, 9), sampled);
    for (let i = 0; i < 5; i++) rig.submit(`other${i}`, prompt(i, 30), { maxTokens: 12 });
    expect(await rig.generate('b', prompt(1, 9), sampled)).toEqual(alone);
    expect(await rig.generate('c', prompt(1, 9), { ...sampled, seed: 43n })).not.toEqual(alone);
  });
});

describe('the prefix cache', () => {
  it('serves the next turn of a conversation, generated tokens too', async () => {
    const rig = new SchedulerRig({ attached: false });
    const first = await rig.generate('first', prompt(1, 20), { maxTokens: 13 });
    const next = [...prompt(1, 20), ...first, 3, 4, 5];
    expect(await rig.generate('second', next)).toEqual(naiveAnswer(next, 4));
    // 32 of the 33 tokens of the first turn have their KV: the last one was drawn, never computed.
    expect(rig.outputs.get('second')![0]!.cache).toMatchObject({
      promptTokens: 36,
      cachedTokens: 32,
      tokensByTier: { engine: 32 },
    });
    expect(rig.outputs.get('second')![1]!.cache).toBeUndefined();
  });

  it('is not shared between salts', async () => {
    const rig = new SchedulerRig({ attached: false });
    await rig.generate('a', prompt(1, 20), { cacheSalt: 'one' });
    await rig.generate('b', prompt(1, 20), { cacheSalt: 'two' });
    await rig.generate('c', prompt(1, 20), { cacheSalt: 'one' });
    expect(rig.outputs.get('b')![0]!.cache!.cachedTokens).toBe(0);
    expect(rig.outputs.get('c')![0]!.cache!.cachedTokens).toBe(16);
  });

  it('is reset only when nothing is held or on its way to the tier', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('a', prompt(1, 20));
    await rig.world.advance();
    expect(rig.engine.resetPrefixCache()).toBe(false);
    await rig.world.until(() => rig.allEnded());
    rig.connector.storingBlocks = 1; // let go, not yet confirmed
    expect(rig.engine.resetPrefixCache()).toBe(false);
    rig.connector.storingBlocks = 0;
    expect(rig.engine.resetPrefixCache()).toBe(true);
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31, cachedBlocks: 0 });
  });
});

describe('the tier', () => {
  it('gives back after a reset what was exported, and a full hit computes one token', async () => {
    const rig = new SchedulerRig();
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(rig.connector.tier.size).toBe(10);
    expect(rig.engine.resetPrefixCache()).toBe(true);
    const stepsBefore = rig.executor.steps.length;
    expect(await rig.generate('b', prompt(1, 40))).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(rig.executor.steps[stepsBefore]!.tokenIds).toHaveLength(1);
    expect(rig.outputs.get('b')![0]!.cache).toMatchObject({ cachedTokens: 39, tokensByTier: { arena: 39 } });
    await rig.drain();
    // What came from the tier is not offered again; only the block that decode filled is new.
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 10, freeBlocks: 31, loads: 1, shortLoads: 0 });
  });

  it('hears of requests that wait behind others, beyond what the engine holds itself', async () => {
    const rig = new SchedulerRig({ limits: { maxSequences: 2 } });
    await rig.generate('a', prompt(1, 40));
    expect(rig.connector.prefetched).toEqual([]);
    for (const [id, first] of [
      ['b', 1],
      ['c', 1],
      ['d', 2],
    ] as const)
      rig.submit(id, prompt(first, 41));
    // 'b' is first in the line, 'c' stands behind it; the queue beyond the next batch is left alone.
    expect(rig.connector.prefetched).toEqual([10]);
    await rig.world.until(() => rig.allEnded());
    expect(rig.tokens('d')).toEqual(naiveAnswer(prompt(2, 41), 4));
  });

  it('continues where the engine’s own pool ends', async () => {
    const rig = new SchedulerRig();
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    rig.engine.resetPrefixCache();
    rig.connector.attached = false;
    await rig.generate('b', prompt(1, 21));
    rig.connector.attached = true;
    expect(await rig.generate('c', prompt(1, 42))).toEqual(naiveAnswer(prompt(1, 42), 4));
    expect(rig.outputs.get('c')![0]!.cache!.tokensByTier).toEqual({ engine: 20, arena: 20 });
  });

  it.each([0, 1, 4])('that brings %i of 10 blocks: the rest is computed', async (brought) => {
    let shorten = 10;
    const rig = new SchedulerRig({ faults: { shorten: () => shorten } });
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    rig.engine.resetPrefixCache();
    shorten = brought;
    expect(await rig.generate('b', prompt(1, 40))).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(rig.outputs.get('b')![0]!.cache!.cachedTokens).toBe(brought * 4);
    expect(rig.engine.stats()).toMatchObject({ loads: 1, shortLoads: 1 });
  });

  it('gets back what it has lost and the engine’s own pool still holds', async () => {
    const rig = new SchedulerRig();
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    const held = new Set(rig.connector.tier.keys());
    expect(held.size).toBe(10);
    rig.connector.tier.clear(); // as a node without a disk that was killed
    await rig.generate('b', prompt(1, 40));
    await rig.drain();
    expect(new Set(rig.connector.tier.keys())).toEqual(held);
  });

  it('that never answers costs its deadline and no more, and others go on meanwhile', async () => {
    const rig = new SchedulerRig({ faults: { silentMatch: () => true }, limits: { matchDeadlineMs: 50 } });
    rig.submit('a', prompt(1, 20));
    await rig.world.advance();
    expect(rig.world.clock.nowUs()).toBe(50_000);
    await rig.world.until(() => rig.ended('a'));
    expect(rig.tokens('a')).toEqual(naiveAnswer(prompt(1, 20), 4));
    expect(rig.engine.stats().expiredMatches).toBe(1);
  });

  it('that breaks its own deadline loses the request, and keeps the blocks until it calls back', async () => {
    let late = false;
    const rig = new SchedulerRig({ faults: { lateLoad: () => late } });
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    rig.engine.resetPrefixCache();
    late = true;
    expect(await rig.generate('b', prompt(1, 40))).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(rig.engine.stats()).toMatchObject({ expiredLoads: 1, freeBlocks: 21 });
    await rig.drain();
    expect(rig.engine.stats().freeBlocks).toBe(31);
    rig.engine.checkIntegrity();
  });

  it('does not get more of the pool than its share, and loses nothing of a chain while the request lives', async () => {
    const rig = new SchedulerRig({ limits: { exportShare: 0.1 } });
    await rig.generate('a', prompt(1, 40), { maxTokens: 12 });
    const { exportedBlocks, skippedExportBlocks } = rig.engine.stats();
    expect(exportedBlocks + skippedExportBlocks).toBe(12);
    await rig.drain();
    expect(rig.connector.tier.size).toBe(exportedBlocks);
    expect(rig.engine.stats()).toMatchObject({ exportBlocks: 0, freeBlocks: 31 });
  });
});

describe('a load that a step imports, layer by layer', () => {
  /** An engine whose tier holds 10 blocks of prompt 1, and that remembers nothing itself. */
  async function warmed(faults: Faults = {}, limits: Partial<EngineLimits> = {}): Promise<SchedulerRig> {
    const rig = new SchedulerRig({ importsByLayer: true, faults, limits });
    await rig.generate('warm', prompt(1, 43));
    await rig.drain();
    rig.engine.resetPrefixCache();
    rig.executor.steps.length = 0;
    rig.connector.prefills.length = 0;
    return rig;
  }
  const layered = (rig: SchedulerRig): number => rig.engine.stats().layeredLoads;

  it('comes in with the first step of a request that is alone', async () => {
    const rig = await warmed();
    expect(await rig.generate('a', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(rig.executor.steps.map((step) => [step.tokenIds.length, step.import?.blockIds.length])).toEqual([
      [3, 10],
      [1, undefined],
      [1, undefined],
      [1, undefined],
    ]);
    expect(rig.outputs.get('a')![0]!.cache).toMatchObject({ cachedTokens: 40, tokensByTier: { arena: 40 } });
    expect(rig.connector.prefills).toEqual([]); // that step's time is no measure of prefill
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ layeredLoads: 1, loads: 1, shortLoads: 0, freeBlocks: 31 });
    // What was imported is found again.
    await rig.generate('b', prompt(1, 43));
    expect(rig.outputs.get('b')![0]!.cache!.tokensByTier).toEqual({ engine: 40 });
  });

  it('imports no block that the step writes to, and may be longer than one step', async () => {
    const aligned = await warmed();
    expect(await aligned.generate('a', prompt(1, 40))).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(aligned.executor.steps[0]!.import!.blockIds).toHaveLength(9);
    const chunked = await warmed({}, { maxStepTokens: 2 });
    expect(await chunked.generate('a', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(chunked.executor.steps.slice(0, 3).map((step) => [step.tokenIds.length, step.import !== undefined])).toEqual(
      [
        [2, true],
        [1, false],
        [1, false],
      ],
    );
  });

  it.each([0, 1, 7])(
    'with a block that fails behind %i good ones: computed from there, nothing given out before',
    async (good) => {
      let shorten = 10;
      const rig = await warmed({ shorten: () => shorten });
      shorten = good;
      expect(await rig.generate('a', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
      const [first, second] = rig.executor.steps;
      expect(first!.import!.blockIds).toHaveLength(10);
      expect(second!.computedTokens[0]).toBe(good * 4);
      expect(rig.outputs.get('a')![0]!.cache!.cachedTokens).toBe(good * 4);
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ layeredLoads: 1, shortLoads: 1, freeBlocks: 31 });
    },
  );

  it('that does not take place, whose session has ended or whose step fails', async () => {
    let refuseImport = true;
    let deadOffer = false;
    const rig = await warmed({ refuseImport: () => refuseImport, deadOffer: () => deadOffer });
    expect(await rig.generate('refused', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    await rig.drain();
    rig.engine.resetPrefixCache();
    refuseImport = false;
    deadOffer = true;
    expect(await rig.generate('dead', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(layered(rig)).toBe(1);
    await rig.drain();
    expect(rig.engine.stats().freeBlocks).toBe(31);

    let fail = false;
    const broken = new SchedulerRig({
      importsByLayer: true,
      stepFailure: () => (fail ? new Error('a fault') : undefined),
    });
    await broken.generate('warm', prompt(1, 43));
    await broken.drain();
    broken.engine.resetPrefixCache();
    fail = true;
    await broken.generate('a', prompt(1, 43));
    expect(broken.last('a').error).toMatchObject({ message: 'a fault' });
    fail = false;
    expect(await broken.generate('b', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(layered(broken)).toBe(2);
    await broken.drain();
    expect(broken.engine.stats()).toMatchObject({ freeBlocks: 31, loading: 0 });
    broken.engine.checkIntegrity();
  });

  it('is copied beside the steps where anybody else is served', async () => {
    const rig = await warmed();
    rig.submit('other', prompt(2, 9), { maxTokens: 40 });
    await rig.world.until(() => rig.outputs.get('other')!.length > 2);
    expect(await rig.generate('a', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    expect(rig.ended('other')).toBe(false);
    expect(layered(rig)).toBe(0);
    expect(rig.outputs.get('a')![0]!.cache!.tokensByTier).toEqual({ arena: 40 });
  });

  it('whose request is aborted under the step gives its blocks back when that has ended', async () => {
    const rig = await warmed();
    rig.submit('a', prompt(1, 43));
    await rig.world.until(() => rig.executor.steps.length === 1);
    rig.engine.abort('a');
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 20, running: 0, loading: 1 });
    expect(await rig.generate('b', prompt(1, 43))).toEqual(naiveAnswer(prompt(1, 43), 4));
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31, loading: 0 });
    rig.engine.checkIntegrity();
  });
});

describe('many requests', () => {
  it('run together, decodes before prefills', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('short', prompt(1, 3), { maxTokens: 6 });
    await rig.world.until(() => rig.tokens('short').length === 1);
    rig.submit('long', prompt(2, 50), { maxTokens: 2 });
    await rig.world.until(() => rig.allEnded());
    const mixed = rig.executor.steps.filter((step) => step.queryTokens.length === 2);
    expect(mixed.slice(0, 3).map((step) => [...step.queryTokens])).toEqual([
      [1, 15],
      [1, 15],
      [1, 15],
    ]);
    expect(rig.tokens('long')).toEqual(naiveAnswer(prompt(2, 50), 2));
  });

  it('that outgrow the pool: the latest starts over, and every answer is right', async () => {
    const rig = new SchedulerRig({ blockCount: 12, attached: false });
    for (let i = 0; i < 4; i++) rig.submit(`r${i}`, prompt(i, 7), { maxTokens: 25 });
    await rig.world.until(() => rig.allEnded());
    for (let i = 0; i < 4; i++) expect(rig.tokens(`r${i}`)).toEqual(naiveAnswer(prompt(i, 7), 25));
    expect(rig.engine.stats().preemptions).toBeGreaterThan(0);
    expect(rig.engine.stats().freeBlocks).toBe(11);
  });

  it('beyond what may wait are refused with BUSY', () => {
    const rig = new SchedulerRig({ limits: { maxWaiting: 2 } });
    rig.submit('a', prompt(1, 4));
    rig.submit('b', prompt(1, 4));
    expect(() => rig.submit('c', prompt(1, 4))).toThrow(expect.objectContaining({ code: 'BUSY', retry: true }));
  });
});

describe('when blocks are short', () => {
  it('a request that decodes gives up its place in the very step to an older one that prefills', async () => {
    let silent = true;
    const rig = new SchedulerRig({
      blockCount: 12,
      limits: { maxStepTokens: 8 },
      faults: { silentMatch: () => silent },
    });
    rig.submit('older', prompt(1, 32));
    silent = false;
    rig.submit('younger', prompt(2, 8), { maxTokens: 12 });
    await rig.world.until(() => rig.tokens('younger').length === 2);
    rig.world.fireNextTimer();
    await rig.world.until(() => rig.allEnded());
    expect(rig.engine.stats().preemptions).toBeGreaterThan(0);
    expect(rig.tokens('older')).toEqual(naiveAnswer(prompt(1, 32), 4));
    expect(rig.tokens('younger')).toEqual(naiveAnswer(prompt(2, 8), 12));
  });

  it('what a younger request has loaded is given up for an older one', async () => {
    let silent = false;
    const rig = new SchedulerRig({ blockCount: 12, faults: { silentMatch: () => silent } });
    await rig.generate('warm', prompt(2, 20));
    await rig.drain();
    rig.engine.resetPrefixCache();
    silent = true;
    rig.submit('older', prompt(1, 36));
    silent = false;
    rig.submit('younger', prompt(2, 22));
    await rig.world.until(() => rig.engine.stats().loading === 1);
    rig.world.fireNextTimer();
    await rig.world.until(() => rig.allEnded());
    expect(rig.defects).toEqual([]);
    const { hitTokens, loadedTokens, ...stats } = rig.engine.stats();
    expect(stats).toMatchObject({ preemptions: 1, expiredMatches: 1 });
    // The first block is left of what was loaded, and is a hit; the rest is loaded again. What it gave up counts no more.
    expect([stats.promptTokens, hitTokens, loadedTokens]).toEqual([78, 4, 16]);
    expect(rig.tokens('older')).toEqual(naiveAnswer(prompt(1, 36), 4));
    expect(rig.tokens('younger')).toEqual(naiveAnswer(prompt(2, 22), 4));
  });

  it('a request waits for an export to end, and goes on when it does', async () => {
    const rig = new SchedulerRig({ blockCount: 12, limits: { exportShare: 1 } });
    const exports: (() => void)[] = [];
    rig.connector.store = (_hashes, _first, _blocks, onReleased) => exports.push(onReleased);
    await rig.generate('a', prompt(1, 40));
    rig.submit('b', prompt(2, 40));
    await rig.world.until(() => rig.world.pendingCount === 0);
    expect(rig.engine.stats()).toMatchObject({ waiting: 1, running: 0, exportBlocks: 10 });
    for (const release of exports.splice(0)) release();
    await rig.world.until(() => rig.ended('b'));
    expect(rig.tokens('b')).toEqual(naiveAnswer(prompt(2, 40), 4));
  });
});

describe('an abort', () => {
  it('while waiting, mid-step and mid-load ends the request at once and frees its blocks when it is safe', async () => {
    const rig = new SchedulerRig();
    await rig.generate('warm', prompt(1, 40));
    await rig.drain();
    rig.engine.resetPrefixCache();
    rig.submit('loading', prompt(1, 40));
    await rig.world.until(() => rig.engine.stats().loading === 1);
    expect(rig.engine.abort('loading')).toBe(true);
    expect(rig.last('loading')).toEqual({ tokenIds: [], finishReason: 'abort' });
    expect(rig.engine.stats()).toMatchObject({ loading: 1, freeBlocks: 21 });
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ loading: 0, freeBlocks: 31, waiting: 0 });

    rig.connector.attached = false;
    const stepsBefore = rig.executor.steps.length;
    rig.submit('running', prompt(2, 40));
    rig.submit('running too', prompt(3, 8));
    while (rig.executor.steps.length === stepsBefore) await new Promise(setImmediate);
    rig.submit('waiting', prompt(4, 8));
    rig.engine.abort('running');
    rig.engine.abort('waiting');
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 27 });
    expect(rig.engine.abort('running')).toBe(false);
    await rig.world.until(() => rig.ended('running too'));
    expect(rig.tokens('running too')).toEqual(naiveAnswer(prompt(3, 8), 4));
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31, aborted: 3 });
    // The same id may be used again at once.
    expect(await rig.generate('running', prompt(2, 40))).toEqual(naiveAnswer(prompt(2, 40), 4));
  });

  it('out of another request’s output callback, in the same step', async () => {
    const rig = new SchedulerRig({ attached: false });
    const params = { maxTokens: 5, temperature: 0, topK: 0, topP: 1, promptTokenIds: Int32Array.from([1, 2, 3, 4]) };
    const seen: string[] = [];
    rig.engine.submit({ ...params, requestId: 'a' }, (output) => {
      seen.push(`a ${output.finishReason}`);
      rig.engine.abort('b');
      throw new Error('the callback fails, too');
    });
    rig.engine.submit({ ...params, requestId: 'b' }, (output) => seen.push(`b ${output.finishReason}`));
    await rig.world.until(() => seen.length >= 3);
    expect(seen).toEqual(['a ', 'b abort', 'a abort']);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31, running: 0 });
    expect(rig.defects).toEqual([]);
  });
});

describe('a step that fails', () => {
  it('fails its requests, leaves nothing of its blocks to be found, and the engine goes on', async () => {
    let fail = true;
    const rig = new SchedulerRig({ stepFailure: () => (fail ? new Error('the device is gone') : undefined) });
    await rig.generate('a', prompt(1, 20));
    expect(rig.last('a').error).toMatchObject({ code: 'IO', message: 'the device is gone' });
    for (let i = 0; i < 3; i++) await rig.generate(`b${i}`, prompt(1, 20));
    expect(rig.executor.steps).toHaveLength(4);
    fail = false;
    expect(await rig.generate('c', prompt(1, 20))).toEqual(naiveAnswer(prompt(1, 20), 4));
    expect(rig.outputs.get('c')![0]!.cache!.cachedTokens).toBe(0);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ failed: 4, failedSteps: 4, finished: 1, freeBlocks: 31 });
  });
});

describe('closing', () => {
  it('fails what is left, waits for what is in flight, and takes nothing more', async () => {
    const rig = new SchedulerRig();
    rig.submit('a', prompt(1, 20));
    rig.submit('b', prompt(2, 20));
    await rig.world.until(() => rig.engine.stats().running > 0);
    let closed = false;
    const closing = rig.engine.close().then(() => {
      closed = true;
    });
    expect(rig.last('a').error).toMatchObject({ code: 'CANCELLED' });
    expect(rig.last('b').error).toMatchObject({ code: 'CANCELLED' });
    expect(() => rig.submit('c', [1])).toThrow(expect.objectContaining({ code: 'CANCELLED' }));
    await rig.world.until(() => closed);
    await closing;
    expect(rig.engine.stats()).toMatchObject({ freeBlocks: 31, running: 0, waiting: 0 });
  });
});
