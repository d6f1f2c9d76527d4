/** Pods of several models or names, and a body that nobody reads: it goes to a pod that knows the name it has for its model, or to nobody. */
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type GatewayStream, modes, PickerRig, pod, ScriptedDispatch, sentOn, toldBy } from './testing/index.ts';

let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
  const workers = [pod(0, 'http://10.0.0.1:8000', {}, 'a'), pod(1, 'http://10.0.0.2:8000', {}, 'b')];
  rig.workers = workers;
  rig.dispatch = new ScriptedDispatch(workers);
  rig.dispatch.script = ({ model }) => workers.find(({ facts }) => facts?.model === model)!;
  // As where the tokenizer of b cannot be read.
  rig.reader.script = () => Promise.reject(new Error("The model 'b' does not exist"));
});
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

const padding = 'x'.repeat(3_000);
const bodies: [string, string][] = [
  ['first', JSON.stringify({ model: 'b', prompt: padding })],
  ['last', JSON.stringify({ prompt: padding, model: 'b' })],
];
/** `pieces` of it, and then the end. */
function posted(mode: keyof typeof modes, body: string, pieces = 3, headers: Record<string, string> = {}) {
  const stream = rig.gateway.open({ modes: modes[mode] });
  stream.post('/v1/completions', headers);
  const bytes = Math.ceil(body.length / pieces);
  for (let at = 0; at < body.length && mode !== 'headersOnly'; at += bytes)
    stream.requestBody(body.slice(at, at + bytes), at + bytes >= body.length);
  return stream;
}
async function answered(stream: GatewayStream) {
  await stream.until(({ responses }) => responses.some((response) => isLast(toldBy(response))));
  return toldBy(stream.responses.find((response) => isLast(toldBy(response)))!);
}
const isLast = ({ endpoint, status }: ReturnType<typeof toldBy>): boolean =>
  endpoint !== undefined || status !== undefined;
const refusedOf = ({ responses }: GatewayStream): unknown => {
  const { response } = responses.at(-1)!;
  return response?.$case === 'immediateResponse' ? JSON.parse(response.value.body.toString()) : undefined;
};

describe.each(bodies)('a model that the body names %s', (where, body) => {
  it.each([
    ['not understood', 'duplex', {}],
    ['not understood', 'buffered', {}],
    ['above bodyBytes, of one piece', 'buffered', { bodyBytes: 1_000 }],
    ['above heldBytes, of one piece', 'buffered', { heldBytes: 1_000 }],
  ] as const)('of one that is %s, %s: to a pod that serves it', async (_, mode, limit) => {
    await rig.start(limit);
    const stream = posted(mode, body, mode === 'buffered' ? 1 : 3);
    expect((await answered(stream)).endpoint).toBe('10.0.0.2:8000');
    expect(rig.dispatch.asked).toMatchObject([{ model: 'b' }]);
    stream.cancel();
    await rig.idle();
  });

  it('of one that is too large, as far as it has come', async () => {
    await rig.start({ bodyBytes: 1_500 });
    const stream = posted('duplex', body);
    const { endpoint, status, headers } = await answered(stream);
    if (where === 'first') {
      expect(endpoint).toBe('10.0.0.2:8000');
      await stream.until(({ responses }) => sentOn(responses, 'requestBody').toString() === body);
      stream.cancel();
      return rig.idle();
    }
    expect([status, headers['retry-after'], headers['x-llm-d-request-dropped-reason']]).toEqual([
      503,
      '1',
      'no_worker',
    ]);
    expect(refusedOf(stream)).toMatchObject({
      error: { message: expect.stringMatching(/^2 models are served here, .*\(too_large\).*x-gateway-model-name/) },
    });
    expect(rig.dispatch.asked).toEqual([]);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
    await stream.closed();
    return rig.idle();
  });
});

it('a body that the gateway keeps, or that names none of them: 503, unless a header says it', async () => {
  await rig.start();
  for (const [mode, body] of [
    ['headersOnly', ''],
    ['duplex', '{"prompt":"x"}'],
    ['duplex', '{"model":"c"}'],
    ['duplex', '--boundary'],
  ] as const) {
    const stream = posted(mode, body);
    expect(await answered(stream)).toMatchObject({ status: 503, headers: { 'retry-after': '1' } });
    await stream.closed();
    const named = posted(mode, body, 3, { 'x-gateway-model-name': 'b' });
    expect((await answered(named)).endpoint).toBe('10.0.0.2:8000');
    named.cancel();
  }
  await rig.idle();
});

it('what has no body goes by load, and so does all that is for one model alone', async () => {
  await rig.start();
  const list = rig.gateway.open({ modes: modes.duplex });
  list.requestHeaders({ ':method': 'GET', ':path': '/v1/models' }, true);
  expect((await answered(list)).endpoint).toBe('10.0.0.1:8000');
  list.cancel();
  rig.workers = rig.workers.slice(1);
  const adapter = posted('duplex', '{"model":"an adapter of b"}');
  expect((await answered(adapter)).endpoint).toBe('10.0.0.2:8000');
  adapter.cancel();
  await rig.idle();
});

