/**
 * What one prefill and one decode worker are worth beside two combined ones, and the decision beside always and never, in virtual time:
 * the load of `npm run bench -- pd`, for machines and links of any speed.
 */
import { type Asked, play as playLoad } from './handoff-load.ts';
import { VirtualWorker } from './virtual-workers.ts';

/** A machine, its link, and what it is asked. */
export interface Shape {
  readonly tokensPerS: number;
  readonly stepTokens: number;
  readonly stepS: number;
  readonly stepPerRequestS: number;
  readonly linkBlocksPerS: number;
  readonly promptTokens: number;
  readonly streamTokens: number;
  readonly streamAnswer: number;
  readonly ttftMs: number;
  readonly itlMs: number;
  /** Of what a prefill worker, and a decode worker with eight streams, do at most. */
  readonly load: number;
}
export type Way = 'predicted' | 'always' | 'never' | 'combined';

export interface PdFigures {
  readonly itlP99: number;
  readonly itlMean: number;
  readonly ttftP90: number;
  readonly ttftMean: number;
  /** Share in time. */
  readonly good: number;
  readonly wholeMs: number;
  readonly split: number;
  readonly prompts: number;
}

const seconds = 60;

const known = new Map<string, Promise<Asked[]>>();

/** The same is played once, however often it is asked for; where nothing is split nothing travels, and no link tells two shapes apart. */
export async function played(shape: Shape, way: Way, seeds: readonly number[], load = shape.load): Promise<Asked[]> {
  const linkBlocksPerS = way === 'combined' || way === 'never' ? 0 : shape.linkBlocksPerS;
  const all: Asked[] = [];
  for (const seed of seeds) {
    const key = JSON.stringify([{ ...shape, linkBlocksPerS, load }, way, seed]);
    const one = known.get(key) ?? play(shape, way, seed, load);
    known.set(key, one);
    all.push(...(await one));
  }
  return all;
}

async function play(shape: Shape, way: Way, seed: number, load: number): Promise<Asked[]> {
  const { tokensPerS, stepTokens, stepS, stepPerRequestS, linkBlocksPerS } = shape;
  const prompt = { promptTokens: shape.promptTokens, answerTokens: 8, ttftMs: undefined };
  const stream = { promptTokens: shape.streamTokens, answerTokens: shape.streamAnswer, ttftMs: undefined };
  const eightS = stream.answerTokens * (stepS + 8 * stepPerRequestS) + (8 * stream.promptTokens) / tokensPerS;
  const arriving = [
    { ...prompt, perS: load / (prompt.promptTokens / tokensPerS + 4 * stepS) },
    { ...stream, perS: (8 * load) / eightS },
  ];
  const isCombined = way === 'combined';
  const roles = isCombined ? (['both', 'both'] as const) : (['prefill', 'decode'] as const);
  const limits = { ttftMs: shape.ttftMs, itlMs: shape.itlMs, split: isCombined ? ('never' as const) : way };
  const steps = { stepTokens, stepS, stepPerRequestS };
  const workers = roles.map((role, at) => new VirtualWorker(at, role, 20_000, tokensPerS, 1, steps, linkBlocksPerS));
  return playLoad(seed, workers, limits, arriving, seconds);
}

export const percentile = (values: readonly number[], share: number): number =>
  [...values].sort((a, b) => a - b)[Math.floor(share * values.length)] ?? 0;
const mean = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length;

export function figuresOf(shape: Shape, all: readonly Asked[]): PdFigures {
  const isPrompt = (one: Asked): boolean => one.shape.promptTokens === shape.promptTokens;
  const gaps = all.filter((one) => !isPrompt(one)).flatMap(({ gapsMs }) => gapsMs);
  const firsts = all.filter(isPrompt).map(({ firstMs }) => firstMs);
  const isGood = ({ firstMs, gapsMs }: Asked): boolean =>
    firstMs <= shape.ttftMs && gapsMs.every((ms) => ms <= shape.itlMs);
  return {
    itlP99: percentile(gaps, 0.99),
    itlMean: mean(gaps),
    ttftP90: percentile(firsts, 0.9),
    ttftMean: mean(firsts),
    good: all.filter(isGood).length / all.length,
    wholeMs: mean(all.map(({ wholeMs }) => wholeMs)),
    split: all.filter((one) => isPrompt(one) && one.line.startsWith('split ')).length,
    prompts: firsts.length,
  };
}

/** Requests a second within both targets, at the load of which there are most: the shape's, and up to twice as much. */
export async function goodputOf(shape: Shape, way: Way, seeds: readonly number[]): Promise<number> {
  let most = 0;
  for (const factor of [1, 1.5, 2]) {
    const all = await played(shape, way, seeds, factor * shape.load);
    most = Math.max(most, (figuresOf(shape, all).good * all.length) / (seeds.length * seconds));
  }
  return most;
}
