/** Pods of vLLM and SGLang behind a fleet: an HTTP server that speaks as they do. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join as pathOf } from 'node:path';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { linkTimes } from './link.ts';
import { Member } from './member.ts';
import { Pod, type PodRequest } from './testing/pod.ts';
import { SpokenDiscovery } from './testing/rig.ts';
import { ScriptedEngine } from './testing/scripted-engine.ts';
import type { Worker } from './worker.ts';

const patience = { timeout: 20_000, interval: 5 };
const never = new AbortController().signal;

type FleetOptions = ConstructorParameters<typeof Fleet>[0];
let fleet: Fleet;
let discovery: SpokenDiscovery;
let pod: Pod;
beforeEach(async () => {
  pod = new Pod();
  await pod.start();
  await open();
});
afterEach(async () => {
  await fleet.close();
  await pod.stop();
});

/** Limits that no busy machine reaches. */
const calm = { askMs: 5_000, podSilentMs: 5_000 };

async function open({ access, limits = calm }: { access?: FleetOptions['access']; limits?: typeof calm } = {}) {
  await fleet?.close();
  const logger = createLogger('pod-test', 'silent');
  fleet = new Fleet({
    logger,
    times: { refusedPauseMs: 50, scrapeMs: 20, ...limits },
    ...(access && { access }),
  });
  discovery = new SpokenDiscovery();
  await fleet.start(discovery);
}

const join = (name = 'a', of = pod): void => discovery.say({ name, kind: 'openai', address: of.address });
const worker = (name = 'a'): Worker => fleet.workers().find((one) => one?.record.name === name)!;
const until = (state: string, name = 'a'): Promise<void> =>
  vi.waitFor(() => expect(worker(name).state).toBe(state), patience);
/** After a scrape that began after now. */
const scraped = async (): Promise<void> => {
  const after = pod.scrapes + 2;
  await vi.waitFor(() => expect(pod.scrapes).toBeGreaterThanOrEqual(after), patience);
  const fromMs = performance.now();
  await vi.waitFor(() => expect(worker().load.toldAtMs).toBeGreaterThan(fromMs), patience);
};
const forward = (body = '{}', signal = never) =>
  fleet.forward(0, '/v1/completions', { 'content-type': 'application/json', 'x-request-id': 'r' }, body, signal);
async function textOf(body: AsyncIterable<Buffer>): Promise<string> {
  let text = '';
  for await (const part of body) text += part.toString();
  return text;
}

it('vLLM says what it serves and what it has to do', async () => {
  pod.figures = { waiting: 3, running: 5, usedShare: 0.4 };
  join();
  await until('ready');
  expect(worker().facts).toEqual({
    model: 'demo',
    modelDigest: '',
    modelDir: '',
    maxModelTokens: 8_192,
    vocabSize: 0,
    stopTokenIds: [],
    blockTokens: 16,
    hashAlgorithm: 'sha256_cbor',
    hashSeed: '',
    totalBlocks: 1_000,
    blockBytes: 0,
    bootEpoch: `${pod.address} 1700000000.25`,
  });
  expect(worker().load).toMatchObject({ waiting: 3, running: 5, usedBlocks: 400, prefillTokensPerS: 2_000 });
});

it('pods of one model are served side by side, and beside workers of ours, however each hashes its blocks', async () => {
  const dir = mkdtempSync(pathOf(tmpdir(), 'kvtier-pods-'));
  const [other, ours] = [new Pod(), new ScriptedEngine(`unix:${dir}/c.sock`, '/models/m')];
  pod.hashAlgorithm = 'sha256';
  other.hashAlgorithm = 'xxhash';
  await Promise.all([other.start(), ours.start()]);
  try {
    const named = (name: string, { address }: Pod) => ({ name, kind: 'openai' as const, address });
    const all = [named('a', pod), named('b', other), { name: 'c', address: `unix:${dir}/c.sock` }];
    for (const [i, { name }] of all.entries()) {
      discovery.say(...all.slice(0, i + 1));
      await until('ready', name);
    }
    expect(all.map(({ name }) => worker(name).facts!.hashAlgorithm)).toEqual(['sha256', 'xxhash', 'sha256_cbor']);
  } finally {
    await Promise.all([other.stop(), ours.stop()]);
    rmSync(dir, { recursive: true });
  }
});

it('SGLang as well; what it does not say is unknown', async () => {
  const other = new Pod('sglang');
  await other.start();
  other.figures = { waiting: 1, running: 2, usedShare: 0.5 };
  join('a', other);
  await until('ready');
  expect(worker().facts).toMatchObject({ blockTokens: 64, totalBlocks: 500, bootEpoch: '' });
  expect(worker().load).toMatchObject({ waiting: 1, running: 2, usedBlocks: 250 });
  await other.stop();
});

