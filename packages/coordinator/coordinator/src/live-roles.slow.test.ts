/** Workers of both roles that lean where the load needs them, while it swings: nobody is turned away, and nothing is left counted. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { credentials } from '@grpc/grpc-js';
import { coordinatorSchema, parseConfig } from '@kvtier/config';
import { event, ScriptedEngine, StorePod } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { ExternalScalerClient } from '@kvtier/wire/external-scaler';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { type Coordinator, startCoordinator } from './coordinator.ts';

const modelDir = join(import.meta.dirname, '../../../../models/demo/model');
const names = ['a', 'b', 'c'] as const;
/** Of a machine that does many other things: all that is waited for comes as long as the load lasts. */
const patience = { timeout: 60_000, interval: 20 };
/** What a worker takes for a token, in ms below 40: the same each time. */
let drawn = 4_711;
const servedMs = (): number => {
  drawn = (Math.imul(drawn, 1_664_525) + 1_013_904_223) >>> 0;
  return (drawn / 2 ** 32) * 40;
};
let dir: string;
let engines: ScriptedEngine[];
let pods: StorePod[];
let coordinator: Coordinator;

beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-live-roles-'));
  const store = new Set<string>();
  engines = names.map((name) => new ScriptedEngine(`unix:${dir}/${name}`, modelDir));
  pods = names.map(() => new StorePod(store, 'pods'));
  const rates = {
    prefillTokensPerS: 1_000,
    stepS: 0.02,
    stepPerRequestS: 0.001,
    freedBlocksPerS: 0,
    loadBlocksPerS: {},
  };
  for (const engine of engines) {
    engine.description = { ...engine.description, blockCount: 10_000n };
    engine.load = { running: 4, rates };
    engine.script = async (call) => {
      await sleep(servedMs());
      call.write(event({ tokenIds: [200] }));
      await sleep(servedMs());
      call.write(event({ tokenIds: [201], finishReason: 'length' }));
      call.end();
    };
    await engine.start();
  }
  for (const pod of pods) {
    pod.before = async () => {
      await sleep(servedMs());
      return false;
    };
    await pod.start();
  }
  const config = {
    port: 0,
    planner: { roles: 'live', windowMs: 1_000, holdMs: 100, scaler: { port: 0 } },
    podHandOff: { minUncachedTokens: 100 },
    discovery: {
      kind: 'static',
      workers: names.flatMap((name, at) => [
        { name, address: `unix:${dir}/${name}` },
        { name: `pod-${name}`, kind: 'openai', address: pods[at]!.address },
      ]),
    },
  };
  const silent = createLogger('live-roles-test', 'silent');
  coordinator = await startCoordinator(parseConfig(coordinatorSchema, config, 'test'), silent);
  await coordinator.served;
});
afterEach(async () => {
  await coordinator.close();
  for (const member of [...engines, ...pods]) await member.stop();
  rmSync(dir, { recursive: true, force: true });
});

interface Planned {
  readonly model: string;
  readonly present: Readonly<Record<string, number>>;
}
const planned = async (): Promise<readonly Planned[]> =>
  ((await (await fetch(`${coordinator.url}/admin/planner`)).json()) as { models: Planned[] }).models;
const ready = async (): Promise<number> => {
  const { workers } = (await (await fetch(`${coordinator.url}/health`)).json()) as { workers: { state: string }[] };
  return workers.filter(({ state }) => state === 'ready').length;
};
const routing = async () =>
  ((await (await fetch(`${coordinator.url}/health`)).json()) as { routing: Record<string, number> }).routing;

/** In the metrics, while the pods have long prompts to compute. */
const said = [
  /kvtier_planner_workers_present\{model="pods",role="prefill"\} 2\n/,
  /kvtier_pod_handoff_decisions_total\{decision="split",reason="worth"\} \d+\n/,
];

it('roles turn under load without an error', async () => {
  await vi.waitUntil(async () => {
    const { data = [] } = (await (await fetch(`${coordinator.url}/v1/models`)).json()) as { data?: unknown[] };
    return data.length === 2 && (await ready()) === 6;
  }, patience);
  const failures: string[] = [];
  /** What the workers of our own did, each time that it was something else. */
  const turns: string[] = [];
  let splits = 0;
  let answered = 0;
  let promptTokens = 0;
  let isOver = false;
  let count = 0;
  const client = async (model: string): Promise<void> => {
    while (!isOver) {
      const prompt = Array.from({ length: promptTokens }, (_, at) => 3 + ((at * 7 + count) % 3_000));
      count++;
      const body = JSON.stringify({ model, prompt, max_tokens: 2, temperature: 0 });
      const headers = { 'content-type': 'application/json' };
      const response = await fetch(`${coordinator.url}/v1/completions`, { method: 'POST', headers, body });
      const text = await response.text();
      if (response.status !== 200) failures.push(`${model} ${response.status} ${text}`);
      if (response.headers.get('x-kvtier-handoff')?.startsWith('split')) splits++;
      answered++;
    }
  };
  const prefillers = async (): Promise<number> => {
    const present = (await planned()).find(({ model }) => model === 'demo')?.present;
    const now = JSON.stringify(present);
    if (now !== turns.at(-1)) turns.push(now);
    return present?.prefill ?? 0;
  };
  const watch = async (): Promise<void> => {
    while (!isOver) {
      await prefillers();
      await sleep(50);
    }
  };
  promptTokens = 2_000;
  const all = [...Array.from({ length: 8 }, (_, at) => client(at % 2 === 0 ? 'demo' : 'pods')), watch()];
  try {
    // Each phase until the workers of our own have turned and all clients were served in it; apart where prompts are long.
    for (const wanted of [2, 0, 2]) {
      promptTokens = wanted === 0 ? 2 : 2_000;
      const before = { answered, splits };
      const isReached = async (): Promise<boolean> =>
        answered - before.answered >= 16 && (wanted === 0 || splits > before.splits) && (await prefillers()) === wanted;
      await vi.waitUntil(isReached, patience);
    }
    const keda = new ExternalScalerClient(coordinator.scaler!.address, credentials.createInsecure());
    const scalerMetadata = { role: 'prefill', model: 'demo' };
    const needed = (): Promise<number> =>
      new Promise((resolve, reject) =>
        keda.getMetrics(
          { scaledObjectRef: { name: 'o', namespace: 'n', scalerMetadata }, metricName: '' },
          (error, told) => (error ? reject(error) : resolve(told.metricValues[0]!.metricValueFloat)),
        ),
      );
    await vi.waitUntil(async () => (await needed()) > 2, patience);
    keda.close();
    await vi.waitUntil(async () => {
      const metrics = await (await fetch(`${coordinator.url}/metrics`)).text();
      return said.every((line) => line.test(metrics));
    }, patience);
  } finally {
    isOver = true;
    await Promise.all(all);
  }
  expect(failures).toEqual([]);
  expect(turns.length).toBeGreaterThanOrEqual(3);
  await vi.waitUntil(async () => (await routing()).given === 0, patience);
});
