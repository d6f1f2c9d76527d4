/** The coordinator put together: what its configuration refuses, and requests that follow what workers hold. */
import { mkdtempSync, rmSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Worker } from 'node:worker_threads';
import { type CoordinatorInput, coordinatorSchema, parseConfig, routingPolicyNames } from '@kvtier/config';
import { Gateway, modes, toldBy } from '@kvtier/endpoint-picker/testing';
import { handOffDefaults } from '@kvtier/handoff';
import { event, Pod, ScriptedEngine, say } from '@kvtier/registry/testing';
import { policies } from '@kvtier/routing';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { freePort } from '../../../../infra/ports.ts';
import { type Coordinator, startCoordinator } from './coordinator.ts';
import { checkTokenizers } from './tokenizer-folders.ts';

const modelDir = join(import.meta.dirname, '../../../../models/demo/model');
const silent = createLogger('coordinator-test', 'silent');
let dir: string;
let engines: ScriptedEngine[];
let coordinator: Coordinator | undefined;
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-coordinator-'));
  engines = ['a', 'b'].map((name) => new ScriptedEngine(`unix:${dir}/${name}`, modelDir));
  for (const engine of engines) {
    engine.script = say([200], 'length');
    engine.description = { ...engine.description, blockCount: 10_000n };
    await engine.start();
  }
});
afterEach(async () => {
  await coordinator?.close();
  coordinator = undefined;
  for (const engine of engines) await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

const start = async (config: Omit<CoordinatorInput, 'port'>): Promise<void> => {
  coordinator = await startCoordinator(parseConfig(coordinatorSchema, { port: 0, ...config }, 'test'), silent);
  await coordinator.served;
};
const both = () => ({
  kind: 'static' as const,
  workers: ['a', 'b'].map((name) => ({ name, address: `unix:${dir}/${name}` })),
});
const post = (prompt: readonly number[]): Promise<Response> =>
  fetch(`${coordinator!.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ prompt, max_tokens: 1, temperature: 0 }),
  });
const health = async () => (await (await fetch(`${coordinator!.url}/health`)).json()) as Record<string, unknown>;
const ready = () =>
  vi.waitUntil(async () => ((await health()).workers as { state: string }[]).every(({ state }) => state === 'ready'), {
    timeout: 20_000,
  });

it('the configuration knows the policies that there are', () => {
  expect(routingPolicyNames).toEqual(Object.keys(policies));
});

it('hand-offs have the defaults of the configuration', () => {
  expect(parseConfig(coordinatorSchema, { port: 0 }, 'test').handoff).toEqual(handOffDefaults);
});

it('says in one line what cannot work', async () => {
  const neither = /^coordinator: name one engine worker \(engine\) or how workers are found \(discovery\), not both$/;
  await expect(start({})).rejects.toMatchObject({ code: 'CONFIG', message: expect.stringMatching(neither) });
  await expect(start({ engine: `unix:${dir}/a`, discovery: both() })).rejects.toMatchObject({ code: 'CONFIG' });
  const access = { caFile: `${dir}/none` };
  await expect(start({ engine: `unix:${dir}/a`, access })).rejects.toMatchObject({
    code: 'CONFIG',
    message: expect.stringContaining(`${dir}/none: cannot be`),
  });
  await expect(start({ engine: `unix:${dir}/a`, tokenizers: { pod: dir } })).rejects.toMatchObject({
    code: 'CONFIG',
    message: `tokenizers.pod: ${dir}/tokenizer.json cannot be read (ENOENT); name a folder with that model's tokenizer.json`,
  });
});

it('a tokenizer that is not there now ends no start of another model', async () => {
  const lines: string[] = [];
  checkTokenizers({ a: modelDir, b: dir }, (line) => lines.push(line));
  expect(lines).toEqual([
    `tokenizers.b: ${dir}/tokenizer.json cannot be read (ENOENT); name a folder with that model's tokenizer.json`,
  ]);
});

it('is ready when all of it listens, and not when its only worker is reached', async () => {
  const [operations, gateways] = [await freePort(), await freePort()];
  const isTold = async (): Promise<boolean> =>
    (await fetch(`http://127.0.0.1:${operations}/health/ready`).catch(() => undefined))?.status === 200;
  const parts = { operations: { port: operations }, endpointPicker: { port: gateways, health: null } };
  let hasStarted = false;
  const started = start({ engine: `unix:${dir}/later`, ...parts }).then(() => {
    hasStarted = true;
  });
  await vi.waitUntil(isTold, { timeout: 20_000, interval: 1 });
  expect(hasStarted).toBe(false);
  const picker = new Gateway(`127.0.0.1:${gateways}`);
  try {
    const stream = picker.open({ modes: modes.duplex });
    stream.post('/v1/completions');
    stream.requestBody('{"model":"demo","prompt":"a"}');
    expect(toldBy((await stream.has(1))[0]!)).toMatchObject({ part: 'immediateResponse', status: 503 });
    expect(hasStarted).toBe(false);
  } finally {
    picker.close();
  }
  engines.push(new ScriptedEngine(`unix:${dir}/later`, modelDir));
  await engines.at(-1)!.start();
  await started;
});