it('a name that only some pods of a model know: to these', async () => {
  const workers = [0, 1, 2].map((number) => pod(number, `http://10.0.0.${number + 1}:8000`, {}, 'a'));
  rig.workers = workers;
  const knows = workers[1]!.record.name;
  rig.reader.script = async () => ({
    ...{ model: 'a', tokens: 4, blockTokens: 16, maxTokens: 16, keys: new Int32Array(0), session: '' },
    among: new Set([knows]),
  });
  rig.dispatch.script = ({ among }) => workers.find(({ record }) => among?.has(record.name) ?? true)!;
  await rig.start({ fallbacks: 2 });
  const adapter = posted('duplex', '{"model":"adapter"}');
  expect((await answered(adapter)).endpoint).toBe('10.0.0.2:8000');
  adapter.cancel();
  await rig.idle();
});

describe('a name that nobody has read the body for', () => {
  const listing = (worker: Worker, name: string): Worker => ({
    ...worker,
    facts: { ...worker.facts!, otherNames: [{ name, isAdapter: true }] },
  });
  const serve = (workers: readonly Worker[]): void => {
    rig.workers = workers;
    rig.dispatch.script = ({ model, among }) => {
      const found = workers.find(
        ({ facts, record }) => facts?.model === model && (among === undefined || among.has(record.name)),
      );
      if (found === undefined) throw new KvError('DISCONNECTED', `no worker serves ${model}`);
      return found;
    };
  };
  const podOf = (number: number, model: string): Worker => pod(number, `http://10.0.0.${number + 1}:8000`, {}, model);
  const body = `{"model":"lora","input":"${padding}"}`;
  const header = 'x-gateway-model-name';

  it.each([
    ['in a body that is not understood', 'duplex', {}, {}],
    ['in a body that is too large', 'buffered', { bodyBytes: 1_000 }, {}],
    ['in a header, verbatim', 'headersOnly', {}, { [header]: 'lora' }],
    ['in a body, under a header with the model', 'duplex', {}, { [header]: 'a' }],
  ] as const)('an adapter that one pod alone lists, %s: there', async (_, mode, limit, headers) => {
    serve([podOf(0, 'a'), listing(podOf(1, 'a'), 'lora'), podOf(2, 'a')]);
    await rig.start({ ...limit, fallbacks: 2 });
    const stream = posted(mode, body, mode === 'buffered' ? 1 : 3, headers);
    expect((await answered(stream)).endpoint).toBe('10.0.0.2:8000');
    expect(rig.dispatch.asked).toMatchObject([{ model: 'a', among: new Set(['pod-1']) }]);
    stream.cancel();
    await rig.idle();
  });

  it.each([
    ['a body', {}],
    ['a header, verbatim', { [header]: 'lora' }],
  ] as const)('an adapter of one of several models, in %s: to a pod of that one', async (_, headers) => {
    serve([podOf(0, 'a'), listing(podOf(1, 'b'), 'lora')]);
    await rig.start();
    const stream = posted('duplex', body, 3, headers as Record<string, string>);
    expect((await answered(stream)).endpoint).toBe('10.0.0.2:8000');
    expect(rig.dispatch.asked).toMatchObject([{ model: 'b' }]);
    stream.cancel();
    await rig.idle();
  });

  it('what is one pod’s model and another’s other name: the model', async () => {
    serve([listing(podOf(0, 'a'), 'lora'), podOf(1, 'lora')]);
    await rig.start();
    const stream = posted('duplex', body);
    expect((await answered(stream)).endpoint).toBe('10.0.0.2:8000');
    stream.cancel();
    await rig.idle();
  });

  it('in a header, and nobody knows it: the pod’s to refuse where all serve one model, else 503', async () => {
    await rig.start();
    serve([listing(podOf(0, 'a'), 'lora'), podOf(1, 'a')]);
    const byLoad = posted('headersOnly', '', 3, { [header]: 'c' });
    expect((await answered(byLoad)).endpoint).toBe('10.0.0.1:8000');
    byLoad.cancel();
    const unknown = { ...podOf(1, 'a'), state: 'joining', facts: undefined } as const; // it may be c's
    for (const workers of [
      [podOf(0, 'a'), podOf(1, 'b')],
      [podOf(0, 'a'), unknown],
    ]) {
      serve(workers);
      const refused = posted('headersOnly', '', 3, { [header]: 'c' });
      expect(await answered(refused)).toMatchObject({ status: 503, headers: { 'retry-after': '1' } });
      expect(refusedOf(refused)).toMatchObject({ error: { message: 'no worker serves c' } });
      await refused.closed();
    }
    expect(rig.dispatch.asked.map(({ model }) => model)).toEqual(['a', 'c', 'c']);
    await rig.idle();
  });
});

it('a client that leaves while a large body is looked through costs nothing', async () => {
  await rig.start({ heldBytes: 1_000 });
  const stream = rig.gateway.open({ modes: modes.buffered });
  stream.post();
  stream.requestBody(`{"prompt":[${'1,'.repeat(900_000)}1],"model":"b"}`);
  stream.cancel();
  await stream.closed();
  await rig.idle();
});
