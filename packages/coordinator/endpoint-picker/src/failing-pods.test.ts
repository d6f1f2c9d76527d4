/** Pods at which gateways' requests fail: what of an answer says so, and that such a pod rests while another one serves. */
import { Fleet } from '@kvtier/registry';
import { Pod, SpokenDiscovery } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { type GatewayStream, modes, type Opening, PickerRig, ScriptedDispatch } from './testing/index.ts';

const patience = { timeout: 20_000, interval: 5 };
let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
});
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

async function picked(opening: Opening = { modes: modes.duplex }): Promise<GatewayStream> {
  const stream = rig.gateway.open(opening);
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

  const event = (data: object): string => `data: ${JSON.stringify(data)}\n\n`;
  const error = (code: number): string => event({ error: { message: 'EngineCore died', code } });
  const role = event({ choices: [{ delta: { role: 'assistant', content: '' } }] });
  const token = event({ choices: [{ delta: { content: 'a' } }] });
  const aborted = event({ choices: [{ delta: {}, finish_reason: 'abort' }] });
  const done = 'data: [DONE]\n\n';
  const began = 'a stream behind a gateway';
  const well = ['went 0', 'succeeded 0'];
  const first = ['first pod-0', 'ended pod-0'];
  /** All that a stream's bytes, cut as its gateway cuts them, say of the pod and of its first token. */
  const streamed = async (served: string, pieces: readonly string[], headers: object = {}): Promise<unknown> => {
    const stream = await picked();
    stream.responseHeaders(served, { ':status': '200', 'content-type': 'text/event-stream', ...headers });
    for (const [at, piece] of pieces.entries()) stream.responseBody(piece, at === pieces.length - 1);
    await stream.has(3 + pieces.length);
    stream.end();
    await stream.closed();
    await rig.idle();
    return [rig.became, rig.dispatch.told.slice(1)];
  };

  it.each<[string, string[], string[], string[]]>([
    ['a token', [role, token, error(500)], well, first],
    ['a token cut in two', [token.slice(0, 20), token.slice(20)], well, first],
    ['a role and an end', [role, done], well, first],
    ['comments and an end', [': ping\n\n', ''], well, ['ended pod-0']],
    [
      'an error',
      [': ping\n\n', error(500)],
      ['went 0', `failed 0 ${began} answers 500 in its first event`],
      ['ended pod-0'],
    ],
    [
      'an error behind its role',
      [role, error(503)],
      ['went 0', `failed 0 ${began} answers 503 in its first event`],
      first,
    ],
    [
      'an error, and an end',
      [error(500), done],
      ['went 0', `failed 0 ${began} answers 500 in its first event`],
      ['ended pod-0'],
    ],
    ['an abort', [aborted], ['went 0', `failed 0 ${began} ends with "abort" before its first token`], ['ended pod-0']],
    ['a refusal', [error(400)], ['went 0'], ['ended pod-0']],
    ['a full queue', [error(429)], ['went 0'], ['ended pod-0']],
  ])('a stream tells by its first event: %s', async (_, pieces, became, told) => {
    await rig.start();
    expect(await streamed(endpoint, pieces)).toEqual([became, told]);
  });

  it.each<[string, string, object, string[]]>([
    ['200', endpoint, {}, ['went 0', `failed 0 ${began} answers 500 in its first event`]],
    ['200 that nobody can read', endpoint, { 'content-encoding': 'gzip' }, well],
    ['200 of another', '10.0.0.2:8000', {}, ['went 0', 'doubted 0']],
    ['200 of nobody knows whom', '', {}, ['went 0', 'doubted 0']],
  ])('and what it tells counts as its status would: %s', async (_, served, headers, became) => {
    await rig.start({ fallbacks: 1 });
    expect(await streamed(served, [error(500)], headers)).toMatchObject([became, {}]);
  });

  it('a stream of which a gateway does not say whether it shows it is as good as its status, at once', async () => {
    await rig.start();
    const stream = await picked({});
    stream.responseHeaders(endpoint, { ':status': '200', 'content-type': 'text/event-stream' });
    await stream.has(3);
    expect(rig.became).toEqual(well);
    // Shown after all, it tells when its first token comes, and nothing more of the pod.
    stream.responseBody(': ping\n\n', false);
    await stream.has(4);
    expect(rig.dispatch.told.slice(1)).toEqual([]);
    stream.responseBody(token, false);
    stream.responseBody(error(500), true);
    await stream.has(6);
    stream.end();
    await stream.closed();
    await rig.idle();
    expect([rig.became, rig.dispatch.told.slice(1)]).toEqual([well, first]);
  });

  it.each([
    ['before any of it came', []],
    ['behind comments', [': ping\n\n']],
    ['behind a role', [role]],
    ['within its first event', [token.slice(0, 20)]],
  ])('a stream that is left before it tells anything says nothing: %s', async (_, pieces) => {
    await rig.start();
    const stream = await picked();
    stream.responseHeaders(endpoint, { ':status': '200', 'content-type': 'text/event-stream' });
    for (const piece of pieces) stream.responseBody(piece, false);
    await stream.has(3 + pieces.length);
    stream.cancel();
    await rig.idle();
    expect(rig.became).toEqual(['went 0']);
  });

  it('nor does one of which nothing comes in time', async () => {
    await rig.start({ silenceMs: 1_000 });
    const stream = await picked();
    stream.responseHeaders(endpoint, { ':status': '200', 'content-type': 'text/event-stream' });
    await stream.closed();
    await rig.idle();
    expect(rig.became).toEqual(['went 0']);
  });

  it('of one event no more is kept than an error has: what is larger is a token', async () => {
    await rig.start();
    const stream = await picked();
    stream.responseHeaders(endpoint, { ':status': '200', 'content-type': 'text/event-stream' });
    stream.responseBody(role.repeat(100), false);
    const begun = '\ndata: {"error":{"message":"'; // with what ended the event before
    stream.responseBody(begun.slice(1) + 'a'.repeat(4_096 - begun.length), false);
    await stream.has(5);
    expect(rig.became).toEqual(['went 0']);
    stream.responseBody('a', false);
    await stream.has(6);
    expect(rig.became).toEqual(well);
    stream.responseBody('"}}\n\n', true);
    stream.end();
    await stream.closed();
    await rig.idle();
    expect(rig.became).toEqual(well);
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
    const twice = await picked();
    for (let i = 0; i < 2; i++) {
      twice.responseHeaders(endpoint, { ':status': '200', 'content-type': 'text/event-stream' });
      twice.responseBody('data: {"choices":[{"text":"a"}]}\n\n', false);
    }
    await twice.has(6);
    twice.cancel();
    await rig.idle();
    expect(rig.became.slice(3)).toEqual(['went 0', 'succeeded 0']);
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
