/** Of other routers' rules: what they remember, and for how long. */
import { maxMedia } from '@kvtier/kv-index';
import { expect, it } from 'vitest';
import { mix32 } from '../hashing.ts';
import { policies, type RoutedRequest, type WorkerState } from '../index.ts';

const request = (first: number, blocks: number, blockTokens = 16): RoutedRequest => ({
  tokens: blocks * blockTokens,
  maxTokens: 10,
  blockTokens,
  keys: Int32Array.from({ length: 2 * blocks }, (_, i) => mix32(first * 100_003 + i, i) | 0),
  session: '',
});
const worker = (given: Partial<WorkerState> = {}): WorkerState =>
  ({
    ...{ waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, remoteBlocks: 0, remoteMedium: 3 },
    match: { blocks: 0, byMedium: new Int32Array(maxMedia) },
    ...given,
  }) as WorkerState;
const half = (): number => 0.5;
const hourMs = 3_600_000;

it('the balanced tree keeps what fits, however long ago it was sent', () => {
  const policy = policies['balanced-tree']();
  const workers = [worker(), worker({ waiting: 1 })];
  policy.sent!(request(1, 9), 1, 0);
  policy.sent!(request(2, 20), 0, 0);
  policy.sent!(request(3, 20), 1, hourMs);
  expect(policy.choose(request(1, 9), workers, hourMs, half)).toBe(1);
});

it('the balanced tree keeps 67,108,864 tokens of each worker, those that were sent last', () => {
  const policy = policies['balanced-tree']();
  // Of 2²² tokens each: 16 blocks fit.
  const sent = [1, 2, 3].map((first) => request(first, 8, 2 ** 22));
  for (const one of sent) policy.sent!(one, 1, 0);
  policy.sent!(request(4, 12, 2 ** 22), 0, 0);
  const workers = [worker(), worker({ waiting: 1 })];
  expect(sent.map((one) => policy.choose(one, workers, 0, half))).toEqual([0, 1, 1]);
});

it('the load band keeps 200,000 blocks of all workers together, for 20 minutes', () => {
  const policy = policies['load-band']();
  const workers = [worker(), worker(), worker({ waiting: 1 }), worker({ waiting: 1 })];
  const chosen = (first: number, blocks: number, atMs: number): number =>
    policy.choose(request(first, blocks), workers, atMs, half);
  policy.sent!(request(1, 100), 2, 0);
  policy.sent!(request(2, 100_000), 0, 1);
  expect(chosen(1, 100, 1)).toBe(2);
  policy.sent!(request(3, 100_000), 1, 2);
  expect(chosen(1, 100, 2)).not.toBe(2);
  policy.sent!(request(4, 100), 3, 3);
  expect(chosen(4, 100, 20 * 60_000)).toBe(3);
  policy.sent!(request(5, 1), 0, 20 * 60_000 + 4);
  for (let i = 0; i < 400; i++) policy.sent!(request(5, 1), 0, 20 * 60_000 + 5);
  expect(chosen(4, 100, 20 * 60_000 + 5)).not.toBe(3);
});

it('overlap cost credits nobody with what others hold, and a half of what a worker has in a tier that others read', () => {
  const choose = (workers: WorkerState[]): number => policies['overlap-cost']().choose(request(1, 8), workers, 0, half);
  const pooled = { blocks: 8, byMedium: Int32Array.of(0, 0, 0, 0, 8, 0, 0, 0) };
  expect(choose([worker({ usedBlocks: 5 }), worker({ remoteBlocks: 8, usedBlocks: 6 })])).toBe(0); // 8 + 5, 8 + 6
  expect(choose([worker({ usedBlocks: 5 }), worker({ match: pooled, usedBlocks: 8 })])).toBe(1); // 8 + 5, 4 + 8
});
