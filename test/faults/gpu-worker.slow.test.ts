/**
 * An engine worker on a GPU (its kernels on the CPU, by the emulator) with a cache node: the same tokens as an engine on the CPU
 * without a tier, computed or loaded; and a GPU that faults or hangs ends this worker only, with a clear answer.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { KvError } from '@kvtier/errors';
import { channelOptions, clientCredentials, EngineClient } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { ask, describe, metricsText, Service, until } from './engine-rig.ts';

const modelDir = fileURLToPath(new URL('../numerics/golden/llama', import.meta.url));
/** One and the same, asked again, is stored no second time: then it is a step that is hit by a fault, and not a copy to the tier, which no answer waits for. */
const prompt = (seed: number): number[] =>
  Array.from({ length: 90 }, (_, i) => 3 + ((i * i * 13 + i * 5 + seed * 31) % 150));

let folder: string;
let node: Service;
const started: Service[] = [];
const clients: EngineClient[] = [];

beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-gpu-'));
  const nodeConfig = { arena: { bytes: 16 << 20 }, disk: { bytes: 64 << 20 }, logLevel: 'warn' };
  node = new Service('cache-node', { socketPath: join(folder, 'n/s'), dataDir: join(folder, 'data'), ...nodeConfig });
  started.push(node);
  await node.start();
});
afterEach(async () => {
  for (const client of clients.splice(0)) client.close();
  for (const service of started.splice(0).reverse()) await service.signal('SIGTERM');
  rmSync(folder, { recursive: true, force: true });
});

async function startWorker(
  name: string,
  config: object,
  env: NodeJS.ProcessEnv = {},
): Promise<[Service, EngineClient]> {
  const address = `unix:${join(folder, name)}`;
  const base = { modelDir, servedName: 'tiny', listen: address, kvBytes: 1 << 20, maxStepTokens: 64, threads: 1 };
  const worker = new Service('engine-worker', { ...base, logLevel: 'warn', ...config }, env);
  started.push(worker);
  await worker.start();
  const client = new EngineClient(address, clientCredentials(address), channelOptions);
  clients.push(client);
  return [worker, client];
}

const gpu = (settings: object = {}): object => ({
  backend: 'cuda-emulated',
  gpu: { computeDtype: 'f32', ...settings },
  cacheNodeSocket: join(folder, 'n/s'),
  loads: 'always', // whatever is faster on this machine now
});
const attached = (client: EngineClient): Promise<void> =>
  until(async () => (await describe(client)).tierAttached, 'the session');

it('answers as the CPU does, computed, cached, and from the tier after SIGKILL', { timeout: 120_000 }, async () => {
  const [, judge] = await startWorker('judge', { backend: 'cpu', cacheNodeSocket: null });
  const [worker, client] = await startWorker('gpu', gpu());
  await attached(client);
  for (let seed = 0; seed < 3; seed++) {
    const right = (await ask(judge, prompt(seed))).tokenIds;
    expect((await ask(client, prompt(seed))).tokenIds).toEqual(right);
    expect((await ask(client, prompt(seed))).tokenIds).toEqual(right);
  }
  expect(await metricsText(client)).toContain('kvtier_engine_step_tokens 64\n');
  // What is on its way to the tier dies with the worker.
  await until(
    async () => /kvtier_connector_storing_blocks 0\n/.test(await metricsText(client)),
    'stores to be confirmed',
  );
  await worker.signal('SIGKILL');
  const [, again] = await startWorker('gpu2', gpu());
  await attached(again);
  for (let seed = 0; seed < 3; seed++) {
    const { tokenIds, cache } = await ask(again, prompt(seed));
    expect(tokenIds).toEqual((await ask(judge, prompt(seed))).tokenIds);
    expect(cache!.cachedTokens).toBe(80); // five full blocks of 16; the rest is computed
  }
});

it('an arena that cannot be pinned is said in log and metrics with what to do, and serves through buffers', {
  timeout: 120_000,
}, async () => {
  const [, judge] = await startWorker('judge', { backend: 'cpu', cacheNodeSocket: null });
  const [first, storing] = await startWorker('gpu', gpu(), { KVTIER_EMULATED_UNPINNED: '1' });
  await attached(storing);
  const { tokenIds: right } = await ask(judge, prompt(0));
  expect((await ask(storing, prompt(0))).tokenIds).toEqual(right);
  await until(
    async () => /kvtier_connector_storing_blocks 0\n/.test(await metricsText(storing)),
    'stores to be confirmed',
  );
  const metrics = await metricsText(storing);
  expect(metrics).toContain(`kvtier_engine_arena_bytes{pinned="no"} ${16 << 20}\n`);
  expect(metrics).toContain('kvtier_engine_arena_bytes{pinned="yes"} 0\n');
  expect(first.said).toMatch(/the arena is not pinned, .* operation not supported; .*confidential computing/);
  await first.signal('SIGTERM');
  const [, loading] = await startWorker('gpu2', gpu(), { KVTIER_EMULATED_UNPINNED: '1' });
  await attached(loading);
  const { tokenIds, cache } = await ask(loading, prompt(0));
  expect([tokenIds, cache!.cachedTokens]).toEqual([right, 80]);
});

it('a worker whose GPU hangs ends in order when it is told to: nothing of its close waits for the device', {
  timeout: 120_000,
}, async () => {
  const [faulty, client] = await startWorker('faulty', gpu({ stepDeadlineMs: 2_000 }), {
    KVTIER_EMULATED_FAULT: 'hang@400',
  });
  let failed = false;
  for (let asked = 0; asked < 40 && !failed; asked++) {
    await ask(client, prompt(0)).catch(() => {
      failed = true;
    });
  }
  expect(failed).toBe(true);
  const toldMs = performance.now();
  await faulty.signal('SIGTERM');
  // 0: it closed in order. 1: its own end, a second after the fault, came first. Null: it was killed.
  expect([0, 1]).toContain(await faulty.ended(1_000));
  expect(performance.now() - toldMs).toBeLessThan(7_000); // below the 8 s at which it would be killed
});

it.each(['illegal', 'hang'])(
  '%s: this worker ends with a clear answer, the node and another worker go on',
  {
    timeout: 120_000,
  },
  async (fault) => {
    const [faulty, client] = await startWorker('faulty', gpu({ stepDeadlineMs: 2_000 }), {
      KVTIER_EMULATED_FAULT: `${fault}@400`,
    });
    const failures: KvError[] = [];
    for (let asked = 0; asked < 40 && failures.length === 0; asked++) {
      await ask(client, prompt(0)).catch((error: KvError) => failures.push(error));
    }
    expect(failures).toHaveLength(1);
    expect(failures[0]).toMatchObject({ code: 'GPU' });
    expect(await faulty.ended(30_000)).toBe(1);
    const [, judge] = await startWorker('judge', { backend: 'cpu', cacheNodeSocket: null });
    const [, sound] = await startWorker('sound', gpu());
    for (let seed = 0; seed < 3; seed++) {
      expect((await ask(sound, prompt(seed))).tokenIds).toEqual((await ask(judge, prompt(seed))).tokenIds);
    }
  },
);
