/** A worker that is listed and not there yet: a coordinator that starts beside it warns of nothing; of one that never comes, it does. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { ScriptedEngine, SpokenDiscovery } from './testing/index.ts';

const patience = { timeout: 20_000, interval: 5 };
const startMs = 400;
let dir: string;
let engine: ScriptedEngine;
let fleet: Fleet;
let discovery: SpokenDiscovery;
let lines: string[];
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-starting-'));
  engine = new ScriptedEngine(`unix:${dir}/late.sock`, '/models/m');
  lines = [];
  const logger = createLogger('fleet-test', 'silent');
  vi.spyOn(logger, 'warn').mockImplementation((_fields: unknown, line?: string) => void lines.push(line ?? ''));
  fleet = new Fleet({ logger, times: { startMs, pauseMs: 20 } });
  discovery = new SpokenDiscovery();
  await fleet.start(discovery);
});
afterEach(async () => {
  await fleet.close();
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

it('nobody is warned of a worker that may still start; of one that does not come, once', async () => {
  const listedMs = performance.now();
  discovery.say({ name: 'late', address: `unix:${dir}/late.sock` });
  const [late] = fleet.workers();
  await vi.waitUntil(() => late!.why !== undefined, patience);
  expect(late!.state).toBe('joining');
  await vi.waitUntil(() => lines.length > 0, patience);
  expect(performance.now() - listedMs).toBeGreaterThanOrEqual(startMs - 1);
  await engine.start();
  await vi.waitUntil(() => late!.state === 'ready', patience);
  expect(lines).toEqual([expect.stringMatching(/^worker late: .*cannot be reached/)]);
});
