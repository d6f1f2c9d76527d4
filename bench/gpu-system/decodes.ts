/**
 * Decodes whose blocks are exported meanwhile, beside the same ones without a tier: two systems that were started alike and have answered
 * alike take turns in rounds, and none begins while the other still moves blocks. They share the GPU's memory, and one of them rests.
 * A round whose blocks do not come to the arena is an error: without exports there is nothing to compare.
 */
import { join } from 'node:path';
import type { Launched } from '@kvtier/cli';
import { type Figure, median, rate } from '../figures.ts';
import { hits, type Kvtier, promptOf, type SystemCase, start } from './systems.ts';

/** Of the GPU's memory, for each of both; weights of 8B parameters and a step of 8,192 tokens want 20 GiB of it. */
const gpuShare = 0.45;
/** The first one, which is not among them, pays for graphs, pages and threads. */
const rounds = 3;
const promptTokens = 64;
/** What `kvtier up` starts an engine with. */
const blockTokens = 16;
const exportedMs = 30_000;

interface Side {
  readonly system: Launched;
  readonly tier: boolean;
  readonly rates: number[];
}

export async function decodesFigure(by: Kvtier, one: SystemCase, name: string): Promise<Figure> {
  const sides: Side[] = [];
  try {
    for (const tier of [true, false]) {
      const dataDir = join(one.scratchDir, `gpu-${name}-${tier ? 'exporting' : 'plain'}`);
      const share = one.backend === 'cpu' ? {} : { gpuShare };
      sides.push({ system: (await start(by, one, { tier, dataDir, ...share })).system, tier, rates: [] });
    }
    for (const { system } of sides) await hits(by, system, promptOf(promptTokens, 0), one.youngHits);
    for (let round = 0; round <= rounds; round++) {
      // Each is first as often as it can be: what the other leaves behind, in the GPU's clocks too, is nobody's alone.
      for (const side of round % 2 === 0 ? sides : sides.toReversed()) {
        const tokensPerS = side.tier ? await exporting(by, side, one, round) : await decodeRate(by, side, one, round);
        if (round > 0) side.rates.push(tokensPerS);
      }
    }
    const [tokensPerS, plain] = sides.map(({ rates }) => median(rates));
    const limit = `the same without a tier, ${rounds} rounds by turns`;
    return rate(`decodes_${one.decodes}_${name}`, tokensPerS!, 'tokens/s', plain!, limit);
  } finally {
    await Promise.all(sides.map(({ system }) => system.stop()));
  }
}

/** @throws KvError DEADLINE where their blocks do not come to the arena, or not from there to the disk */
async function exporting(by: Kvtier, side: Side, one: SystemCase, round: number): Promise<number> {
  const { url } = side.system;
  let blocks = Number.NaN; // as long as the node says nothing
  const look = async (): Promise<number> => {
    blocks = (await by.metricValues(url, 'kvtier_tier_blocks')).get('{tier="arena"}') ?? Number.NaN;
    return blocks;
  };
  await by.waitUntil('what the arena holds', exportedMs, async () => !Number.isNaN(await look()));
  // The last token of an answer is drawn, and never computed.
  const each = Math.floor((promptTokens + one.decodeTokens - 1) / blockTokens);
  const due = blocks + one.decodes * each;
  const tokensPerS = await decodeRate(by, side, one, round);
  const what = `${one.decodes * each} blocks of ${one.decodes} decodes in the arena`;
  await by.waitUntil(what, exportedMs, async () => (await look()) >= due);
  await by.waitForWriteDown(url, due);
  return tokensPerS;
}

/** Tokens per second of all together. */
async function decodeRate(by: Kvtier, { system }: Side, one: SystemCase, round: number): Promise<number> {
  const { decodes, decodeTokens } = one;
  const begin = performance.now();
  await Promise.all(
    Array.from({ length: decodes }, (_, i) =>
      by.complete(system.url, {
        prompt: promptOf(promptTokens, 1 + round * decodes + i),
        max_tokens: decodeTokens,
        temperature: 0,
        ignore_eos: true,
      }),
    ),
  );
  return (1000 * decodes * decodeTokens) / (performance.now() - begin);
}
