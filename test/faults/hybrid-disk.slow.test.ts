/**
 * Models that mix sliding-window and full layers over a cache node that is killed: a block of every group comes back from the
 * disk, nothing outside of a window was written there, and greedy answers stay those of an engine that computes everything.
 */
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Stage } from '../e2e/hybrid-stage.ts';
import { Service } from './engine-rig.ts';

const blockTokens = 4;
const answerTokens = 9;
/** 24 blocks, of which the last one's last token is always computed. */
const prompt = Array.from({ length: 96 }, (_, i) => 3 + ((i * i * 15 + 7 * i + 2) % 150));
const hitTokens = 92;

let folder: string;
let node: Service;
const stages: Stage[] = [];
const socketPath = (): string => join(folder, 'n/s');

beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-hybrid-disk-'));
  node = new Service('cache-node', {
    socketPath: socketPath(),
    dataDir: join(folder, 'data'),
    arena: { bytes: 16 << 20 },
    disk: { bytes: 64 << 20 },
    logLevel: 'warn',
  });
  await node.start();
});
afterEach(async () => {
  for (const stage of stages.splice(0)) await stage.close();
  await node.signal('SIGTERM'); // its arena goes with it
  const { arenaPath } = node.ready.at(-1)!;
  if (typeof arenaPath === 'string') expect(existsSync(arenaPath)).toBe(false);
  rmSync(folder, { recursive: true, force: true });
});

const open = async (model: string, withTier: boolean): Promise<Stage> => {
  const stage = await Stage.open({ model, blockTokens, ...(withTier && { node: { socketPath: socketPath() } }) });
  stages.push(stage);
  return stage;
};

it.each([
  { model: 'gemma3', windows: [0, 20, 20, 20] },
  { model: 'ministral-mixed', windows: [0, 24] },
])('$model: after SIGKILL all groups come back from the disk', async ({ model, windows }) => {
  const expected = (await (await open(model, false)).generate(prompt, answerTokens)).tokens;
  const first = await open(model, true);
  expect(first.windows).toEqual(windows);
  expect((await first.generate(prompt, answerTokens)).tokens).toEqual(expected);
  await first.stored();
  const { storedBlocks } = first.counters;
  // Three chunks of the prompt and the tokens decoded: of full attention all 26 blocks, of a window those that hits look at.
  const windowBlocks = (window: number): number => Math.ceil((window - 1) / blockTokens);
  const wanted = windows.map((window) => (window === 0 ? 26 : 3 * windowBlocks(window) + 3));
  expect(storedBlocks).toBe(wanted.reduce((sum, count) => sum + count));
  await vi.waitUntil(async () => (await first.blocksIn('disk')) === storedBlocks, { timeout: 20_000 });

  await node.signal('SIGKILL');
  await node.start();
  // 0 until the session is the new node's.
  await vi.waitUntil(async () => (await first.blocksIn('disk')) === storedBlocks, { timeout: 20_000 });
  await first.attached();
  expect(await first.blocksIn('arena')).toBe(0);
  const second = await open(model, true);
  const answer = await second.generate(prompt, answerTokens);
  expect(answer.tokens).toEqual(expected);
  expect(answer.cache.tokensByTier).toEqual({ disk: hitTokens });
  const loadedByGroup = second.loads[0]!.rows.map((row) => row.filter((block) => block !== 0).length);
  expect(loadedByGroup).toEqual(windows.map((window) => (window === 0 ? 23 : windowBlocks(window))));
  expect(second.counters.loadedBlocks).toBe(loadedByGroup.reduce((sum, count) => sum + count));

  // The engine that lived through it goes on from the disk, too.
  expect(first.engine.resetPrefixCache()).toBe(true);
  const again = await first.generate(prompt, answerTokens);
  expect(again.tokens).toEqual(expected);
  expect(again.cache.cachedTokens).toBe(hitTokens);
});
