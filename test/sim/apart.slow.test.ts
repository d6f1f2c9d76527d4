/**
 * One prefill and one decode worker beside two combined ones, and the decision beside always and never, under long prompts among
 * streams: the load of `npm run bench -- pd` in virtual time, where a busy machine changes nothing.
 */
import { expect, it } from 'vitest';
import { type Asked, play } from './handoff-load.ts';
import { VirtualWorker } from './virtual-workers.ts';

const tokensPerS = 1_200;
const steps = { stepTokens: 512, stepS: 0.01, stepPerRequestS: 0.002 };
const targets = { ttftMs: 4_000, itlMs: 150 };
const [prompt, stream] = [
  { promptTokens: 1_600, answerTokens: 8, ttftMs: undefined },
  { promptTokens: 48, answerTokens: 64, ttftMs: undefined },
];
/** Half of what a prefill worker does at most, and of what a decode worker does with eight streams. */
const promptsPerS = 0.5 / (prompt.promptTokens / tokensPerS + 0.04);
const eightS = stream.answerTokens * (steps.stepS + 8 * steps.stepPerRequestS) + (8 * stream.promptTokens) / tokensPerS;
const arriving = [
  { ...prompt, perS: promptsPerS },
  { ...stream, perS: 4 / eightS },
];
const seconds = 60;
const seeds = [1, 2, 3, 4, 5, 6];
type Way = 'predicted' | 'always' | 'never' | 'combined';

async function served(way: Way): Promise<Asked[]> {
  const all: Asked[] = [];
  const isCombined = way === 'combined';
  for (const seed of seeds) {
    const roles = isCombined ? (['both', 'both'] as const) : (['prefill', 'decode'] as const);
    const workers = roles.map((role, at) => new VirtualWorker(at, role, 20_000, tokensPerS, 1, steps));
    const limits = { ...targets, split: isCombined ? ('never' as const) : way };
    all.push(...(await play(seed, workers, limits, arriving, seconds)));
  }
  return all;
}

const percentile = (values: readonly number[], share: number): number =>
  [...values].sort((a, b) => a - b)[Math.floor(share * values.length)]!;
const isPrompt = ({ shape }: Asked): boolean => shape.promptTokens === prompt.promptTokens;
const figuresOf = (all: readonly Asked[]) => ({
  itlP99: percentile(
    all.filter((one) => !isPrompt(one)).flatMap(({ gapsMs }) => gapsMs),
    0.99,
  ),
  ttftP90: percentile(
    all.filter(isPrompt).map(({ firstMs }) => firstMs),
    0.9,
  ),
  good: all.filter(({ firstMs, gapsMs }) => firstMs <= targets.ttftMs && gapsMs.every((ms) => ms <= targets.itlMs))
    .length,
  wholeMs: all.reduce((sum, { wholeMs }) => sum + wholeMs, 0) / all.length,
});

it('streams keep their pace, prompts wait little, and no other rule is better', { timeout: 400_000 }, async () => {
  const apart = figuresOf(await served('predicted'));
  const combined = figuresOf(await served('combined'));
  const others = [figuresOf(await served('always')), figuresOf(await served('never'))];
  const ratios = {
    itl: combined.itlP99 / apart.itlP99,
    ttft: combined.ttftP90 / apart.ttftP90,
    goodput: apart.good / combined.good,
    decision: Math.min(...others.map(({ wholeMs }) => wholeMs)) / apart.wholeMs,
  };
  const said = JSON.stringify(ratios);
  expect(ratios.itl, said).toBeGreaterThan(2);
  expect(ratios.ttft, said).toBeGreaterThan(0.75);
  expect(ratios.goodput, said).toBeGreaterThan(1.15);
  expect(ratios.decision, said).toBeGreaterThan(0.97);
});
