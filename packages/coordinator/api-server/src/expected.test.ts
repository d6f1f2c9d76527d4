/** Nobody is ready, and somebody is expected in a moment: who waits, for how long, and what ends it. */
import { say } from '@kvtier/registry/testing';
import { describe, expect, it, vi } from 'vitest';
import { Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
/** Longer than any of these tests. */
const long = { absentMs: 60_000 };
const ask = (part: object = {}, init: RequestInit = {}): Promise<Response> =>
  at.post('/v1/completions', { prompt: 'a', max_tokens: 8, temperature: 0, ...part }, init);
const toldOf = async (response: Response) => [response.status, (await jsonOf(response)).error?.code];
const expecting = async (): Promise<number> =>
  Number(/^kvtier_requests_expecting (\d+)$/m.exec(await at.metricsText())![1]);
const expects = (count: number): Promise<unknown> =>
  vi.waitUntil(async () => (await expecting()) === count, { ...patience, interval: 5 });
const stateIs = (state: string): Promise<unknown> =>
  vi.waitUntil(() => at.fleet.workers()[0]?.state === state, patience);

async function stopFirst(): Promise<void> {
  await at.engine.stop();
  await stateIs('silent');
}
async function startAgain(): Promise<void> {
  at.engine = await at.start('a');
  at.engine.script = say(ids(' 34'), 'length');
}

describe('a worker that went away a moment ago', () => {
  it('is waited for by all, of more than go on in one turn, and by those who stream', async () => {
    await at.open({ limits: long });
    await stopFirst();
    const waiting = Array.from({ length: 150 }, async (_, i) => {
      const response = await ask({ stream: i % 2 === 0 });
      await response.text();
      return response.status;
    });
    const left = new AbortController();
    const gone = ask({}, { signal: left.signal });
    await expects(151);
    left.abort();
    await expect(gone).rejects.toThrow();
    await expects(150);
    expect(at.dispatcher.stats()).toMatchObject({ waiting: 0, given: 0 });
    await startAgain();
    expect(new Set(await Promise.all(waiting))).toEqual(new Set([200]));
    expect(at.engine.seen).toHaveLength(150);
    await expects(0);
  });

  it('and does not come in time: 503', async () => {
    await at.open({ limits: { absentMs: 150 } });
    await stopFirst();
    expect(await toldOf(await ask())).toEqual([503, 'engine_unavailable']);
    expect(await expecting()).toBe(0);
  });

  it('is not waited for beyond the time for a first token, nor once it is not to come back, nor while this server closes', async () => {
    await at.open({ limits: long });
    await stopFirst();
    const headers = { 'x-slo-ttft-ms': '50', 'content-type': 'application/json' };
    const late = await ask({}, { headers });
    expect(await toldOf(late)).toEqual([503, 'engine_unavailable']);
    const first = ask();
    await expects(1);
    at.discovery.say({ ...at.named('a'), draining: true });
    expect(await toldOf(await first)).toEqual([503, 'engine_unavailable']);
    at.discovery.say(at.named('a'));
    const closed = ask();
    await expects(1);
    const closing = at.server.close();
    expect(await toldOf(await closed)).toEqual([503, 'engine_unavailable']);
    await closing;
  });

  it('holds up no model that has another worker', async () => {
    const other = await at.start('b');
    other.script = say(ids(' 34'), 'length');
    await at.open({ limits: long });
    await at.workers(at.named('a'), at.named('b'));
    await stopFirst();
    expect((await ask()).status).toBe(200);
    expect(other.seen).toHaveLength(1);
  });
});

describe('a model whose last worker has left discovery', () => {
  const nobodyKnown = (): Promise<unknown> =>
    vi.waitUntil(() => at.fleet.workers().every((worker) => worker === undefined), patience);

  it('is waited for, and served by the worker that comes', async () => {
    await at.open({ limits: long });
    at.discovery.say();
    await nobodyKnown();
    const waiting = [ask(), ask({ stream: true })];
    await expects(2);
    at.engine.script = say(ids(' 34'), 'length');
    at.discovery.say(at.named('a'));
    for (const response of await Promise.all(waiting)) {
      expect(response.status).toBe(200);
      await response.text();
    }
    expect(at.engine.seen).toHaveLength(2);
  });

  it('and has none in time: 503, then at once; a model that never was is 404', async () => {
    await at.open({ limits: { absentMs: 150 } });
    at.discovery.say();
    await nobodyKnown();
    expect(await toldOf(await ask())).toEqual([503, 'engine_unavailable']);
    expect(await toldOf(await ask())).toEqual([503, 'engine_unavailable']);
    expect(await toldOf(await ask({ model: 'third' }))).toEqual([404, 'model_not_found']);
    expect(await expecting()).toBe(0);
  });

  it('is listed no more, and who names no model gets the one that is served', async () => {
    const other = await at.start('b');
    other.description = { ...other.description, model: 'other' };
    await at.open({ limits: { absentMs: 0 } });
    await at.workers(at.named('a'), at.named('b'));
    const listed = async () => (await at.client.models.list()).data.map(({ id }) => id).sort();
    await vi.waitUntil(async () => (await listed()).length === 2, patience);
    at.engine.script = say(ids(' 34'), 'length');
    await at.workers(at.named('a'));
    expect(await listed()).toEqual(['demo']);
    expect((await ask()).status).toBe(200);
    expect(await toldOf(await ask({ model: 'other' }))).toEqual([503, 'engine_unavailable']);
    expect(await toldOf(await fetch(`${at.server.url}/v1/models/other`))).toEqual([404, 'model_not_found']);
  });
});

describe('a coordinator that has just begun', () => {
  it('waits for a worker that it has not heard yet, whose model is not known', async () => {
    await at.engine.stop();
    await at.open({ limits: long, firstContactMs: 0 });
    const first = ask();
    await expects(1);
    await startAgain();
    expect((await first).status).toBe(200);
  });

  it('waits for the worker of a model that it does not know, while another one serves', async () => {
    const other = await at.start('b');
    other.description = { ...other.description, model: 'other' };
    other.script = say(ids(' 34'), 'length');
    at.engine.script = say(ids(' 34'), 'length');
    await other.stop();
    await at.open({ limits: long });
    at.discovery.say(at.named('a'), at.named('b'));
    const first = ask({ model: 'other' });
    await expects(1);
    expect((await ask({ model: 'demo' })).status).toBe(200);
    await other.start();
    expect((await first).status).toBe(200);
    expect(other.seen).toHaveLength(1);
    expect(await toldOf(await ask({ model: 'third' }))).toEqual([404, 'model_not_found']);
  });
});
