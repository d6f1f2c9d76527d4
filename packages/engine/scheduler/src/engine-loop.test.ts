/** What happens between two steps, and in which order. */
import { InvariantError, KvError } from '@kvtier/errors';
import { prefixCacheKinds } from '@kvtier/prefix-cache';
import { describe, expect, it } from 'vitest';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import type { GenerateRequest } from './types.ts';

const request = (requestId: string, params: Partial<GenerateRequest>): GenerateRequest => ({
  ...{ requestId, promptTokenIds: Int32Array.from(prompt(1, 9)), maxTokens: 4, temperature: 0, topK: 0, topP: 1 },
  ...params,
});

describe('a step', () => {
  it('is launched before callers hear of the tokens of the step before', async () => {
    const rig = new SchedulerRig({ attached: false });
    const seen: string[] = [];
    const { execute } = rig.executor;
    rig.executor.execute = (step) => {
      seen.push('launch');
      return execute.call(rig.executor, step);
    };
    rig.engine.submit(request('a', { maxTokens: 3 }), ({ tokenIds, finishReason }) =>
      seen.push(`${tokenIds.length}${finishReason}`),
    );
    await rig.world.until(() => seen.at(-1) === '1length');
    expect(seen).toEqual(['launch', 'launch', '1', 'launch', '1', '1length']);
  });

  it('stores what it filled when what callers were told of it has left the process', async () => {
    const rig = new SchedulerRig();
    const seen: string[] = [];
    rig.connector.store = (_hashes, first, blocks, onReleased) => {
      seen.push(`store ${first + blocks.length}`);
      rig.world.later(onReleased);
    };
    rig.engine.submit(request('a', { maxTokens: 1 }), ({ finishReason }) => {
      seen.push(finishReason);
      setImmediate(() => seen.push('left'));
    });
    await rig.world.until(() => seen.length === 3);
    expect(seen).toEqual(['length', 'left', 'store 2']);
  });

  it('is told with what it took from its launch on, not only on the executor’s threads', async () => {
    const rig = new SchedulerRig();
    const { execute } = rig.executor;
    rig.executor.execute = async (step) => {
      const result = await execute.call(rig.executor, step);
      await new Promise<void>((resolve) => void rig.world.clock.after(3, resolve));
      return { ...result, elapsedUs: 10 };
    };
    const told: number[] = [];
    rig.connector.observePrefill = (_tokens: number, _positions?: number, elapsedUs?: number) =>
      void told.push(elapsedUs!);
    rig.engine.submit(request('a', { maxTokens: 1 }), () => {});
    await rig.world.until(() => told.length > 0);
    expect(told[0]).toBeGreaterThanOrEqual(3_000);
  });

  it('that computes what a hit leaves beside a stream says nothing of how fast prompts are; a chunk of a long one does', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('stream', prompt(1, 16), { maxTokens: 60 });
    await rig.world.until(() => rig.tokens('stream').length > 2);
    const measured = rig.engine.load().prefillTokensPerS;
    expect(measured).toBeGreaterThan(0);
    for (const id of ['hit', 'another']) rig.submit(id, prompt(1, 16), { maxTokens: 1 }); // in one step
    await rig.world.until(() => rig.ended('hit') && rig.ended('another'));
    expect(rig.engine.load().prefillTokensPerS).toBe(measured);
    await rig.generate('long', prompt(2, 40), { maxTokens: 1 });
    expect(rig.engine.load().prefillTokensPerS).not.toBe(measured);
    expect(rig.ended('stream')).toBe(false);
  });

  it('whose tokens are being told: who is ended by another one’s callback hears of nothing after its end', async () => {
    const rig = new SchedulerRig({ attached: false });
    const told: string[] = [];
    const submit = (id: string, onToken: () => void): void =>
      rig.engine.submit(request(id, { maxTokens: 6 }), ({ tokenIds, finishReason }) => {
        told.push(`${id} ${finishReason || tokenIds.length}`);
        onToken();
      });
    submit('a', () => rig.engine.abort('b'));
    submit('b', () => {});
    submit('c', () => {});
    await rig.world.until(() => told.includes('a length') && told.includes('c length'));
    expect(told.filter((line) => line.startsWith('b'))).toEqual(['b abort']);
    expect(told.filter((line) => line.startsWith('c'))).toEqual(['c 1', 'c 1', 'c 1', 'c 1', 'c 1', 'c length']);
    rig.engine.checkIntegrity();
  });

  it('that fails to be put together leaves no token untold', async () => {
    const rig = new SchedulerRig({ attached: false });
    const told: string[] = [];
    const { execute } = rig.executor;
    let steps = 0;
    rig.executor.execute = (step) => {
      if (++steps === 3) throw new Error('a defect');
      return execute.call(rig.executor, step);
    };
    rig.engine.submit(request('a', { maxTokens: 6 }), ({ tokenIds, error }) =>
      told.push(error ? error.code : String(tokenIds[0])),
    );
    await rig.world.until(() => rig.defects.length > 0);
    expect(told).toEqual([...naiveAnswer(prompt(1, 9), 2).map(String), 'IO']);
  });
});

