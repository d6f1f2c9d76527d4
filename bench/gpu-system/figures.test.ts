/** That figures are told as they are measured: what fails later costs itself only. Real systems: gpu-session.long.test.ts. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { sizesOf, systemFigures } from './figures.ts';
import type { Kvtier } from './systems.ts';

/** Answers at once, from the arena once it has seen a prompt; its disk never gets all blocks. */
function withSlowDisk(): { readonly kvtier: Kvtier; readonly stops: () => number } {
  let stops = 0;
  const system = {
    url: 'http://system',
    pid: 1,
    pids: () => [],
    killAll: async () => {},
    stop: async () => {
      stops += 1;
      return 0;
    },
  };
  const answer = {
    ...{ text: '', tokenIds: [7], finishReason: 'length', promptTokens: 64, completionTokens: 1, cachedTokens: 64 },
    ...{ tokensByTier: { arena: 64 }, ttftMs: 2 },
  };
  const kvtier: Kvtier = {
    launch: async () => system,
    waitUntilServing: async () => {},
    resetPrefixCache: async () => {},
    metricValues: async () => new Map(),
    waitUntil: async () => {},
    complete: async () => answer,
    waitForWriteDown: async () => {
      throw new KvError('DEADLINE', 'write-down of all blocks to disk: not within 30 s');
    },
  };
  return { kvtier, stops: () => stops };
}

it('a disk that is too slow costs its own figure, not those of cold prompts and of the arena', async () => {
  const { kvtier, stops } = withSlowDisk();
  const names: string[] = [];
  const one = { ...sizesOf('random:1m'), backend: 'cpu', model: 'random:1m', promptTokens: 64 } as const;
  const run = systemFigures(
    { ...one, maxStepTokens: null, scratchDir: '/nowhere' },
    ({ name }) => names.push(name),
    kvtier,
  );
  await expect(run).rejects.toThrow('write-down of all blocks to disk: not within 30 s');
  expect(names).toEqual([
    'start_up_1m',
    'start_attached_1m',
    'start_first_token_1m',
    'ttft_cold_64_1m',
    'ttft_engine_64_1m',
    'ttft_arena_64_1m',
    'ttft_young_64_1m',
  ]);
  expect(stops()).toBe(1);
});