it('of the other names of its model adapters are told apart; what is no name, and more than 64, is left out', async () => {
  const many = Array.from({ length: 100 }, (_, at) => ({ id: `adapter-${at}`, root: '/loras/x', parent: 'demo' }));
  const cards = [
    { id: 'demo', root: '/models/demo', parent: null, max_model_len: 4_096 },
    { id: 'alias', root: '/models/demo', parent: null },
    { id: 7 },
    { id: 'demo', root: '/models/demo' },
    { id: 'elsewhere', root: '/models/other' },
    ...many,
  ];
  pod.models = () => JSON.stringify({ data: cards });
  join();
  await until('ready');
  const { model, maxModelTokens, otherNames = [] } = worker().facts!;
  expect([model, maxModelTokens, otherNames.length]).toEqual(['demo', 4_096, 64 - 3]);
  expect(otherNames.slice(0, 3)).toEqual([
    { name: 'alias', isAdapter: false },
    { name: 'elsewhere', isAdapter: true },
    { name: 'adapter-0', isAdapter: true },
  ]);
});

it.each([
  ['/metrics', 'start SGLang with --enable-metrics'],
  ['/v1/models', 'serve vLLM’s or SGLang’s API there'],
])('a pod that has no %s is refused, and what to do is said', async (path, remedy) => {
  pod.lacks = path;
  join();
  await until('refused');
  expect(worker().why).toBe(`worker a: ${path} answers 404; ${remedy}`);
});

it('says of how many engines it is, each with blocks of its own, as soon as they tell of themselves', async () => {
  join();
  await until('ready');
  expect(worker().facts!.engines).toBeUndefined();
  pod.extra = 'vllm:num_requests_waiting{engine="1"} 0\nvllm:num_requests_running{engine="1"} 0\n';
  const told = vi.fn();
  const stop = fleet.onChange(told);
  await vi.waitFor(() => expect(worker().facts!.engines).toBe(2), patience);
  stop();
  expect(told).toHaveBeenCalledTimes(1);
  // One that says nothing for a moment has not gone.
  pod.extra = '';
  await scraped();
  expect(worker().facts!.engines).toBe(2);
});

it('what SGLang says of its blocks once it answers counts from then on, and is told', async () => {
  const other = new Pod('sglang');
  await other.start();
  other.pageTokens = 0;
  other.figures.usedShare = 0.5;
  join('a', other);
  await until('ready');
  expect(worker().facts).toMatchObject({ blockTokens: 0, totalBlocks: 0 });
  const told = new Promise<void>((resolve) => {
    fleet.onChange(() => worker().facts!.blockTokens > 0 && resolve());
  });
  other.pageTokens = 16;
  await told;
  expect(worker().facts).toMatchObject({ blockTokens: 16, totalBlocks: 500 });
  await vi.waitFor(() => expect(worker().load.usedBlocks).toBe(250), patience);
  await other.stop();
});