describe('a defect', () => {
  it.each([
    [
      new InvariantError('a count is off'),
      { code: 'IO', message: /^engine: stopped by a defect: a count is off; restart it$/ },
    ],
    [new KvError('GPU', 'gpu 0: a fault', { retry: true }), { code: 'GPU', message: /^gpu 0: a fault$/ }],
  ])(
    'sends every answer elsewhere, and whatever comes until the process ends: %s',
    async (thrown, { code, message }) => {
      const drains: boolean[] = [];
      let look = (): void => {};
      const rig = new SchedulerRig({ attached: false, onLoad: () => look() });
      look = () => drains.push(rig.engine.draining);
      const { execute } = rig.executor;
      let steps = 0;
      rig.executor.execute = (step) => (++steps === 3 ? Promise.reject(thrown) : execute.call(rig.executor, step));
      rig.submit('begun', prompt(1, 9), { maxTokens: 6 });
      await rig.world.until(() => rig.executor.steps.length === 2);
      rig.submit('waiting', prompt(2, 9));
      expect(drains.at(-1)).toBe(false);
      await rig.world.until(() => rig.defects.length > 0);
      const elsewhere = { code, message: expect.stringMatching(message), retry: true };
      expect(rig.tokens('begun')).toEqual(naiveAnswer(prompt(1, 9), 2));
      for (const id of ['begun', 'waiting']) expect(rig.last(id).error).toMatchObject(elsewhere);
      expect(() => rig.submit('new', prompt(3, 9))).toThrow(expect.objectContaining(elsewhere));
      expect(rig.engine.draining).toBe(true);
      expect(drains.at(-1)).toBe(true); // whoever watches is told
    },
  );
});