it('a port that is taken ends the start before it is ready', async () => {
  await start({ engine: `unix:${dir}/a`, operations: { port: 0 } });
  const taken = Number(new URL(coordinator!.url).port);
  const said: number[] = [];
  const operations = await freePort();
  const second = start({
    ...{ engine: `unix:${dir}/none`, operations: { port: operations } },
    endpointPicker: { port: taken, health: null },
  });
  let hasEnded = false;
  const ended = second.catch((error: unknown) => error).finally(() => (hasEnded = true));
  while (!hasEnded) {
    const answer = await fetch(`http://127.0.0.1:${operations}/health/ready`).catch(() => undefined);
    if (answer) said.push(answer.status);
    await new Promise(setImmediate);
  }
  expect(await ended).toMatchObject({ code: 'LOCKED' });
  expect(said.filter((status) => status === 200)).toEqual([]);
});

it('one engine needs no index, and nothing is degraded', async () => {
  await start({ engine: `unix:${dir}/a` });
  await ready();
  const response = await post([5]);
  expect([response.status, response.headers.get('x-kvtier-worker'), response.headers.get('x-kvtier-degraded')]).toEqual(
    [200, 'engine', null],
  );
  expect(await health()).toMatchObject({ status: 'ok', engine: { model: 'demo' }, indexes: {}, degraded: [] });
  expect(coordinator!.endpointPicker).toBeUndefined();
});