it('its answer streams back as it comes, and what was asked goes there as it came', async () => {
  join();
  await until('ready');
  let sent: PodRequest | undefined;
  pod.answer = (request) => {
    sent = request;
    request.response.writeHead(200, { 'content-type': 'text/event-stream', 'x-pod': 'yes' });
    request.response.write('data: 1\n\n');
  };
  const answer = await forward('{"prompt":"ä"}');
  expect(answer.status).toBe(200);
  expect(answer.headers).toMatchObject({ 'content-type': 'text/event-stream', 'x-pod': 'yes' });
  expect(answer.headers['transfer-encoding']).toBeUndefined();
  const parts = answer.body[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe('data: 1\n\n');
  // Only now is there more: nothing was waited for.
  sent!.response.end('data: [DONE]\n\n');
  expect(String((await parts.next()).value)).toBe('data: [DONE]\n\n');
  expect((await parts.next()).done).toBe(true);
  expect(sent).toMatchObject({ path: '/v1/completions', body: '{"prompt":"ä"}' });
  expect(sent!.headers).toMatchObject({
    'content-type': 'application/json',
    'x-request-id': 'r',
    'content-length': '15',
  });
});

it('a refusal of the pod is an answer', async () => {
  join();
  await until('ready');
  pod.answer = ({ response }) =>
    void response.writeHead(400, { 'content-type': 'application/json' }).end('{"error":1}');
  const { status, body } = await forward();
  expect([status, await textOf(body)]).toEqual([400, '{"error":1}']);
});

it('a caller that leaves, before or while it is answered, ends the request at the pod', async () => {
  join();
  await until('ready');
  const leaving = new AbortController();
  const waiting = forward('{}', leaving.signal);
  await vi.waitFor(() => expect(pod.seen).toHaveLength(1), patience);
  const gone = new Error('left');
  leaving.abort(gone);
  await expect(waiting).rejects.toBe(gone);
  await pod.seen[0]!.left;
  pod.answer = ({ response }) => void response.write('some');
  const { body } = await forward();
  for await (const _ of body) break;
  await pod.seen[1]!.left;
  const during = new AbortController();
  const third = await forward('{}', during.signal);
  const parts = third.body[Symbol.asyncIterator]();
  await parts.next();
  during.abort(gone);
  await expect(parts.next()).rejects.toBe(gone);
  await pod.seen[2]!.left;
});

it('does not read ahead of its caller', async () => {
  join();
  await until('ready');
  let written = 0;
  pod.answer = ({ response }) => {
    const part = Buffer.alloc(64 << 10);
    const more = (): void => {
      while (written < 256 << 20) {
        written += part.length;
        if (!response.write(part)) return void response.once('drain', more);
      }
      response.end();
    };
    more();
  };
  const { body } = await forward();
  const parts = body[Symbol.asyncIterator]();
  await parts.next();
  let before = -1;
  while (before !== written) {
    before = written;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  // Buffers of two sockets, and not the answer.
  expect(written).toBeLessThan(32 << 20);
  await parts.return!();
});

it('a pod that dies: what has not begun may be tried elsewhere, what had begun breaks off', async () => {
  join();
  await until('ready');
  pod.answer = ({ response, body }) => body === 'begins' && void response.write('some');
  const begun = await forward('begins');
  const waiting = expect(forward('waits')).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  const parts = begun.body[Symbol.asyncIterator]();
  await parts.next();
  await vi.waitFor(() => expect(pod.seen).toHaveLength(2), patience);
  const broken = expect(parts.next()).rejects.toMatchObject({ code: 'DISCONNECTED' });
  await pod.stop();
  await waiting;
  await broken;
  await until('silent');
  expect(worker().why).toMatch(/^worker a: http:\/\/127\.0\.0\.1:\d+ cannot be reached/);
  pod.startedAt++;
  await pod.start();
  await until('ready');
  expect(fleet.counts).toMatchObject({ ready: 2, lost: 1, restarted: 1 });
});

it('one that hangs is silent soon, and a restart is seen by its start time alone', async () => {
  await open({ limits: { askMs: 300, podSilentMs: 300 } });
  join();
  await until('ready');
  pod.hangs = true;
  const from = performance.now();
  await until('silent');
  // Before the limit of one whose answers come.
  expect(performance.now() - from).toBeLessThan(linkTimes.podBlindMs - 1_000);
  const waiting = expect(forward()).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  await waiting; // given up after two seconds of silence
  pod.hangs = false;
  await until('ready');
  pod.startedAt++;
  await vi.waitFor(() => expect(fleet.counts.restarted).toBe(1), patience);
  await until('ready');
});

it('one that sleeps drains; one that needs a token is refused without it', async () => {
  join();
  await until('ready');
  pod.awake = false;
  await until('draining');
  pod.awake = true;
  await until('ready');
  pod.token = 'secret';
  await until('refused');
  expect(worker().why).toBe('worker a: /metrics answers 401; configure its token');
  await open({ access: { token: 'secret' } });
  join();
  await until('ready');
  pod.answer = ({ response }) => void response.end('yes');
  expect(await textOf((await forward()).body)).toBe('yes');
});

it.each([
  ['/metrics has neither', () => (pod.metrics = () => 'up 1\n')],
  ['/metrics has NaN', () => (pod.extra = 'vllm:num_requests_running NaN\n')],
  ['/metrics is longer than', () => (pod.metrics = () => '# \n'.repeat(4 << 20))],
])('one that lies (%s) is refused, and nothing else is disturbed', async (why, lie) => {
  const good = new Pod();
  await good.start();
  discovery.say(
    { name: 'a', kind: 'openai', address: pod.address },
    { name: 'b', kind: 'openai', address: good.address },
  );
  await until('ready');
  await until('ready', 'b');
  lie();
  await until('refused');
  expect(worker().why).toContain(`worker a: ${why}`);
  expect(worker('b').state).toBe('ready');
  await good.stop();
});

// Turns above 50 ms fail any test (test/setup/turns.ts).
it.each([
  ['no lines', '\n'],
  ['short lines', 'v\n'],
  ['samples', 'vllm:num_requests_running{engine="0",model_name="x"} 1.0\n'],
  ['labels', `vllm:cache_config_info{${'a="b",'.repeat(2_000)}} 1\n`],
  ['one line', 'v'],
])('eight megabytes of %s hold nobody up', async (_, fill) => {
  const text = fill.repeat((7 << 20) / fill.length);
  join();
  await until('ready');
  pod.extra = text;
  pod.scrapes = 0;
  await vi.waitFor(() => expect(pod.scrapes).toBeGreaterThan(2), patience);
});

it('nor does a list of a hundred thousand models, of which the first is looked at', async () => {
  const card = '{"id":"a"}';
  pod.models = () => `{"data":[{"id":"first","max_model_len":10}${`,${card}`.repeat(90_000)},{}]}`;
  join();
  await until('ready');
  expect(worker().facts).toMatchObject({ model: 'first', maxModelTokens: 10 });
});

it.each(['{"data":[]}', '{"data":[{}, {"id":"a"}]}', '{"data":[{"id":""}]}', '[]', '1', '"'])(
  'one that lists %s for its models is refused',
  async (models) => {
    pod.models = () => models;
    join();
    await until('refused');
  },
);

it('ours are counted as of now, the others’ as of the last scrape, each once', async () => {
  join();
  await until('ready');
  const at = () => {
    const { waiting, running, tokensAhead, waitingBlocks } = worker().load;
    return { waiting, running, tokensAhead, waitingBlocks };
  };
  expect(at()).toEqual({ waiting: 0, running: 0, tokensAhead: 0, waitingBlocks: 0 });
  const one = fleet.sent(0, { requestId: 'one', tokensAhead: 100, blocks: 10, loadS: 0, tellsFirstToken: true });
  const two = fleet.sent(0, { requestId: 'two', tokensAhead: 50, blocks: 5, loadS: 0, tellsFirstToken: true });
  expect(at()).toEqual({ waiting: 2, running: 0, tokensAhead: 150, waitingBlocks: 15 });
  // The pod has both, one of them in its batch, and one of somebody else's.
  pod.figures = { waiting: 1, running: 2, usedShare: 0.1 };
  await scraped();
  expect(at()).toMatchObject({ waiting: 2, running: 1, tokensAhead: 150, waitingBlocks: 15 });
  one.firstToken();
  expect(at()).toMatchObject({ waiting: 1, running: 2, tokensAhead: 50, waitingBlocks: 5 });
  pod.figures = { waiting: 0, running: 3, usedShare: 0.1 };
  await scraped();
  expect(at()).toMatchObject({ waiting: 1, running: 2, tokensAhead: 50, waitingBlocks: 0 });
  one.ended();
  one.ended();
  two.ended();
  pod.figures = { waiting: 0, running: 1, usedShare: 0.1 };
  await scraped();
  expect(at()).toEqual({ waiting: 0, running: 1, tokensAhead: 0, waitingBlocks: 0 });
  pod.figures = { waiting: 0, running: 0, usedShare: 0 };
  await scraped();
  expect(at()).toEqual({ waiting: 0, running: 0, tokensAhead: 0, waitingBlocks: 0 });
});

it('its rates are those between two scrapes', async () => {
  join();
  await until('ready');
  for (let told = 1; told <= 3; told++) {
    pod.extra = `vllm:request_prefill_kv_computed_tokens_sum ${8_000 * told}
vllm:request_prefill_time_seconds_sum ${2 * told}
vllm:inter_token_latency_seconds_sum ${told}
vllm:inter_token_latency_seconds_count ${50 * told}
`;
    await scraped();
  }
  await vi.waitFor(
    () => expect(worker().load).toMatchObject({ prefillTokensPerS: 4_000, stepS: expect.closeTo(0.02) }),
    patience,
  );
  // Nobody else is asked.
  const looks = vi.spyOn(Member.prototype, 'measuredPrefillTokensPerS', 'get');
  expect([worker().load.prefillTokensPerS, looks.mock.calls.length]).toEqual([4_000, 0]);
  looks.mockRestore();
});

it('one that discovery drops ends what it has', async () => {
  join();
  await until('ready');
  pod.answer = ({ response }) => void response.write('some');
  const { body } = await forward();
  discovery.say();
  expect(worker().state).toBe('draining');
  pod.seen[0]!.response.end();
  expect(await textOf(body)).toBe('some');
  await vi.waitFor(() => expect(fleet.workers()[0]).toBeUndefined(), patience);
});
