/** Pods that come while requests wait for one: they are named like those that were there before, where the request may go to them. */
import { status } from '@grpc/grpc-js';
import type { DispatchRequest } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { BarePicker, type GatewayStream, modes, PickerRig, pod, toldBy } from './testing/index.ts';

const body = JSON.stringify({ model: 'm', prompt: 'one two three' });
const joined = pod(9, 'http://10.0.0.9:8000');
const named = (worker: Worker, name: string): Worker => ({ ...worker, record: { ...worker.record, name } });

it('those that wait for room get it at one that joins', async () => {
  const bare = new BarePicker();
  for (const name of ['a', 'b']) bare.add(name).load.tokensAhead = 1_000_000;
  const waiting = [bare.pick(), bare.pick(), bare.pick()];
  const patience = { timeout: 20_000, interval: 1 };
  await vi.waitFor(() => expect(bare.dispatch.stats().waiting).toBe(3), patience);
  bare.add('c').load.prefillTokensPerS = 1_000_000; // it has time for all of them
  await vi.waitFor(() => {
    bare.workers.told(); // as workers do all the time
    expect(bare.dispatch.stats().waiting).toBe(0);
  }, patience);
  const picked = await Promise.all(waiting);
  expect(picked.map(({ endpoint }) => endpoint)).toEqual(['10.0.0.2:8000', '10.0.0.2:8000', '10.0.0.2:8000']);
  for (const { share } of picked) share.ended();
  expect(bare.workers.open).toEqual([0, 0, 0]);
  bare.dispatch.close();
});

describe('one', () => {
  let rig: PickerRig;
  beforeEach(() => {
    rig = new PickerRig();
    // All of them are endpoints: nothing but Dispatch says who may be chosen.
    rig.workers = rig.pods.slice(0, 2);
  });
  afterEach(async () => {
    await rig.close();
    expect(rig.dispatch.running).toBe(0);
  });

  /** Each choice in turn: as if these workers had come while it was waited for. */
  function choices(...turns: ((request: DispatchRequest) => Worker)[]): void {
    rig.dispatch.script = (request) => turns[rig.dispatch.asked.length - 1]!(request);
  }
  const comes = (worker: Worker) => (): Worker => {
    rig.workers = [...rig.workers, worker];
    return worker;
  };
  async function answered(metadata?: Record<string, Record<string, unknown>>): Promise<GatewayStream> {
    const stream = rig.gateway.open({ modes: modes.duplex, ...(metadata && { metadata }) });
    stream.post();
    stream.requestBody(body);
    await stream.has(1);
    stream.end();
    expect(await stream.closed()).toBe(status.OK);
    await rig.idle();
    return stream;
  }

  it('is not given to a request that knows whom it may go to, be these all there are', async () => {
    const knowing = rig.workers.map((worker) => worker!.record.name);
    rig.reader.script = () => ({ ...rig.reader.facts, model: 'an adapter', among: new Set(knowing) });
    choices(() => rig.pods[1]!);
    await rig.start();
    await answered();
    expect(namesOf(rig.dispatch.asked[0]!.among)).toEqual(knowing);
  });
  const endpointOf = ({ responses }: GatewayStream): unknown => toldBy(responses[0]!).endpoint;
  const namesOf = (names: ReadonlySet<string> | undefined): string[] | undefined => names && [...names];

  it('that joined is the endpoint, and those of now are its fallbacks', async () => {
    choices(() => {
      rig.workers = [undefined, rig.pods[1], joined, pod(10, 'http://10.0.0.10:8000')];
      return joined;
    });
    await rig.start({ fallbacks: 3 });
    expect(endpointOf(await answered())).toBe('10.0.0.9:8000,10.0.0.2:8000,10.0.0.10:8000');
    expect(rig.dispatch.asked.map(({ among }) => among)).toEqual([undefined]);
  });

  it('that is back under its name has its new address', async () => {
    rig.workers = rig.pods; // one of them is no endpoint, so the others are named
    const back = named(pod(9, 'http://10.0.1.1:8000'), 'pod-0');
    choices(() => {
      rig.workers = [undefined, ...rig.pods.slice(1), back];
      return back;
    });
    await rig.start();
    expect(endpointOf(await answered())).toBe('10.0.1.1:8000');
    expect(namesOf(rig.dispatch.asked[0]!.among)).toEqual(['pod-0', 'pod-1', 'pod-2']);
  });

  const subset = (...endpoints: string[]) => ({
    'envoy.lb.subset_hint': { 'x-gateway-destination-endpoint-subset': endpoints },
  });
  it.each<[string, Worker, ReturnType<typeof subset> | undefined]>([
    ['that no gateway reaches', { ...joined, record: { ...joined.record, kind: 'kvtier' } }, undefined],
    ['that has a host’s name', pod(9, 'http://vllm-9:8000'), undefined],
    ['out of the subset', joined, subset('10.0.0.1', '10.0.0.2')],
  ])('%s is given back, and another is asked for among those of now', async (_, worker, metadata) => {
    const more = pod(10, 'http://10.0.0.2:8001'); // in the subset, too
    choices(comes(worker), comes(more));
    await rig.start();
    expect(endpointOf(await answered(metadata))).toBe('10.0.0.2:8001');
    const [first, second] = rig.dispatch.asked;
    expect([first!.among, [...first!.except]]).toEqual([undefined, []]);
    expect([namesOf(second!.among), [...second!.except]]).toEqual([['pod-0', 'pod-1'], ['pod-9']]);
    const { id } = first!;
    expect(rig.dispatch.told).toEqual([`choose ${id}`, 'ended pod-9', `choose ${id}`, 'ended pod-10']);
  });

  it('without the name by which the model is asked for is none of them', async () => {
    const knowing = (worker: Worker): Worker => ({
      ...worker,
      facts: { ...worker.facts!, otherNames: [{ name: 'adapter', isAdapter: true }] },
    });
    rig.workers = rig.pods.slice(0, 2).map(knowing);
    rig.reader.script = () => Promise.reject(new Error('not understood'));
    choices(comes(joined), comes(knowing(pod(10, 'http://10.0.0.10:8000'))));
    await rig.start();
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post('/v1/completions', { 'x-gateway-model-name': 'adapter' });
    stream.requestBody('?');
    await stream.has(1);
    expect(endpointOf(stream)).toBe('10.0.0.10:8000');
    stream.end();
    await stream.closed();
    await rig.idle();
  });

  it('where nobody else may be chosen, it is Dispatch that says so', async () => {
    choices(comes(pod(9, 'http://vllm-9:8000')), () => {
      throw new KvError('DISCONNECTED', 'none of its 1 workers may be chosen');
    });
    await rig.start();
    const { responses } = await answered();
    expect(toldBy(responses[0]!)).toMatchObject({
      status: 503,
      headers: { 'x-llm-d-request-dropped-reason': 'no_worker' },
    });
  });
});
