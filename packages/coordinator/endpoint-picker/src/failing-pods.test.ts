/** Pods at which gateways' requests fail: what of an answer says so, and that such a pod rests while another one serves. */
import { Fleet } from '@kvtier/registry';
import { Pod, SpokenDiscovery } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { type GatewayStream, modes, PickerRig, ScriptedDispatch } from './testing/index.ts';

const patience = { timeout: 20_000, interval: 5 };
let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
});
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

async function picked(): Promise<GatewayStream> {
  const stream = rig.gateway.open({ modes: modes.duplex });
  stream.post();
  stream.requestBody('{"model":"m"}');
  await stream.has(2);
  return stream;
}
/** The answer to one request. */
async function answered(served: string, status: string, isAll = true): Promise<void> {
  const stream = await picked();
  stream.responseHeaders(served, { ':status': status }, isAll);
  await stream.has(3);
  stream.end();
  await stream.closed();
  await rig.idle();
}

describe('of an answer', () => {
  const endpoint = '10.0.0.1:8000';
  const failed = (status: number): string => `failed 0 a gateway was answered ${status}`;
  it.each([
    ['200', endpoint, 'succeeded 0'],
    ['200', '', 'succeeded 0'],
    ['500', endpoint, failed(500)],
    ['503', endpoint, failed(503)],
    ['504', endpoint, 'doubted 0'], // the gateway's own deadline
    ['500', '', 'doubted 0'], // it may be the gateway's own word
    ['429', endpoint, undefined],
    ['404', '', undefined],
    ['302', endpoint, undefined],
  ])('%s of "%s": %s', async (status, served, told) => {
    await rig.start();
    await answered(served, status);
    expect(rig.became).toEqual(['went 0', ...(told === undefined ? [] : [told])]);
  });

  it.each([
    ['200', endpoint, 'succeeded 0'],
    ['500', endpoint, failed(500)],
    ['200', '', undefined], // whose it is is not known
    ['500', '', 'doubted 0'],
    ['200', '10.0.0.2:8000', 'doubted 0'], // why else did it go there
    ['500', '10.0.0.2:8000', 'doubted 0'],
    ['404', '10.0.0.2:8000', 'doubted 0'],
  ])('%s of "%s", where it may come from a second pod: %s', async (status, served, told) => {
    await rig.start({ fallbacks: 1 });
    await answered(served, status);
    expect(rig.became).toEqual(['went 0', ...(told === undefined ? [] : [told])]);
  });

  it('nothing is told where no model answers it', async () => {
    await rig.start();
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.requestHeaders({ ':method': 'OPTIONS', ':path': '/v1/completions' }, true);
    await stream.has(1);
    stream.responseHeaders(endpoint, { ':status': '200' }, true);
    await stream.has(2);
    stream.end();
    await rig.idle();
    expect(rig.became).toEqual([]);
  });

  it('is told once, and nothing of a request that is left', async () => {
    await rig.start();
    const stream = await picked();
    stream.responseHeaders(endpoint, { ':status': '500' });
    stream.responseHeaders(endpoint, { ':status': '200' });
    stream.responseBody('{}', true);
    await stream.has(5);
    stream.cancel();
    (await picked()).cancel();
    await rig.idle();
    expect(rig.became).toEqual(['went 0', failed(500), 'went 0']);
  });
});

describe('a pod of the fleet', () => {
  let fleet: Fleet;
  let pods: Pod[];
  beforeEach(async () => {
    pods = [new Pod(), new Pod()];
    for (const pod of pods) await pod.start();
    // Limits that no busy machine reaches.
    const times = { scrapeMs: 20, askMs: 5_000, podSilentMs: 5_000 };
    fleet = new Fleet({ logger: createLogger('failing-pods-test', 'silent'), times });
    const discovery = new SpokenDiscovery();
    await fleet.start(discovery);
    discovery.say(...pods.map(({ address }, at) => ({ name: `p${at}`, kind: 'openai' as const, address })));
    for (const at of pods.keys()) await until('ready', at);
    rig.workers = fleet.workers();
    rig.dispatch = new ScriptedDispatch([]);
    rig.dispatch.script = () => fleet.workers()[0]!;
    rig.outcomes = fleet;
    rig.reader.script = () => ({ ...rig.reader.facts, model: 'demo' });
    await rig.start();
  });
  afterEach(async () => {
    vi.useRealTimers();
    await fleet.close();
    for (const pod of pods) await pod.stop();
  });
  const until = (state: string, at = 0): Promise<void> =>
    vi.waitFor(() => expect(fleet.workers()[at]!.state).toBe(state), patience);
  const endpoint = (): string => new URL(pods[0]!.address).host;

  it('that fails three in a row rests while another one is ready, until one succeeds', async () => {
    vi.useFakeTimers({ toFake: ['performance'] }); // no rest ends because a machine stands still
    for (let i = 0; i < 2; i++) await answered(endpoint(), '500');
    expect(fleet.workers()[0]!.state).toBe('ready');
    await answered(endpoint(), '500');
    const { state, why } = fleet.workers()[0]!;
    expect([state, why]).toEqual([
      'silent',
      'worker p0: 3 requests in a row failed there, the last with "a gateway was answered 500", and it gets nothing new for 1 s; see its log',
    ]);
    vi.advanceTimersByTime(1_000);
    await until('ready');
    const tried = await picked();
    expect(fleet.workers()[0]!.state).toBe('silent'); // the others wait for what becomes of it
    tried.responseHeaders(endpoint(), { ':status': '200' }, true);
    await tried.has(3);
    expect(fleet.workers()[0]!.state).toBe('ready');
    tried.end();
    await rig.idle();
  });

  it('of which it is not known whether it failed is asked whether it is well', async () => {
    pods[0]!.healthy = false;
    await answered('', '503');
    await until('silent');
    expect(fleet.workers()[0]!.why).toContain('/health answers 503');
  });
});
