/** Pods that only prefill, behind a gateway: the sidecar of the chosen pod is told which one, and both are counted as long as they work. */
import type { PodHandOffConfig } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { PodHandOff } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { type GatewayStream, modes, PickerRig, pod, toldBy } from './testing/index.ts';

const name = 'x-prefiller-host-port';
/** By which llm-d's sidecar calls others, too. */
const others = ['x-encoder-hosts-ports', 'x-data-parallel-host-port', 'x-kv-cache-source-host-port'];
let rig: PickerRig;
const withRole = (worker: Worker, role: Worker['record']['role']): Worker => ({
  ...worker,
  record: { ...worker.record, role },
});

beforeEach(async () => {
  rig = new PickerRig();
  const [decode, prefill] = [pod(0, 'http://10.0.0.1:8000'), pod(1, 'http://10.0.0.2:8000')];
  const workers = [withRole(decode, 'decode'), withRole(prefill, 'prefill')];
  rig.workers = workers;
  const { dispatch } = rig;
  dispatch.script = ({ role, among }) => {
    const found = workers.find(
      ({ record }) => (record.role === 'prefill') === (role === 'prefill') && (among?.has(record.name) ?? true),
    );
    if (found === undefined) throw new KvError('DISCONNECTED', 'nobody', { retry: true });
    return found;
  };
  rig.handOff = handOff();
  await rig.start();
});
const handOff = (config: Partial<PodHandOffConfig> = {}): PodHandOff =>
  new PodHandOff({
    dispatch: rig.dispatch,
    pods: { workers: () => rig.workers, forward: () => Promise.reject() },
    config: { minUncachedTokens: 2, ...config },
  });
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

async function picked(headers: Record<string, string> = {}): Promise<GatewayStream> {
  const stream = rig.gateway.open({ modes: modes.buffered });
  stream.post('/v1/completions', { 'x-request-id': 'r', ...headers });
  stream.requestBody('{"model":"m"}', true);
  await stream.has(2);
  return stream;
}

it('the decode pod is the endpoint, its sidecar is told the other, which counts until the first token', async () => {
  const stream = await picked();
  expect(toldBy(stream.responses[1]!)).toMatchObject({
    headers: { [name]: '10.0.0.2:8000', 'x-gateway-destination-endpoint': '10.0.0.1:8000' },
    removed: others,
  });
  expect(rig.dispatch.told).toEqual(['choose r', 'choose r-prefill', 'first pod-0']);
  stream.responseHeaders('10.0.0.1:8000');
  stream.responseBody('{}', false);
  await stream.has(4);
  expect(rig.dispatch.told.slice(3)).toEqual(['ended pod-1']);
  stream.responseBody('{}', true);
  await stream.has(5);
  expect(rig.dispatch.told.slice(4)).toEqual(['ended pod-0']);
  stream.end();
});

it('what fails is laid to neither: a sidecar passes on what a prefill pod answers', async () => {
  const stream = await picked();
  stream.responseHeaders('10.0.0.1:8000', { ':status': '500' }, true);
  await stream.has(3);
  stream.end();
  await rig.idle();
  expect(rig.became).toEqual(['went 0', 'doubted 0', 'doubted 1']);
});

it('a stream that ends before the first token counts on neither', async () => {
  const stream = await picked();
  expect(rig.dispatch.running).toBe(2);
  stream.end();
  await stream.closed();
  await rig.idle();
});

it('without a prefill pod that takes requests none is named, and what a client named is taken away', async () => {
  rig.workers = rig.workers.map((worker) => worker && { ...worker, state: worker.number === 1 ? 'silent' : 'ready' });
  const stream = await picked({ [name]: '10.0.0.9:1' });
  expect(toldBy(stream.responses[1]!)).toMatchObject({ removed: [name, ...others] });
  expect(Object.keys(toldBy(stream.responses[1]!).headers)).toEqual(['x-gateway-destination-endpoint']);
  expect(await rig.handOff!.metrics.text()).toContain('kvtier_pod_handoff_fallbacks_total{reason="nobody"} 1');
  stream.end();
});

