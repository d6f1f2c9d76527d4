/** That decodes beside exports are compared with the same decodes alone: asked alike, by turns, and only where blocks were exported. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { decodesFigure } from './decodes.ts';
import { sizesOf } from './figures.ts';
import type { Kvtier, SystemCase } from './systems.ts';

const one: SystemCase = {
  ...{ ...sizesOf('random:1m'), model: 'random:1m', promptTokens: 600, maxStepTokens: null },
  ...{ backend: 'cuda', scratchDir: '/nowhere' },
};

interface Asked {
  readonly prompt: readonly number[];
  readonly max_tokens: number;
}

/** Systems that answer at once; the one with a tier has what it computed in its arena, but for what `stored` takes away. */
function withTier(stored: (blocks: number) => number) {
  const launched: (readonly string[])[] = [];
  const said: string[] = [];
  const asked = new Map<string, Asked[]>();
  let arena = 7;
  const kvtier = {
    launch: async (args) => {
      const name = args.includes('--no-tier') ? 'plain' : 'tier';
      launched.push(args);
      const stop = async (): Promise<number> => said.push(`${name} stops`);
      return { url: name, pid: 1, pids: () => [], killAll: async () => {}, stop };
    },
    waitUntilServing: async () => {},
    resetPrefixCache: async () => {},
    complete: async (url, { prompt, max_tokens }) => {
      const all = asked.get(url) ?? [];
      asked.set(url, all);
      all.push({ prompt: prompt as number[], max_tokens });
      if (max_tokens > 1) {
        if (said.at(-1) !== url) said.push(url);
        if (url === 'tier') arena += stored(Math.floor((prompt.length + max_tokens - 1) / 16));
      }
      return {
        text: '',
        tokenIds: [7],
        finishReason: 'length',
        promptTokens: 64,
        completionTokens: 1,
        cachedTokens: 0,
      } as never;
    },
    metricValues: async () => new Map([['{tier="arena"}', arena]]),
    waitUntil: async (what, limitMs, probe) => {
      if (!(await probe())) throw new KvError('DEADLINE', `${what}: not so after ${limitMs / 1_000} s`);
    },
    waitForWriteDown: async (url, leastBlocks) => void said.push(`${url} has ${leastBlocks} on disk`),
  } satisfies Kvtier;
  return { kvtier, launched, said, asked };
}

it('both are started and asked alike, take turns, and none begins while the other moves blocks', async () => {
  const { kvtier, launched, said, asked } = withTier((blocks) => blocks);
  const figure = await decodesFigure(kvtier, one, '1m');
  expect([figure.name, figure.unit, figure.limitName]).toEqual([
    'decodes_2_1m',
    'tokens/s',
    'the same without a tier, 3 rounds by turns',
  ]);
  const share = ['--gpu-memory-utilization', '0.45'];
  expect(launched.map((args) => args.slice(-2))).toEqual([share, share]);
  // 64 tokens and 31 of an answer's 32 are 5 blocks, of each of two.
  expect(said).toEqual([
    ...['tier', 'tier has 17 on disk', 'plain'],
    ...['tier', 'tier has 27 on disk'],
    ...['tier', 'tier has 37 on disk', 'plain'],
    ...['tier', 'tier has 47 on disk'],
    ...['tier stops', 'plain stops'],
  ]);
  expect(asked.get('plain')).toEqual(asked.get('tier'));
  const all = asked.get('tier')!;
  expect(all.map(({ max_tokens }) => max_tokens)).toEqual([...Array(one.youngHits).fill(1), ...Array(8).fill(32)]);
  expect(new Set(all.map(({ prompt }) => prompt.join())).size).toBe(1 + 8);
});

it.each([
  ['no block', () => 0],
  ['a block too few', (blocks: number) => blocks - 0.5],
])('where %s is exported there is no figure, and both end', async (_, stored) => {
  const { kvtier, said } = withTier(stored);
  await expect(decodesFigure(kvtier, one, '1m')).rejects.toThrow(
    '10 blocks of 2 decodes in the arena: not so after 30 s',
  );
  expect(said).toEqual(['tier', 'tier stops', 'plain stops']);
});

it('a node that does not say what it holds says no blocks either', async () => {
  const { kvtier } = withTier((blocks) => blocks);
  const silent = { ...kvtier, metricValues: async () => new Map<string, number>() };
  await expect(decodesFigure(silent, one, '1m')).rejects.toThrow('what the arena holds: not so after 30 s');
});