it('takes as much at once as its configuration says', async () => {
  await start({ engine: `unix:${dir}/a`, limits: { answers: 1 } });
  await ready();
  const response = await fetch(`${coordinator!.url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ prompt: [5], n: 2 }),
  });
  expect([response.status, await response.json()]).toMatchObject([
    429,
    { error: { message: "this coordinator's own bound: 0 of 1 answers are being generated already; try again later" } },
  ]);
});

it('takes bodies as large as its configuration says, and they go on byte by byte', async () => {
  const pod = new Pod();
  pod.answer = ({ response }) => void response.end('{}');
  await pod.start();
  try {
    const workers = [{ name: 'pod', kind: 'openai' as const, address: pod.address }];
    await start({ discovery: { kind: 'static', workers }, limits: { bodyBytes: 32 << 20 } });
    await ready();
    const image = Buffer.alloc(15 << 20, 'kvtier').toString('base64'); // 20 MiB
    const url = `data:image/png;base64,${image}`;
    const chat = (content: object[]): string =>
      JSON.stringify({ model: 'demo', messages: [{ role: 'user', content }] });
    const part = { type: 'image_url', image_url: { url } };
    const ask = (body: string): Promise<Response> =>
      fetch(`${coordinator!.url}/v1/chat/completions`, {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body,
      });
    const sent = chat([part]);
    expect((await ask(sent)).status).toBe(200);
    expect([pod.seen.length, pod.seen[0]!.body === sent]).toEqual([1, true]);
    const refused = await ask(chat([part, part]));
    expect([refused.status, await refused.json()]).toMatchObject([
      413,
      { error: { message: 'The body is larger than 33554432 bytes.', code: 'request_too_large' } },
    ]);
  } finally {
    await pod.stop();
  }
});

it('waits for a body as long as its configuration says', async () => {
  await start({ engine: `unix:${dir}/a`, limits: { largeBodyMs: 1_000 } });
  await ready();
  const socket = connect(Number(new URL(coordinator!.url).port), '127.0.0.1');
  const told = new Promise<string>((resolve) => socket.once('data', (bytes) => resolve(String(bytes))));
  const head = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 200000`;
  socket.write(`${head}\r\n\r\n${'a'.repeat(100_000)}`);
  expect(await told).toMatch(/^HTTP\/1\.1 408 .*The body did not arrive within 1 s\./s);
  socket.destroy();
});

it('who reads bodies has a heap for the largest, of the API server or of gateways', async () => {
  const heaps: (number | undefined)[] = [];
  const onThread = ({ resourceLimits }: Worker): void => void heaps.push(resourceLimits?.maxOldGenerationSizeMb);
  process.on('worker', onThread);
  try {
    const endpointPicker = { port: 0, health: null, bodyBytes: 64 << 20, heldBytes: 64 << 20 };
    await start({ engine: `unix:${dir}/a`, endpointPicker });
    expect(heaps).toEqual([1_536, 1_536]);
    await coordinator!.close();
    await start({
      engine: `unix:${dir}/a`,
      endpointPicker: { ...endpointPicker, bodyBytes: 65_536 },
      limits: { bodyBytes: 128 << 20 },
    });
    expect(heaps.slice(2)).toEqual([3_072, 3_072]);
  } finally {
    process.off('worker', onThread);
  }
});

it('told to end, it lets answers that run end within drainMs, and takes nothing new', async () => {
  let finish = (): void => {};
  engines[0]!.script = (call) => {
    call.write(event({ tokenIds: [200] }));
    finish = () => {
      call.write(event({ tokenIds: [201], finishReason: 'length' }));
      call.end();
    };
  };
  await start({ engine: `unix:${dir}/a`, drainMs: 6_000 });
  await ready();
  const [body, { port }] = [JSON.stringify({ prompt: [5], max_tokens: 2, stream: true }), new URL(coordinator!.url)];
  const head = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ${body.length}`;
  const socket = connect(Number(port), '127.0.0.1');
  let answers = '';
  socket.on('data', (bytes) => (answers += bytes));
  socket.write(`${head}\r\n\r\n${body}`);
  await vi.waitUntil(() => engines[0]!.seen.length === 1, { timeout: 20_000 });
  const closed = coordinator!.close();
  const isRefused = (): Promise<boolean> =>
    new Promise((resolve) => {
      const probe = connect(Number(port), '127.0.0.1', () => resolve(!probe.destroy()));
      probe.once('error', () => resolve(true));
    });
  await vi.waitUntil(isRefused, { timeout: 20_000 });
  socket.write(`${head}\r\n\r\n${body}`); // behind the answer that runs
  await new Promise((resolve) => setTimeout(resolve, 2_200)); // more than it has by default
  finish();
  await closed;
  const [, first, second] = answers.split('HTTP/1.1 ');
  expect(first).toMatch(/^200 .*"finish_reason":"length".*data: \[DONE\]/s);
  expect(second).toMatch(/^503 .*"message":"the API server is closing; try again"/s);
  expect(engines[0]!.seen).toHaveLength(1);
});

it('a prompt goes where one that begins alike went, and says that this is a guess', async () => {
  await start({ discovery: both() });
  await ready();
  const prompts = Array.from({ length: 6 }, (_, i) =>
    Array.from({ length: 320 }, (_, at) => 3 + ((at * (i + 3)) % 3_000)),
  );
  const first: string[] = [];
  for (const prompt of prompts) first.push((await post(prompt)).headers.get('x-kvtier-worker')!);
  for (const [i, prompt] of prompts.entries()) {
    const response = await post([...prompt, 7, 8]);
    const header = (name: string) => response.headers.get(`x-kvtier-${name}`);
    expect([header('worker'), header('held'), header('degraded')]).toEqual([first[i], '20 blocks; gpu=20', 'index']);
  }
  expect(await health()).toMatchObject({
    status: 'ok',
    degraded: ['index'],
    routing: { policy: 'predicted', waiting: 0, given: 0, chosen: 12 },
    indexes: {
      demo: { workers: [{ name: 'a', why: expect.stringMatching(/^publishes no KV events: /) }, { name: 'b' }] },
    },
  });
  const metrics = await (await fetch(`${coordinator!.url}/metrics`)).text();
  // Of less than a block nobody holds anything: no guess is in this choice.
  expect((await post([5, 6])).headers.get('x-kvtier-degraded')).toBeNull();
  expect(metrics).toContain('\nkvtier_dispatch_requests{what="chosen"} 12\n');
  expect(metrics).toContain('\nkvtier_kv_index_guessed_workers 2\n');
});

it('workers that end while it closes are no trouble', async () => {
  const logger = createLogger('coordinator-test', 'silent');
  const warn = vi.spyOn(logger, 'warn');
  const info = vi.spyOn(logger, 'info');
  const config = parseConfig(coordinatorSchema, { port: 0, discovery: both() }, 'test');
  coordinator = await startCoordinator(config, logger);
  await coordinator.served;
  await ready();
  // An answer that runs keeps it from closing meanwhile.
  engines[0]!.script = (call) => void call.write(event({ tokenIds: [200] }));
  engines[1]!.script = engines[0]!.script;
  const answer = post([5, 6]).catch(() => undefined);
  await vi.waitUntil(() => engines.some(({ seen }) => seen.length > 0), { timeout: 20_000 });
  const closed = coordinator.close();
  await engines.find(({ seen }) => seen.length === 0)!.stop();
  const isLost = ([what]: readonly unknown[]): boolean => (what as { state?: string }).state === 'silent';
  await vi.waitUntil(() => [...info.mock.calls, ...warn.mock.calls].some(isLost), { timeout: 20_000 });
  for (const engine of engines) await engine.stop();
  await Promise.all([answer, closed]);
  expect(warn.mock.calls.filter(isLost)).toEqual([]);
});