it('one that has no room soon is not waited for', async () => {
  const { script } = rig.dispatch;
  rig.dispatch.script = (request, signal) =>
    request.role === 'prefill'
      ? new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason)))
      : script(request, signal);
  const stream = await picked();
  expect(toldBy(stream.responses[1]!)).toMatchObject({ removed: [name, ...others] });
  stream.end();
});

it.each([
  ['takes requests', 'no prefill pod takes requests', 'silent' as const],
  ['has room in time', 'prefill: no pod has room; try again', 'ready' as const],
])('with fallback off nobody else computes the prompt: 503 where no prefill pod %s', async (_, why, state) => {
  await rig.close();
  const { script } = rig.dispatch;
  rig.dispatch.script = (request, signal) =>
    request.role === 'prefill'
      ? new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason)))
      : script(request, signal);
  rig.handOff = handOff({ fallback: false, prefillMs: 250 });
  rig.workers = rig.workers.map((worker) => worker && { ...worker, state: worker.number === 1 ? state : 'ready' });
  await rig.start();
  const began = performance.now();
  const stream = await picked();
  const { response } = stream.responses[1]!;
  expect(toldBy(stream.responses[1]!)).toMatchObject({
    status: 503,
    headers: { 'x-llm-d-request-dropped-reason': 'no_worker', 'retry-after': '1' },
  });
  const { error } = JSON.parse(response?.$case === 'immediateResponse' ? response.value.body.toString() : '{}');
  expect(error.message).toMatch(/^Prefill and decode apart: 3 of 3 tokens uncached, /);
  expect(error.message).toContain(`${why}; podHandOff.fallback is off, try again.`);
  // Who may wait for nobody else waits as long as a prefill leg may take.
  if (state === 'ready') expect(performance.now() - began).toBeGreaterThan(240);
  // It has no prompt to compute while another one is waited for.
  const leg = state === 'ready' ? ['first pod-0', 'choose r-prefill'] : [];
  expect(rig.dispatch.told).toEqual(['choose r', ...leg, 'ended pod-0']);
  expect(await rig.handOff.metrics.text()).not.toContain('kvtier_pod_handoff_fallbacks_total{');
  await stream.closed();
});

it('a pod that only prefills has no sidecar to tell: where no decode pod takes requests it computes the prompt itself', async () => {
  rig.workers = [pod(0, 'http://10.0.0.1:8000'), pod(1, 'http://10.0.0.2:8000')].map((one) => withRole(one, 'prefill'));
  rig.dispatch.script = ({ role, among }) =>
    rig.workers.find((worker) => role === undefined || among?.has(worker!.record.name))!;
  const stream = await picked({ [name]: '10.0.0.9:1' });
  expect(toldBy(stream.responses[1]!)).toMatchObject({ endpoint: '10.0.0.1:8000', removed: [name, ...others] });
  expect(rig.dispatch.told).toEqual(['choose r']);
  const decided = 'kvtier_pod_handoff_decisions_total{decision="none",reason="no_decode"} 1';
  expect(await rig.handOff!.metrics.text()).toContain(decided);
  stream.end();
});

it('nor for a body that one pod has to serve', async () => {
  rig.reader.script = () => ({ ...rig.reader.facts, unsplit: 'several prompts' });
  const stream = await picked({ [name]: '10.0.0.9:1' });
  expect(toldBy(stream.responses[1]!)).toMatchObject({ endpoint: '10.0.0.1:8000', removed: [name, ...others] });
  expect(Object.keys(toldBy(stream.responses[1]!).headers)).toEqual(['x-gateway-destination-endpoint']);
  expect(rig.dispatch.told).toEqual(['choose r']);
  const decided = 'kvtier_pod_handoff_decisions_total{decision="none",reason="client"} 1';
  expect(await rig.handOff!.metrics.text()).toContain(decided);
  stream.end();
});