describe('a draw that is no token', () => {
  it.each([-1, 50])(
    '(%i) fails its request alone: the others go on, and nothing of it is kept or stored',
    async (drawn) => {
      const rig = new SchedulerRig({ blockCount: 64 });
      const { execute } = rig.executor;
      let spoils = true;
      rig.executor.execute = async (step) => {
        const result = await execute.call(rig.executor, step);
        // The last chunk of the prompt, and what decodes beside it.
        const at = step.queryTokens.findIndex(
          (queries, i) => queries > 1 && step.computedTokens[i]! > 0 && step.sample[i] === 1,
        );
        if (at >= 0 && spoils) result.tokenIds[at] = drawn;
        return result;
      };
      rig.submit('sound', prompt(1, 9), { maxTokens: 12 });
      await rig.world.until(() => rig.tokens('sound').length > 0);
      rig.submit('spoiled', prompt(2, 26)); // a chunk of 15 tokens, and 11
      await rig.world.until(() => rig.allEnded());
      expect(rig.last('spoiled').error).toMatchObject({
        code: 'MODEL',
        message: expect.stringMatching(
          drawn < 0 ? /^request spoiled: its logits .*bf16/ : /drew token 50, which is not/,
        ),
      });
      expect(rig.tokens('spoiled')).toEqual([]);
      expect(rig.tokens('sound')).toEqual(naiveAnswer(prompt(1, 9), 12));
      await rig.drain();
      expect(rig.connector.tier.size).toBe(5); // of 20 tokens of the sound one, whose last one is not computed any more
      expect(rig.engine.stats()).toMatchObject({ failed: 1, failedSteps: 0, finished: 1, freeBlocks: 63 });
      rig.engine.checkIntegrity();
      spoils = false;
      expect(await rig.generate('again', prompt(2, 26))).toEqual(naiveAnswer(prompt(2, 26), 4));
      expect(rig.outputs.get('again')![0]!.cache!.cachedTokens).toBe(12); // blocks of the chunk before
    },
  );

  describe.each(prefixCacheKinds)('over a block that is damaged, with %s', (prefixCache) => {
    const damage = 0xbadbad;
    /** Whoever reads a damaged block draws no token. */
    function damaged(rig: SchedulerRig) {
      const { execute } = rig.executor;
      rig.executor.execute = async (step) => {
        const result = await execute.call(rig.executor, step);
        for (let i = 0; i < step.queryTokens.length; i++) {
          const row = step.blockTables.subarray(i * step.blockTableStride);
          const blocks = Math.ceil((step.computedTokens[i]! + step.queryTokens[i]!) / 4);
          const reads = [...row.subarray(0, blocks)].some((block) => rig.executor.block(block)[0] === damage);
          if (reads && step.sample[i]) result.tokenIds[i] = -1;
        }
        return result;
      };
    }
    const system = prompt(1, 12);
    const ask = (which: number): number[] => [...system, which, 3, 4];

    it('who hits it begins anew, alone or in the middle of an answer, and nobody finds it again', async () => {
      const rig = new SchedulerRig({ blockCount: 64, attached: false, prefixCache });
      damaged(rig);
      rig.submit('stream', ask(5), { maxTokens: 30 });
      await rig.world.until(() => rig.tokens('stream').length >= 8);
      expect(await rig.generate('hit', ask(6))).toEqual(naiveAnswer(ask(6), 4));
      expect(rig.outputs.get('hit')![0]!.cache!.cachedTokens).toBe(12);
      rig.submit('late', ask(7), { maxTokens: 30 });
      await rig.world.until(() => rig.tokens('late').length >= 2);
      rig.executor.block(rig.executor.steps.at(-1)!.blockTables[1]!).fill(damage);
      await rig.world.until(() => rig.ended('late') && rig.ended('stream'));
      expect(rig.tokens('late')).toEqual(naiveAnswer(ask(7), 30));
      // What it reads it has computed itself: it may as well be its own doing.
      expect(rig.last('stream').error).toMatchObject({ code: 'MODEL' });
      expect(await rig.generate('next', ask(8))).toEqual(naiveAnswer(ask(8), 4));
      expect(rig.outputs.get('next')![0]!.cache!.cachedTokens).toBe(12);
      expect(rig.engine.stats()).toMatchObject({
        failed: 1,
        finished: 3,
        preemptions: 0,
        begunAnew: 1,
        freeBlocks: 63,
      });
      rig.engine.checkIntegrity();
    });

    it('whose own it is fails once, and a request after it not at all', async () => {
      const rig = new SchedulerRig({ blockCount: 64, attached: false, prefixCache });
      damaged(rig);
      rig.submit('first', ask(5), { maxTokens: 30 });
      await rig.world.until(() => rig.tokens('first').length >= 2);
      rig.executor.block(rig.executor.steps.at(-1)!.blockTables[1]!).fill(damage);
      await rig.world.until(() => rig.ended('first'));
      expect(rig.last('first').error).toMatchObject({ code: 'MODEL' });
      for (const which of [6, 7])
        expect(await rig.generate(`${which}`, ask(which))).toEqual(naiveAnswer(ask(which), 4));
      const cached = ['6', '7'].map((name) => rig.outputs.get(name)![0]!.cache!.cachedTokens);
      expect([cached, rig.engine.stats().begunAnew]).toEqual([[0, 12], 1]);
      rig.engine.checkIntegrity();
    });

    it('that it hits when it comes back from a preemption: it begins anew, too', async () => {
      const rig = new SchedulerRig({ blockCount: 12, attached: false, prefixCache });
      damaged(rig);
      rig.submit('old', prompt(2, 8), { maxTokens: 24 });
      await rig.world.until(() => rig.tokens('old').length > 0);
      rig.submit('young', prompt(1, 12), { maxTokens: 30 });
      let block = 0;
      await rig.world.until(() => {
        const { queryTokens, blockTables, blockTableStride } = rig.executor.steps.at(-1)!;
        if (queryTokens.length === 2) block = blockTables[blockTableStride]!;
        return rig.engine.stats().preemptions > 0;
      });
      rig.executor.block(block).fill(damage);
      await rig.world.until(() => rig.allEnded());
      expect(rig.tokens('young')).toEqual(naiveAnswer(prompt(1, 12), 30));
      expect(rig.tokens('old')).toEqual(naiveAnswer(prompt(2, 8), 24));
      expect(rig.engine.stats()).toMatchObject({ failed: 0, begunAnew: 1, freeBlocks: 11 });
      rig.engine.checkIntegrity();
    });

    it('and draws no token although it has computed all itself: it fails, and begins no third time', async () => {
      const rig = new SchedulerRig({ blockCount: 64, attached: false, prefixCache });
      expect(await rig.generate('sound', ask(5))).toEqual(naiveAnswer(ask(5), 4));
      const { execute } = rig.executor;
      rig.executor.execute = async (step) => {
        const result = await execute.call(rig.executor, step);
        return { ...result, tokenIds: result.tokenIds.map((drawn, i) => (step.sample[i] ? -1 : drawn)) };
      };
      rig.submit('spoiled', ask(6));
      await rig.world.until(() => rig.ended('spoiled'));
      expect(rig.last('spoiled').error).toMatchObject({ code: 'MODEL' });
      rig.executor.execute = execute;
      expect(await rig.generate('next', ask(7))).toEqual(naiveAnswer(ask(7), 4));
      expect(rig.outputs.get('next')![0]!.cache!.cachedTokens).toBe(12); // it was not its hit’s fault
      expect(rig.engine.stats()).toMatchObject({ failed: 1, finished: 2, begunAnew: 1, freeBlocks: 63 });
      rig.engine.checkIntegrity();
    });
  });

  it('of a request that was aborted under the step ends it once', async () => {
    const rig = new SchedulerRig();
    const { execute } = rig.executor;
    rig.executor.execute = async (step) => {
      const result = await execute.call(rig.executor, step);
      result.tokenIds.fill(-1);
      return result;
    };
    rig.submit('a', prompt(1, 9));
    await rig.world.until(() => rig.executor.steps.length === 1);
    rig.engine.abort('a');
    await rig.drain();
    expect(rig.outputs.get('a')).toEqual([{ tokenIds: [], finishReason: 'abort' }]);
    expect(rig.engine.stats()).toMatchObject({ failed: 0, aborted: 1, freeBlocks: 31 });
    rig.engine.checkIntegrity();
  });
});
