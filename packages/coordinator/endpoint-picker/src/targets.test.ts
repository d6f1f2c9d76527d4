/** Requests of gateways that want their first token soon: refused by prediction, before any pod is counted. */
import { Saturated } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, expect, it } from 'vitest';
import type { Deadlines } from './picker.ts';
import type { GatewayStream } from './testing/gateway.ts';
import { toldBy } from './testing/index.ts';
import { modes, PickerRig } from './testing/rig.ts';

let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
  rig.dispatch.script = ({ except, among }) => {
    const left = rig.pods.find(({ record: { name } }) => !except.has(name) && (among?.has(name) ?? true));
    if (left === undefined) throw new KvError('DISCONNECTED', 'none left');
    return left;
  };
});
afterEach(() => rig.close());

function wanting(headers: Readonly<Record<string, string>>): GatewayStream {
  const stream = rig.gateway.open({ modes: modes.duplex });
  stream.post('/v1/completions', headers);
  stream.requestBody('{}');
  return stream;
}
async function refusal(stream: GatewayStream) {
  const [response] = await stream.has(1);
  await stream.closed();
  const value = response!.response!.$case === 'immediateResponse' ? response!.response!.value : undefined;
  return { ...toldBy(response!), body: JSON.parse(value!.body.toString()) as unknown };
}

it.each([
  [{ 'x-slo-ttft-ms': '250' }, 250],
  [{ 'x-llm-d-slo-ttft-ms': '300', 'x-slo-ttft-ms': '250' }, 300],
  [{}, 4_000],
])('%j: 429 once all that may be tried are too late, and no pod is counted', async (headers, ttftMs) => {
  rig.ttftMs = 4_000;
  const asked: { worker: string; wanted: Parameters<Deadlines['admit']>[0] }[] = [];
  rig.inTime.admit = (wanted, worker) => {
    asked.push({ worker, wanted });
    throw new Saturated(`late at ${worker}`, 7);
  };
  await rig.start();
  expect(await refusal(wanting(headers as Record<string, string>))).toMatchObject({
    status: 429,
    headers: { 'retry-after': '7', 'x-llm-d-request-dropped-reason': 'saturated' },
    body: { error: { message: 'late at pod-0' } },
  });
  expect(asked.map(({ worker }) => worker)).toEqual(['pod-0', 'pod-1', 'pod-2']);
  expect(asked[0]!.wanted).toMatchObject({ model: 'm', ttftMs });
  expect(rig.dispatch.asked[0]!.firstTokenByMs).toBe(asked[0]!.wanted.arrivedMs + ttftMs);
  await rig.idle();
});

it('where one that is too late has another beside it, that is named', async () => {
  rig.dispatch.firstTokenS = 0.5;
  rig.inTime.admit = (_, worker, predictedS) => {
    if (worker === 'pod-0') throw new Saturated(`${predictedS}`, 7);
  };
  await rig.start();
  const stream = wanting({ 'x-slo-ttft-ms': '250' });
  const [response] = await stream.has(1);
  expect(toldBy(response!).endpoint).toBe('10.0.0.2:8000');
  stream.cancel();
  await rig.idle();
});

it('a time that is none is the client’s mistake', async () => {
  await rig.start();
  const message = expect.stringContaining('x-slo-ttft-ms');
  expect(await refusal(wanting({ 'x-slo-ttft-ms': 'soon' }))).toMatchObject({
    status: 400,
    body: { error: { message } },
  });
  expect(rig.dispatch.asked).toEqual([]);
});

it('what comes of a stream is learned, of a whole answer not, nor of one that another endpoint gave', async () => {
  const came: number[] = [];
  rig.dispatch.firstTokenS = 0.5;
  rig.inTime.came = (predictedS) => void came.push(predictedS);
  await rig.start({ fallbacks: 1 });
  for (const [type, served, learned] of [
    ['application/json', '10.0.0.1:8000', []],
    ['text/event-stream', '10.0.0.2:8000', []],
    ['text/event-stream; charset=utf-8', '10.0.0.1:8000', [0.5]],
  ] as const) {
    const stream = wanting({});
    const [response] = await stream.has(2);
    expect(toldBy(response!).endpoint).toBe('10.0.0.1:8000,10.0.0.2:8000');
    stream.responseHeaders(served, { ':status': '200', 'content-type': type });
    stream.responseBody('data: 1\n\n', false);
    stream.responseBody('data: 2\n\n', true);
    await stream.has(5);
    stream.end();
    await stream.closed();
    expect(came).toEqual(learned);
  }
  await rig.idle();
});
