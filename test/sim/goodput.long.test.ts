/** Prefill, decode, or both have more to do than they can: what is served in time stays what it was, and nobody waits for ever. */
import { expect, it } from 'vitest';
import { type LoadShape, maxWaitMs, serve } from './handoff-load.ts';

const seconds = 60;
/** One load of a minute differs from another by a twentieth. */
const seeds = [1, 2, 3];
const inTimeMs = 2_000;
const shapes: Record<string, Omit<LoadShape, 'ttftMs'>> = {
  // These workers leave a step's own time out of the rates that they tell, and are slower by an eighth: it has to be learned.
  'prefill, by long prompts': { promptTokens: 1_600, answerTokens: 8 },
  'decode, by long answers': { promptTokens: 64, answerTokens: 400 },
  both: { promptTokens: 800, answerTokens: 150 },
};

const known = new Map<string, ReturnType<typeof serve>>();
/** The same load is served once, however often it is asked for. */
function served(seed: number, shape: LoadShape, perS: number): ReturnType<typeof serve> {
  const key = JSON.stringify([seed, shape, perS]);
  const one = known.get(key) ?? serve(seed, shape, perS, seconds, inTimeMs);
  known.set(key, one);
  return one;
}

/** A load of which more than a seventh is not served in time; of one that is less by a fifth it is not so. */
async function saturationOf(shape: LoadShape): Promise<{ perS: number }> {
  const perSOf = (step: number): number => 1.2 ** step;
  const isTooMuch = async (step: number): Promise<boolean> =>
    (await served(1, shape, perSOf(step))).goodPerS < 0.855 * perSOf(step);
  let [enough, tooMuch] = [-1, 4];
  for (; !(await isTooMuch(tooMuch)); tooMuch += 4) {
    if (perSOf(tooMuch) > 1_000) throw new Error('no load saturates it');
    enough = tooMuch;
  }
  while (tooMuch - enough > 1) {
    const between = Math.ceil((enough + tooMuch) / 2);
    if (await isTooMuch(between)) tooMuch = between;
    else enough = between;
  }
  return { perS: perSOf(tooMuch) };
}

it.each(Object.keys(shapes))(
  'at twice saturation as much is served in time: %s',
  { timeout: 400_000 },
  async (name) => {
    const shape = { ...shapes[name]!, ttftMs: inTimeMs };
    const { perS } = await saturationOf(shape);
    let [once, twice, refused] = [0, 0, 0];
    for (const seed of seeds) {
      once += (await served(seed, shape, perS)).goodPerS;
      const crowd = await served(seed, shape, 2 * perS);
      twice += crowd.goodPerS;
      refused += crowd.refused;
    }
    expect(twice / once).toBeGreaterThan(0.9);
    expect(refused).toBeGreaterThan(0);
  },
);

/** In front of several workers requests wait in one queue: what a lone worker has not. */
const crowds: Record<string, Omit<LoadShape, 'ttftMs'>> = {
  'long prompts': { promptTokens: 1_600, answerTokens: 8 },
  'long answers': { promptTokens: 64, answerTokens: 400 },
};
const four = ['both', 'both', 'both', 'both'] as const;
it.each(Object.keys(crowds))(
  'in front of four workers at twice saturation: who is let in is in time, who is not hears it in time, and as much is served: %s',
  { timeout: 400_000 },
  async (name) => {
    const shape = { ...crowds[name]!, ttftMs: inTimeMs };
    // A worker's own steps, and nothing beside them: more than it can do.
    const perS = 4 * (1 / (shape.promptTokens / 4_000 + 0.001 * shape.answerTokens));
    const [once, twice] = [
      await serve(1, shape, perS, seconds, inTimeMs, four),
      await serve(1, shape, 2 * perS, seconds, inTimeMs, four),
    ];
    const said = JSON.stringify({ perS, once, twice });
    expect(twice.goodPerS / once.goodPerS, said).toBeGreaterThan(0.95);
    expect(twice.kept, said).toBeGreaterThan(0.9);
    expect(twice.refused, said).toBeGreaterThan(0);
    expect(twice.longestRefusedMs, said).toBeLessThan(inTimeMs + 20);
  },
);

it.each(Object.keys(shapes))('without any target nobody waits for ever: %s', { timeout: 400_000 }, async (name) => {
  const shape = { ...shapes[name]!, ttftMs: undefined };
  const { perS } = await saturationOf({ ...shapes[name]!, ttftMs: inTimeMs });
  const crowd = await serve(3, shape, 2 * perS, seconds, inTimeMs);
  // All have ended: served, or told to come again (`serve` throws otherwise), and nobody's first token came later than the longest wait
  // and what was before it at the workers.
  expect(crowd.refused).toBeGreaterThan(0);
  expect(crowd.longestFirstMs).toBeLessThan(maxWaitMs + 2_000);
});
