/** The endpoint picker in a coordinator: gateways ask it of pods that the fleet scrapes, and what they sent is remembered. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type CoordinatorInput, coordinatorSchema, parseConfig } from '@kvtier/config';
import { Gateway, type GatewayStream, modes, toldBy } from '@kvtier/endpoint-picker/testing';
import { Pod, ScriptedEngine } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { type Coordinator, startCoordinator } from './coordinator.ts';

const modelDir = join(import.meta.dirname, '../../../../models/demo/model');
/** gRPC's status. */
const unavailable = 14;
const silent = createLogger('picker-test', 'silent');
const patience = { timeout: 20_000, interval: 5 };
const pods = [new Pod(), new Pod()];
let coordinator: Coordinator;
let gateway: Gateway;

const start = async (config: Omit<CoordinatorInput, 'port'>): Promise<Coordinator> => {
  const input = { port: 0, endpointPicker: { port: 0, health: null }, ...config };
  const started = await startCoordinator(parseConfig(coordinatorSchema, input, 'test'), silent);
  await started.served;
  return started;
};
const withPods = (part: Partial<CoordinatorInput> = {}): Promise<Coordinator> =>
  start({
    tokenizers: { demo: modelDir },
    discovery: {
      kind: 'static',
      workers: pods.map(({ address }, at) => ({ name: `pod-${at}`, kind: 'openai', address })),
    },
    ...part,
  });
beforeAll(async () => {
  for (const pod of pods) await pod.start();
  coordinator = await withPods();
  gateway = new Gateway(coordinator.endpointPicker!.address);
  await all('ready');
});
afterAll(async () => {
  gateway.close();
  await coordinator.close();
  for (const pod of pods) await pod.stop();
});

interface Health {
  readonly workers: readonly { readonly state: string }[];
  readonly routing: { readonly given: number; readonly chosen: number };
}
const health = async () => (await (await fetch(`${coordinator.url}/health`)).json()) as Health;
const all = (state: string) =>
  vi.waitUntil(async () => (await health()).workers.every((one) => one.state === state), patience);
const given = async (): Promise<number> => (await health()).routing.given;
const atRest = () => vi.waitUntil(async () => (await given()) === 0, patience);

/** A request of a gateway, up to what it is told. */
async function asked(
  path: string,
  body: object | string,
  of = gateway,
): Promise<{ stream: GatewayStream; endpoint: unknown }> {
  const stream = of.open({ modes: modes.duplex });
  stream.post(path);
  stream.requestBody(typeof body === 'string' ? body : JSON.stringify(body));
  const [response] = await stream.has(1);
  const { endpoint } = toldBy(response!);
  return { stream, endpoint };
}
async function answered({ stream, endpoint }: Awaited<ReturnType<typeof asked>>): Promise<void> {
  const before = stream.responses.length;
  stream.responseHeaders(String(endpoint));
  stream.responseBody('{"usage":{"prompt_tokens":9,"completion_tokens":1}}', true);
  await stream.has(before + 2);
  stream.end();
  await stream.closed();
}
/** As /metrics says. */
async function counts() {
  const lines = (await (await fetch(`${coordinator.url}/metrics`)).text()).split('\n');
  const of = (name: string): number =>
    Number(lines.find((line) => line.startsWith(`${name} `))?.slice(name.length) ?? 0);
  return {
    picked: of('kvtier_picker_requests_total{outcome="picked"}'),
    noWorker: of('kvtier_picker_requests_total{outcome="no_worker"}'),
    unread: of('kvtier_picker_unread_total{reason="not_understood"}'),
    tokens: of('kvtier_picker_tokens_total{kind="prompt"}'),
    chosen: of('kvtier_dispatch_requests{what="chosen"}'),
  };
}

const words = (seed: number, count: number): string =>
  Array.from({ length: count }, (_, at) => `word${(at * (seed + 3)) % 911}`).join(' ');
/** With what pods take and we do not know. */
const tools = [{ type: 'function', function: { name: 'look', parameters: { type: 'object', properties: {} } } }];
const ofPods = { guided_regex: '[a-z]+', min_tokens: 3, priority: -1, logprobs: true, stream: true };
const completion = (prompt: string) => ({ model: 'demo', prompt, max_tokens: 4, ...ofPods });
const chat = (text: string) => ({ messages: [{ role: 'user', content: text }], max_completion_tokens: 4, ...ofPods });

it.each<[string, number, string, (text: string) => object]>([
  ['completions', 10, '/v1/completions', completion],
  ['chats', 20, '/llama/v1/chat/completions', chat],
  ['chats with tools', 30, '/v1/chat/completions', (text) => ({ ...chat(text), tools })],
])('a prompt goes to the pod that one that begins alike went to: %s', async (_, seed, path, bodyOf) => {
  const prompts = [words(seed, 2_000), words(seed + 1, 2_000)];

  const before = await counts();
  // They come at once, so that the first counts as not computed yet when the second is chosen for: load sends that one elsewhere.
  const [first, second] = await Promise.all([asked(path, bodyOf(prompts[0]!)), asked(path, bodyOf(prompts[1]!))]);
  expect(await given()).toBe(2);
  expect(new Set([first.endpoint, second.endpoint])).toEqual(
    new Set(pods.map(({ address }) => address.slice('http://'.length))),
  );
  await answered(first);
  await answered(second);
  await atRest();
  for (const at of [1, 0, 0, 1, 1, 1, 0]) {
    const again = await asked(path, bodyOf(`${prompts[at]} and more ${at}`));
    expect(again.endpoint).toBe([first, second][at]!.endpoint);
    await answered(again);
  }
  await atRest();
  const after = await counts();
  expect(after).toEqual({
    ...before,
    picked: before.picked + 9,
    tokens: before.tokens + 81,
    chosen: before.chosen + 9,
  });
});

