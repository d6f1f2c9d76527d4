/** Streams that say what may be between two tokens, and the prompts that come beside them. */
import { describe, expect, it } from 'vitest';
import type { Share } from './batch.ts';
import { EngineLoad } from './engine-load.ts';
import { Pace } from './pacing.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';

/** Steps of 10 ms and 1 ms a request; prompts at 1,000 tokens a second. */
function measured(): EngineLoad {
  const load = new EngineLoad(4);
  for (let round = 0; round < 50; round++) {
    for (const requests of [1, 2, 4, 8]) load.step(0, requests, 0.01 + requests * 0.001);
    load.step(500, 0, 0.5);
  }
  return load;
}
const decoding = (...targets: (number | undefined)[]): Share[] =>
  targets.map((betweenMs) => ({ request: { params: { betweenMs } }, count: 1 }) as unknown as Share);

describe('what a prompt gets of a step', () => {
  const load = measured();
  const of = (...targets: (number | undefined)[]): number => new Pace().promptTokens(decoding(...targets), load, 4);

  it('is what the streams leave of the shortest of their targets', () => {
    // 100 ms ÷ 1.16, as nobody knows yet how steps scatter, less 10 and 2 of decoding: 74.2 ms at 1,000 a second.
    expect(of(100, 300)).toBe(74);
    expect(of(300, undefined, 0)).toBe(Math.floor(300 / 1.16 - 13));
  });

  it('is an eighth of the target at least, and a block', () => {
    expect(of(12, 14, 13)).toBe(Number.POSITIVE_INFINITY); // 13 ms of decoding: not the prompts' fault
    expect(of(16, 16, 16)).toBe(4); // 3 ms are left: an eighth, 2 ms, is 2 tokens
    expect(of(40, ...Array<number>(28).fill(40))).toBe(5); // 1 ms is left: an eighth, 5 ms
  });

  it('is all of it where nobody asks for anything, where nothing is measured, and where nothing decodes', () => {
    expect([of(), of(undefined, 0), new Pace().promptTokens(decoding(50), new EngineLoad(4), 4)]).toEqual([
      ...[Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY],
    ]);
  });
});

describe('steps that scatter about what rates say', () => {
  const load = measured();

  it.each([1, 1.2, 1.5])('are shorter until all keep the target: %f times', (factor) => {
    const pace = new Pace();
    let late = 0;
    let tokens = 0;
    for (let step = 0; step < 4_000; step++) {
      tokens = pace.promptTokens(decoding(100), load, 4);
      // A tenth longer and shorter, in turns that never meet.
      const seconds = 0.011 + (tokens / 1_000) * factor * (0.9 + ((step * 7) % 100) / 500);
      if (step >= 1_000 && seconds > 0.1) late++;
      pace.ended(tokens, seconds);
    }
    expect(late).toBe(0);
    // And not much shorter than need be.
    expect(0.011 + (tokens / 1_000) * factor * 1.1).toBeGreaterThan(0.085);
  });

  it('have an eighth of the target at least; what is too short, or nobody asks for, says nothing', () => {
    const pace = new Pace();
    const of = (): number => pace.promptTokens(decoding(100, ...Array<undefined>(19)), load, 4); // 30 ms decode
    const before = of();
    pace.ended(before / 2, 1);
    pace.promptTokens(decoding(undefined), load, 4);
    pace.ended(500, 1);
    expect(of()).toBe(before);
    for (let step = 0; step < 40; step++) pace.ended(of(), 1);
    expect([of(), pace.trust]).toEqual([12, expect.closeTo(12.5 / 70)]);
    // Whose steps take what is predicted, all the same, comes near to the target: nine tenths of what is left.
    for (let step = 0; step < 2_000; step++) {
      const tokens = of();
      pace.ended(tokens, 0.03 + tokens / 1_000);
    }
    expect([of(), pace.trust]).toEqual([62, 0.9]);
  });

  it('are shorter by what one that was late tells, for a while', () => {
    const pace = new Pace();
    const step = (times: number): number => {
      const tokens = pace.promptTokens(decoding(100), load, 4);
      pace.ended(tokens, (0.011 + tokens / 1_000) * times);
      return tokens;
    };
    for (let i = 0; i < 500; i++) step(1);
    const [before, , after] = [step(1.4), step(1), step(1)];
    expect([before, after]).toEqual([80, 78]);
    for (let i = 0; i < 1_000; i++) step(1);
    expect(step(1)).toBe(80);
  });
});

/** Prompt tokens of each step beside a stream, of a prompt that comes while it runs. */
async function chunksBeside(betweenMs: number | undefined): Promise<number[]> {
  const rig = new SchedulerRig({ attached: false, blockCount: 64 });
  const stream = prompt(1, 20);
  rig.submit('stream', stream, { maxTokens: 60, ...(betweenMs === undefined ? {} : { betweenMs }) });
  await rig.world.until(() => rig.executor.steps.length >= 12);
  rig.submit('long', prompt(2, 64), { maxTokens: 2 });
  await rig.world.until(() => rig.ended('long') && rig.ended('stream'));
  expect(rig.tokens('stream')).toEqual(naiveAnswer(stream, 60));
  expect(rig.tokens('long')).toEqual(naiveAnswer(prompt(2, 64), 2));
  rig.engine.checkIntegrity();
  return rig.executor.steps
    .map(({ queryTokens }) => [...queryTokens])
    .filter((counts) => counts.length === 2)
    .map((counts) => counts[1]!);
}

describe('an engine', () => {
  it('tells how far it trusts its rates', async () => {
    const rig = new SchedulerRig({ attached: false, blockCount: 64 });
    expect(rig.engine.load().pacingTrust).toBe(0);
    rig.submit('stream', prompt(1, 20), { maxTokens: 60, betweenMs: 0.16 });
    await rig.world.until(() => rig.executor.steps.length >= 12);
    const before = rig.engine.load().pacingTrust;
    expect(before).toBeGreaterThan(0.5);
    const execute = rig.executor.execute.bind(rig.executor);
    rig.executor.execute = async (step) => {
      await new Promise<void>((resolve) => void rig.world.clock.after(0.4, resolve));
      return execute(step);
    };
    rig.submit('long', prompt(2, 64), { maxTokens: 2 });
    await rig.world.until(() => rig.ended('long') && rig.ended('stream'));
    expect(rig.engine.load().pacingTrust).toBeLessThan(before);
  });

  it('gives a prompt what the stream beside it leaves, and computes the same tokens', async () => {
    // A step takes 100 µs here, and one computed 16 of the stream's 20 tokens: of 160 µs, 60 are left, at 160,000 tokens a second, 0.63 of it.
    const [first, ...rest] = await chunksBeside(0.16);
    expect(first).toBe(6);
    expect(rest.length).toBeGreaterThan(1);
    expect((await chunksBeside(undefined)).slice(0, 3)).toEqual([15, 15, 15]);
  });
});
