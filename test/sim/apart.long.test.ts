/**
 * One prefill and one decode worker beside two combined ones, and the decision beside always and never, under long prompts among
 * streams: the load of `npm run bench -- pd` in virtual time, where a busy machine changes nothing, on slow and fast machines and links.
 */
import { expect, it } from 'vitest';
import { figuresOf, goodputOf, type PdFigures, played, type Shape } from './pd-shapes.ts';

const gbit = 477; // blocks of 256 KiB a second
const slow: Shape = {
  ...{ tokensPerS: 1_200, stepTokens: 512, stepS: 0.01, stepPerRequestS: 0.002, linkBlocksPerS: gbit, load: 0.5 },
  ...{ promptTokens: 1_600, streamTokens: 48, streamAnswer: 64, ttftMs: 4_000, itlMs: 150 },
};
/** Its streams want half of the pause that a prompt makes where it takes whole steps. */
const fast: Shape = { ...slow, tokensPerS: 7_400, stepS: 0.0035, stepPerRequestS: 0.0008, itlMs: 40, ttftMs: 1_000 };
const shapes: Record<string, Shape & { seeds: readonly number[] }> = {
  'slow prefill, 1 Gbit/s': { ...slow, seeds: [1, 2, 3, 4, 5, 6] },
  'slow prefill, 10 Gbit/s': { ...slow, linkBlocksPerS: 10 * gbit, seeds: [1, 2, 3, 4, 5, 6] },
  'fast prefill, 1 Gbit/s': { ...fast, seeds: [1, 2] },
  'fast prefill, 10 Gbit/s': { ...fast, linkBlocksPerS: 10 * gbit, seeds: [1, 2] },
};

it.each(Object.keys(shapes))(
  'streams keep their pace, prompts wait little, and no other rule is better: %s',
  { timeout: 400_000 },
  async (name) => {
    const { seeds, ...shape } = shapes[name]!;
    const of = async (way: Parameters<typeof played>[1]): Promise<PdFigures> =>
      figuresOf(shape, await played(shape, way, seeds));
    const [apart, combined] = [await of('predicted'), await of('combined')];
    const others = [await of('always'), await of('never')];
    const ratios = {
      itl: combined.itlP99 / apart.itlP99,
      ttft: combined.ttftP90 / apart.ttftP90,
      decision: Math.min(...others.map(({ wholeMs }) => wholeMs)) / apart.wholeMs,
    };
    const said = `${JSON.stringify(ratios)} ${JSON.stringify({ apart, combined })}`;
    expect(apart.itlP99, said).toBeLessThanOrEqual(shape.itlMs);
    expect(ratios.itl, said).toBeGreaterThan(2);
    expect(ratios.ttft, said).toBeGreaterThan(0.8);
    expect(ratios.decision, said).toBeGreaterThan(0.97);
  },
);

it.each(['slow prefill, 1 Gbit/s', 'fast prefill, 1 Gbit/s'])(
  'more requests keep both targets: %s',
  { timeout: 400_000 },
  async (name) => {
    const { seeds: all, ...shape } = shapes[name]!;
    const seeds = all.slice(0, all.length / 2); // more than a third is there to see with half of them
    const [apart, combined] = [await goodputOf(shape, 'predicted', seeds), await goodputOf(shape, 'combined', seeds)];
    expect(apart / combined, `${apart} beside ${combined} a second`).toBeGreaterThan(1.3);
  },
);

/** Where one of the two simple rules is nearly best, each in its way. */
const plain: Record<string, Shape & { readonly least?: number; readonly seeds?: readonly number[] }> = {
  'short prompts': { ...fast, promptTokens: 96 },
  // Always is better here, by 0.04: a first token that comes soon weighs more than what streams wait.
  'short prompts, a slow machine': { ...slow, promptTokens: 96, least: 0.95 },
  // Much better than any other rule: one load shows it.
  'a slow link': { ...fast, linkBlocksPerS: gbit / 10, seeds: [1] },
  'little to do': { ...fast, load: 0.1, seeds: [1] },
  'very long prompts': { ...fast, promptTokens: 8_000, ttftMs: 5_000, seeds: [1] },
  'a target that everybody keeps': { ...fast, itlMs: 150 },
};
it.each(Object.keys(plain))('no other rule is better: %s', { timeout: 400_000 }, async (name) => {
  const { least = 0.97, seeds = [1, 2], ...shape } = plain[name]!;
  const wholeOf = async (way: Parameters<typeof played>[1]): Promise<number> =>
    figuresOf(shape, await played(shape, way, seeds)).wholeMs;
  const means = {
    predicted: await wholeOf('predicted'),
    always: await wholeOf('always'),
    never: await wholeOf('never'),
  };
  expect(Math.min(means.always, means.never) / means.predicted, JSON.stringify(means)).toBeGreaterThan(least);
});