it('where no pod only prefills, a client sends the sidecar nowhere either', async () => {
  rig.workers = rig.workers.map((worker) => worker && withRole(worker, 'both'));
  const stream = await picked({ [name]: '10.0.0.9:1' });
  // A gateway that buffers has let the headers through by then: they go first, with the endpoint that a client names.
  const removed = stream.responses.map((response) => toldBy(response).removed);
  expect(removed).toEqual([
    ['x-gateway-destination-endpoint', name, ...others],
    [name, ...others],
  ]);
  expect(rig.dispatch.told).toEqual(['choose r']);
  stream.end();
});

it.each([
  ['duplex', modes.duplex],
  ['headers only', modes.headersOnly],
])('nor in mode %s', async (_, mode) => {
  rig.workers = rig.workers.map((worker) => worker && withRole(worker, 'both'));
  const stream = rig.gateway.open({ modes: mode });
  stream.post('/v1/completions', Object.fromEntries([name, ...others].map((header) => [header, '10.0.0.9:1'])));
  if (mode === modes.duplex) stream.requestBody('{"model":"m"}', true);
  const [response] = await stream.has(1);
  expect(toldBy(response!)).toMatchObject({ endpoint: '10.0.0.1:8000', removed: [name, ...others] });
  stream.cancel();
  await rig.idle();
});

it('one that only prefills is no fallback, nor one that ends what it has', async () => {
  await rig.close();
  const more = withRole(pod(2, 'http://10.0.0.3:8000'), 'decode');
  const leaving = withRole(pod(3, 'http://10.0.0.4:8000'), 'decode');
  const leaning = { ...withRole(pod(4, 'http://10.0.0.5:8000'), 'both'), leaning: 'prefill' as const };
  rig.workers = [...rig.workers, ...[more, { ...leaving, record: { ...leaving.record, draining: true } }, leaning]];
  await rig.start({ fallbacks: 4 });
  const stream = await picked();
  expect(toldBy(stream.responses[1]!).endpoint).toBe('10.0.0.1:8000,10.0.0.3:8000');
  stream.end();
});

it('a fallback gets the headers of the chosen one: it is of its revision, and not the prefill pod that they name', async () => {
  await rig.close();
  const of = (worker: Worker | undefined, revision: string): Worker => ({
    ...worker!,
    record: { ...worker!.record, revision },
  });
  const [decode, prefill] = rig.workers;
  const [other, same] = [pod(2, 'http://10.0.0.3:8000'), pod(3, 'http://10.0.0.4:8000')];
  // Behind a chosen one that leans to prefill, such pods are fallbacks, too.
  const leaning = { ...of(withRole(decode!, 'both'), 'v1'), leaning: 'prefill' as const };
  const more = [of(withRole(other, 'decode'), 'v2'), of(withRole(same, 'decode'), 'v1')];
  const endpointsOf = async (): Promise<string | undefined> => {
    await rig.start({ fallbacks: 3 });
    const stream = await picked();
    const { headers } = toldBy(stream.responses[1]!);
    expect(headers[name]).toBe('10.0.0.2:8000');
    stream.end();
    return headers['x-gateway-destination-endpoint'];
  };
  rig.workers = [of(decode, 'v1'), of(prefill, 'v1'), ...more];
  const { script } = rig.dispatch;
  rig.dispatch.script = (request, signal) => {
    const worker = script(request, signal) as Worker;
    return rig.workers[worker.number]!;
  };
  expect(await endpointsOf()).toBe('10.0.0.1:8000,10.0.0.4:8000');
  await rig.close();
  rig.workers = [leaning, of(prefill, 'v1'), ...more];
  expect(await endpointsOf()).toBe('10.0.0.1:8000,10.0.0.4:8000');
});
