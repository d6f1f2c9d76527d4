/**
 * Models that mix sliding-window and full layers (Gemma 3, Ministral), and one of window layers alone (Mistral), served
 * with all their attention groups: whatever of a prompt comes from the engine's pool or from the tier, and whatever is
 * lost of it on the way, greedy answers are those of an engine that computes everything; blocks outside of the window
 * are neither stored nor loaded.
 */
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Moved, Stage, type StageOptions, TestNode } from './hybrid-stage.ts';

const blockTokens = 4;
const answerTokens = 9;
const promptOf = (which: number, length: number): number[] =>
  Array.from({ length }, (_, i) => 3 + ((i * i * (11 + 2 * which) + 7 * i + which) % 150));
const prompt = promptOf(2, 96);

const models = [
  // With pools that do not hold all of a batch's requests.
  { model: 'gemma3', windows: [0, 20, 20, 20], tightBlocks: 100 },
  { model: 'ministral-mixed', windows: [0, 24], tightBlocks: 60 },
  { model: 'mistral-window', windows: [24], tightBlocks: 30 },
];

let node: TestNode;
const stages: Stage[] = [];
const open = async (options: Omit<StageOptions, 'blockTokens'>): Promise<Stage> => {
  const stage = await Stage.open({ blockTokens, ...options });
  stages.push(stage);
  return stage;
};
beforeEach(async () => {
  node = await new TestNode().open();
});
afterEach(async () => {
  for (const stage of stages.splice(0)) await stage.close();
  await node.close();
});

const right = async (model: string, ...prompts: number[][]): Promise<number[][]> => {
  const stage = await open({ model, blockCount: 2_000 });
  const answers: number[][] = [];
  for (const one of prompts) {
    answers.push((await stage.generate(one, answerTokens)).tokens);
    expect(stage.engine.resetPrefixCache()).toBe(true);
  }
  return answers;
};

const movedBlocks = (moved: readonly Moved[]): number[] =>
  moved.reduce<number[]>(
    (sums, { rows }) => rows.map((row, group) => (sums[group] ?? 0) + row.filter((block) => block !== 0).length),
    [],
  );

/** Blocks that went although the token after the first `hitBlocks` blocks does not look at them. */
const outside = (moved: Moved, windows: readonly number[], hitBlocks: number): number =>
  moved.rows.reduce((sum, row, group) => {
    const window = windows[group]!;
    const seenFrom = window === 0 ? 0 : hitBlocks * blockTokens - window + 1;
    return sum + row.filter((block, i) => block !== 0 && (moved.first + i + 1) * blockTokens <= seenFrom).length;
  }, 0);

