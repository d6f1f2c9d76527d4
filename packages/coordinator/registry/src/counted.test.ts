/** A worker's load as a coordinator sees it: what it told, what was sent since, what is over since, each request once. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { ScriptedEngine, SpokenDiscovery } from './testing/index.ts';
import { event, greedy } from './testing/scripted-engine.ts';
import type { Worker } from './worker.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000, interval: 5 };
const never = new AbortController().signal;

let dir: string;
let engine: ScriptedEngine;
let fleet: Fleet;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-counted-'));
  engine = new ScriptedEngine(`unix:${dir}/a.sock`, '/models/m');
  fleet = new Fleet({ logger: createLogger('fleet-test', 'silent') });
  const discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  await engine.start();
  engine.script = () => {};
  engine.load = { waiting: 2, running: 3, tokensAhead: 1_000n, usedBlocks: 40n, waitingBlocks: 8n, loadAheadS: 0.5 };
  discovery.say({ name: 'a', address: `unix:${dir}/a.sock` });
  await vi.waitFor(() => expect(worker().state).toBe('ready'), patience);
});
afterEach(async () => {
  await fleet.close();
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

const worker = (): Worker => fleet.workers()[0]!;
const at = () => {
  const { waiting, running, tokensAhead, usedBlocks, waitingBlocks, loadAheadS } = worker().load;
  return [waiting, running, tokensAhead, usedBlocks, waitingBlocks, loadAheadS];
};

it('its load is what it told and what was sent since, each request once', async () => {
  expect(at()).toEqual([2, 3, 1_000, 40, 8, 0.5]);
  const one = fleet.sent(0, { requestId: 'one', tokensAhead: 100, blocks: 10, loadS: 0.25 });
  const two = fleet.sent(0, { requestId: 'two', tokensAhead: 50, blocks: 5, loadS: 0 });
  expect(at()).toEqual([4, 3, 1_150, 40, 23, 0.75]);
  const running = fleet.follow(0, greedy({ requestId: 'one', promptTokenIds: [5] }), never, () => {});
  await vi.waitFor(() => expect(engine.seen).toHaveLength(1), patience);
  const { sender, sentNumber } = engine.seen[0]!.request;
  expect(sender).toMatch(/^[0-9a-f]{16}$/);
  expect(sentNumber).toBe(1);
  // The engine's own word includes it now.
  engine.load = { ...engine.load, waiting: 3, tokensAhead: 1_100n, waitingBlocks: 18n };
  engine.tell({ taken: [1] });
  await vi.waitFor(() => expect(at()).toEqual([4, 3, 1_150, 40, 23, 0.5]), patience);
  engine.tell({ taken: [1] });
  two.ended();
  two.ended();
  await vi.waitFor(() => expect(at()).toEqual([3, 3, 1_100, 40, 18, 0.5]), patience);
  // It runs, and its last event comes: so it is counted, whatever the engine's last word was, until its next one.
  one.firstToken();
  expect(at()).toEqual([2, 4, 1_100, 40, 18, 0.5]);
  one.ended();
  expect(at()).toEqual([2, 4, 1_100, 40, 18, 0.5]);
  engine.load = { ...engine.load, waiting: 2, tokensAhead: 1_000n };
  engine.tell({ ended: [1] });
  await vi.waitFor(() => expect(at()).toEqual([2, 3, 1_000, 40, 18, 0.5]), patience);
  const failed = expect(running).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  await engine.stop();
  await failed;
});

it.each(['generate', 'follow'] as const)('what has ended counts no more before its caller knows (%s)', async (way) => {
  engine.script = (call) => void call.write(event({ tokenIds: [7] }));
  const one = fleet.sent(0, { requestId: 'one', tokensAhead: 100, blocks: 10, loadS: 0 });
  const seen: (readonly number[])[] = [];
  const hear = ({
    tokenIds,
    finishReason,
  }: {
    readonly tokenIds: readonly number[];
    readonly finishReason: string;
  }) => {
    if (tokenIds.length > 0) one.firstToken();
    seen.push([tokenIds.length, finishReason.length, worker().load.running]);
  };
  const run = async (): Promise<void> => {
    const request = greedy({ requestId: 'one', promptTokenIds: [5] });
    if (way === 'follow') return fleet.follow(0, request, never, hear);
    for await (const each of fleet.generate(0, request, never)) hear(each);
    return undefined;
  };
  const whole = run();
  await vi.waitFor(() => expect(seen).toHaveLength(1), patience);
  engine.load = { running: 4, usedBlocks: 9n };
  engine.tell({ taken: [1], begun: [1] });
  await vi.waitFor(() => expect(at()).toEqual([0, 4, 0, 9, 0, 0]), patience);
  engine.calls[0]!.write(event({ finishReason: 'stop' }));
  await whole;
  one.ended();
  expect(seen).toEqual([
    [1, 0, 4],
    [0, 4, 3],
  ]);
  expect(at()).toEqual([0, 3, 0, 9, 0, 0]);
});