it('one index for both ways in: what came through the API server is found for a gateway', async () => {
  for (const pod of pods) pod.answer = ({ response }) => void response.end('{}');
  for (const text of [words(40, 500), words(41, 500), words(42, 500)]) {
    const response = await fetch(`${coordinator.url}/v1/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(completion(text)),
    });
    const name = response.headers.get('x-kvtier-worker')!;
    await response.text();
    const again = await asked('/v1/completions', completion(`${text} and more`));
    expect(`http://${again.endpoint}`).toBe(pods[Number(name.slice('pod-'.length))]!.address);
    await answered(again);
  }
  await atRest();
});

it('what cannot be understood is routed by load, and is the pod’s to refuse', async () => {
  const before = (await counts()).unread;
  const bodies: [string, object | string][] = [
    ['/v1/completions', 'no JSON'],
    ['/v1/completions', '[1]'],
    ['/v1/completions', '['.repeat(1_000)],
    ['/v1/completions', { model: 'an adapter', prompt: 'a' }],
    ['/v1/embeddings', { model: 'demo', input: 'a' }],
  ];
  for (const [path, body] of bodies) {
    const one = await asked(path, body);
    expect(pods.map(({ address }) => address)).toContain(`http://${one.endpoint}`);
    await answered(one);
  }
  expect((await counts()).unread - before).toBe(bodies.length);
  await atRest();
});

it('a port that is taken ends the start in one line', async () => {
  const taken = Number(new URL(`http://${coordinator.endpointPicker!.address}`).port);
  await expect(withPods({ endpointPicker: { port: taken, health: null } })).rejects.toMatchObject({ code: 'LOCKED' });
});

it('names no worker of our own, and ends with the coordinator', async () => {
  const dir = mkdtempSync(join(tmpdir(), 'kvtier-picker-'));
  const engine = new ScriptedEngine(`unix:${dir}/a`, modelDir);
  await engine.start();
  const own = await start({ engine: `unix:${dir}/a`, endpointPicker: { port: 0, health: { port: 0 } } });
  const itsGateway = new Gateway(own.endpointPicker!.address);
  try {
    expect(own.endpointPicker!.healthAddress).toMatch(/^127\.0\.0\.1:\d+$/);
    const { stream } = await asked('/v1/completions', completion('a'), itsGateway);
    expect(toldBy(stream.responses[0]!)).toMatchObject({ part: 'immediateResponse', status: 503 });
    await stream.closed();
    await own.close();
    expect(await itsGateway.open({ modes: modes.duplex }).closed()).toBe(unavailable);
  } finally {
    itsGateway.close();
    await own.close();
    await engine.stop();
    rmSync(dir, { recursive: true, force: true });
  }
});

it('told to end, it reads and answers what is open within drainMs, and takes nothing else', async () => {
  // Of several models the first one's pod gets what cannot be read.
  const another = new Pod();
  another.model = 'another';
  await another.start();
  const workers = [another, ...pods].map(({ address }, at) => ({ name: `${at}`, kind: 'openai' as const, address }));
  const own = await withPods({ drainMs: 6_000, discovery: { kind: 'static', workers } });
  const itsGateway = new Gateway(own.endpointPicker!.address);
  try {
    const told = async (path: string) => (await (await fetch(`${own.url}${path}`)).json()) as object;
    const isReady = async () =>
      ((await told('/health')) as Health).workers.every(({ state }) => state === 'ready') &&
      ((await told('/v1/models')) as { data: unknown[] }).data.length === 2;
    await vi.waitUntil(isReady, patience);
    const one = await asked('/v1/completions', completion('a'), itsGateway);
    const arriving = itsGateway.open({ modes: modes.duplex });
    arriving.post('/v1/completions');
    const streams = async () =>
      (await (await fetch(`${own.url}/metrics`)).text()).includes('\nkvtier_picker_streams 2');
    await vi.waitUntil(streams, patience);
    const closed = own.close();
    await new Promise((resolve) => setTimeout(resolve, 2_300)); // more than it has by default
    expect(await itsGateway.open({ modes: modes.duplex }).closed()).toBe(unavailable);
    arriving.requestBody(JSON.stringify(completion('b')));
    const [response] = await arriving.has(1);
    const { endpoint } = toldBy(response!);
    expect(pods.map(({ address }) => address)).toContain(`http://${endpoint}`);
    for (const stream of [one, { stream: arriving, endpoint }]) await answered(stream);
    expect([one.stream.ended, arriving.ended]).toEqual([0, 0]);
    await closed;
  } finally {
    itsGateway.close();
    await own.close();
    await another.stop();
  }
});

it('counts return to zero however a request ends; without a pod that answers it is 503', async () => {
  const [left, ended] = [
    await asked('/v1/completions', completion('a')),
    await asked('/v1/completions', completion('b')),
  ];
  expect(await given()).toBe(2);
  left.stream.cancel();
  ended.stream.end();
  await atRest();
  const before = (await counts()).noWorker;
  for (const pod of pods) await pod.stop();
  await all('silent');
  const { stream } = await asked('/v1/completions', completion('a'));
  expect(toldBy(stream.responses[0]!)).toMatchObject({
    part: 'immediateResponse',
    status: 503,
    headers: { 'x-llm-d-request-dropped-reason': 'no_worker', 'retry-after': '1' },
  });
  expect(await given()).toBe(0);
  expect((await counts()).noWorker - before).toBe(1);
});