describe.each(models)('$model', ({ model, windows, tightBlocks }) => {
  const windowBlocks = (window: number): number => Math.ceil((window - 1) / blockTokens);
  // A hit of all but the prompt's last block, whose last token is computed.
  const hitBlocks = 23;

  it('is handed from one engine to another in the middle of a prompt, each group by itself', async () => {
    const [expected] = await right(model, prompt);
    const [prefill, decode] = [await open({ model, node }), await open({ model, node })];
    const handOff = { blocks: hitBlocks, stallMs: 20_000, deadlineMs: 40_000 };
    let ready = 0;
    const { tokens, cache } = await new Promise<Awaited<ReturnType<Stage['generate']>>>((resolve, reject) => {
      const begin = (): void => {
        const told = ({ readyBlocks }: { readyBlocks: number }): void => {
          ready = readyBlocks;
        };
        prefill.generate(prompt, 1, { prefillOnly: { blocks: hitBlocks } }, told).catch(reject);
      };
      decode.generate(prompt, answerTokens, { handOff }, begin).then(resolve, reject);
    });
    expect(tokens).toEqual(expected);
    expect(cache).toMatchObject({ handedTokens: hitBlocks * blockTokens, cachedTokens: hitBlocks * blockTokens });
    expect(outside(decode.loads[0]!, windows, hitBlocks)).toBe(0);
    expect(decode.engine.stats().handOffEnds).toEqual({ complete: 1 });
    await prefill.stored();
    expect(ready).toBe(hitBlocks);
  });

  it('whose prefill ends too early is computed from the last place that the tier holds whole', async () => {
    const [expected] = await right(model, prompt);
    const [prefill, decode] = [await open({ model, node }), await open({ model, node })];
    await prefill.generate(prompt, 1, { prefillOnly: { blocks: 8 } });
    const handOff = { blocks: hitBlocks, stallMs: 300, deadlineMs: 600 };
    const { tokens, cache } = await decode.generate(prompt, answerTokens, { handOff });
    expect(tokens).toEqual(expected);
    expect(cache).toMatchObject({ handedTokens: 0 });
    expect(decode.engine.stats().handOffEnds.complete).toBe(undefined);
    expect(decode.engine.stats().handOffs).toBe(1);
  });

  it('answers alike fresh, from its own pool and from the tier, and moves no block outside of the window', async () => {
    const [expected] = await right(model, prompt);
    const first = await open({ model, node });
    expect(first.windows).toEqual(windows);
    expect(first.executor.kv.groups!.map(({ windowTokens }) => windowTokens)).toEqual(windows);
    const fresh = await first.generate(prompt, answerTokens);
    expect(fresh.tokens).toEqual(expected);
    expect(fresh.cache.cachedTokens).toBe(0);
    await first.stored();

    // Three chunks of 32 tokens, then 8 tokens decoded; of the last chunk one block more, where the same prompt ends.
    const stored = windows.map((window) => (window === 0 ? 26 : 3 * windowBlocks(window) + 1 + 2));
    expect(movedBlocks(first.stores)).toEqual(stored);
    expect(first.counters.storedBlocks).toBe(stored.reduce((sum, count) => sum + count));
    expect(node.blocks).toBe(first.counters.storedBlocks);
    const ends = first.stores.map(({ first: from, rows }) => from + rows[0]!.length);
    expect(ends).toEqual([8, 16, 24, 25, 26]);
    expect(first.stores.map((moved, i) => outside(moved, windows, ends[i] === 24 ? hitBlocks : ends[i]!))).toEqual([
      0, 0, 0, 0, 0,
    ]);

    const warm = await first.generate(prompt, answerTokens);
    expect(warm.tokens).toEqual(expected);
    expect(warm.cache.tokensByTier).toEqual({ engine: hitBlocks * blockTokens });
    expect(first.loads).toEqual([]);

    const second = await open({ model, node });
    const loaded = await second.generate(prompt, answerTokens);
    expect(loaded.tokens).toEqual(expected);
    expect(loaded.cache.tokensByTier).toEqual({ arena: hitBlocks * blockTokens });
    expect(movedBlocks(second.loads)).toEqual(windows.map((w) => (w === 0 ? hitBlocks : windowBlocks(w))));
    expect(second.loads.map((moved) => outside(moved, windows, hitBlocks))).toEqual([0]);
    expect(second.counters.loadedBlocks).toBe(movedBlocks(second.loads).reduce((sum, count) => sum + count));
    await second.stored();
    expect(node.blocks).toBe(first.counters.storedBlocks);
  });

  it('a longer prompt goes on where the window of the shorter one is held', async () => {
    const [, expected] = await right(model, prompt, [...prompt, ...promptOf(5, 30)]);
    const first = await open({ model, node });
    await first.generate(prompt, 1);
    await first.stored();
    const second = await open({ model, node });
    const longer = await second.generate([...prompt, ...promptOf(5, 30)], answerTokens);
    expect(longer.tokens).toEqual(expected);
    expect(longer.cache.tokensByTier).toEqual({ arena: 96 });
    // One that parts inside of the second chunk: the end of the first one is the last place to go on from.
    const parted = [...prompt.slice(0, 50), ...promptOf(6, 40)];
    const [answer] = await right(model, parted);
    const third = await open({ model, node });
    const other = await third.generate(parted, answerTokens);
    expect(other.tokens).toEqual(answer);
    expect(other.cache.tokensByTier).toEqual({ arena: 32 });
  });

  it('a loss in any group falls back to the longest prefix that all groups have, and is mended', async () => {
    const [expected] = await right(model, prompt);
    for (const [group, window] of windows.entries()) {
      const first = await open({ model, node });
      expect((await first.generate(prompt, answerTokens)).tokens).toEqual(expected);
      await first.stored();
      const held = node.blocks;

      // In full attention block 10 is lost, with a window one that the whole hit looks at.
      const lost = window === 0 ? 10 : 20;
      const second = await open({ model, node });
      second.damaged = (of, block) => of === group && block === lost && second.loads.length === 1;
      const answer = await second.generate(prompt, answerTokens);
      expect(answer.tokens).toEqual(expected);
      const left = window === 0 ? 8 : 16;
      expect(answer.cache.tokensByTier).toEqual({ arena: left * blockTokens });
      expect(second.engine.stats()).toMatchObject({ loads: 2, shortLoads: 1, loadedTokens: left * blockTokens });
      await second.stored();
      expect(node.blocks).toBe(held);
      const third = await open({ model, node });
      expect((await third.generate(prompt, answerTokens)).cache.cachedTokens).toBe(hitBlocks * blockTokens);
    }
  });

  it('computes when every load is damaged', async () => {
    const [expected] = await right(model, prompt);
    const first = await open({ model, node });
    await first.generate(prompt, answerTokens);
    await first.stored();
    const second = await open({ model, node });
    second.damaged = () => true;
    const answer = await second.generate(prompt, answerTokens);
    expect(answer.tokens).toEqual(expected);
    expect(answer.cache.cachedTokens).toBe(0);
    expect(second.engine.stats().loads).toBeLessThanOrEqual(2);
  });

  it('would notice blocks of a window in the wrong places', async () => {
    const [expected] = await right(model, prompt);
    const first = await open({ model, node });
    await first.generate(prompt, answerTokens);
    await first.stored();
    const second = await open({ model, node });
    second.swapped = true;
    const answer = await second.generate(prompt, answerTokens);
    expect(answer.tokens).not.toEqual(expected);
  });

  it('answers alike when blocks run out while requests decode', async () => {
    const prompts = Array.from({ length: 5 }, (_, i) => promptOf(1 + i, 40));
    const alone = await open({ model, blockCount: 2_000 });
    const expected: number[][] = [];
    for (const one of prompts) expected.push((await alone.generate(one, 60)).tokens);
    for (const maxStepTokens of [9, 32]) {
      const stage = await open({ model, blockCount: tightBlocks, limits: { maxStepTokens } });
      const answers = await Promise.all(prompts.map((one) => stage.generate(one, 60)));
      expect(answers.map(({ tokens }) => tokens)).toEqual(expected);
      const { preemptions, blockCount, freeBlocks } = stage.engine.stats();
      expect(freeBlocks).toBe(blockCount - 1);
      // Windows alone do not grow while a request decodes.
      if (windows.includes(0)) expect(preemptions).toBeGreaterThan(0);
    }
  });

  it('answers alike in a batch, in small chunks, in a tight pool, with the tier filling and failing', async () => {
    const prompts = Array.from({ length: 7 }, (_, i) => [
      ...prompt.slice(0, 20 * (i % 4)),
      ...promptOf(1 + (i % 3), 30 + 9 * i),
    ]);
    const expected = await right(model, ...prompts);
    for (const maxStepTokens of [7, 32]) {
      const stage = await open({
        model,
        node,
        blockCount: 2 * tightBlocks,
        limits: { maxStepTokens, maxSequences: 5, exportShare: 0.3 },
      });
      let loads = 0;
      stage.damaged = () => loads++ % 11 === 10;
      for (let round = 0; round < 3; round++) {
        const answers = await Promise.all(prompts.map((one) => stage.generate(one, answerTokens)));
        expect(answers.map(({ tokens }) => tokens)).toEqual(expected);
      }
      await stage.stored();
      const { blockCount, freeBlocks } = stage.engine.stats();
      expect(freeBlocks).toBe(blockCount - 1);
    }
  });
});
