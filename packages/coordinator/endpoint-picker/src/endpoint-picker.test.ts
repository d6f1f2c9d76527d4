/**
 * The flows of the Gateway API Inference Extension's conformance suite, with the gateway's part played by a client of our own over a
 * real connection: routing by header and metadata, subsets, no endpoint, saturation, bodies in every mode, feedback.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { status } from '@grpc/grpc-js';
import { Saturated } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import { BodySendMode } from '@kvtier/wire/ext-proc';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type GatewayStream, modes, PickerRig, pod, ScriptedDispatch, sentOn, toldBy } from './testing/index.ts';

const body = JSON.stringify({ model: 'm', prompt: 'one two three', max_tokens: 7 });
let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
});
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

const parts = ({ responses }: GatewayStream) => responses.map((response) => toldBy(response).part);

describe('a request', () => {
  beforeEach(() => rig.start());

  it('goes to the endpoint that header and metadata name, its body unmodified in order', async () => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post('/v1/completions?x=1', { 'x-request-id': 'r-1', 'x-session-id': 's-1' });
    stream.requestBody(body.slice(0, 10), false);
    stream.requestBody(body.slice(10), true);
    const responses = await stream.has(3);
    expect(parts(stream)).toEqual(['requestHeaders', 'requestBody', 'requestBody']);
    expect(toldBy(responses[0]!)).toMatchObject({
      headers: { 'x-gateway-destination-endpoint': '10.0.0.1:8000' },
      endpoint: '10.0.0.1:8000',
    });
    expect(sentOn(responses, 'requestBody').toString()).toBe(body);
    expect(rig.reader.asked).toEqual([{ path: '/v1/completions', body }]);
    expect(rig.dispatch.asked).toMatchObject([
      { id: 'r-1', model: 'm', tokens: 3, blockTokens: 2, maxTokens: 7, session: 's-1', keys: rig.reader.facts.keys },
    ]);
    expect([...rig.dispatch.asked[0]!.among!]).toEqual(['pod-0', 'pod-1', 'pod-2']);

    stream.responseHeaders('10.0.0.1:8000');
    stream.responseBody('data: {"choices":[{"text":"a"}]}\n\n', false);
    await stream.has(5);
    expect(rig.dispatch.told).toEqual(['choose r-1', 'first pod-0']);
    const usage = '{"prompt_tokens":30,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}';
    stream.responseBody(`data: {"choices":[],"usage":${usage}}\n\ndata: [DONE]\n\n`, true);
    await stream.has(6);
    expect(rig.dispatch.told).toEqual(['choose r-1', 'first pod-0', 'ended pod-0']);
    expect(rig.dispatch.answerTokens).toEqual([2]);
    expect(rig.heard).toEqual([0, 0, 0]); // headers and two parts: it lives
    expect(parts(stream).slice(3)).toEqual(['responseHeaders', 'responseBody', 'responseBody']);
    expect(sentOn(responses, 'responseBody').toString()).toContain(usage);
    stream.end();
    expect(await stream.closed()).toBe(status.OK);
    expect(await rig.metric('kvtier_picker_requests_total{outcome="picked"}')).toBe(1);
    expect(await rig.metric('kvtier_picker_tokens_total{kind="prompt"}')).toBe(30);
    expect(await rig.metric('kvtier_picker_tokens_total{kind="cached"}')).toBe(16);
    expect(await rig.metric('kvtier_picker_tokens_total{kind="completion"}')).toBe(2);
    expect(await rig.metric('kvtier_picker_elsewhere_total')).toBe(0);
    expect(await rig.metric('kvtier_picker_streams')).toBe(0);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
  });

  it('of a rig.gateway that buffers: headers go through, the body’s answer names the endpoint', async () => {
    const stream = rig.gateway.open({ modes: modes.buffered });
    stream.post();
    const responses = await stream.has(1);
    expect(toldBy(responses[0]!)).toMatchObject({ part: 'requestHeaders', headers: {}, endpoint: undefined });
    stream.requestBody(body);
    await stream.has(2);
    expect(toldBy(responses[1]!)).toMatchObject({
      part: 'requestBody',
      headers: { 'x-gateway-destination-endpoint': '10.0.0.1:8000' },
      endpoint: '10.0.0.1:8000',
    });
    expect(rig.dispatch.asked[0]).toMatchObject({ tokens: 3, session: 'of the body' });
    stream.responseHeaders('10.0.0.1:8000');
    stream.responseBody('{}', true);
    await stream.has(4);
    // Nothing of a body that the rig.gateway has kept is sent back.
    expect(sentOn(responses, 'requestBody').length + sentOn(responses, 'responseBody').length).toBe(0);
    expect(rig.dispatch.told.slice(1)).toEqual(['first pod-0', 'ended pod-0']);
    stream.end();
  });

  it('of a rig.gateway that buffers names no endpoint itself, not even where trailers follow its headers', async () => {
    const stream = rig.gateway.open({ modes: modes.buffered });
    stream.post('/v1/completions', { 'x-gateway-destination-endpoint': '10.9.9.9:1' });
    const responses = await stream.has(1);
    expect(toldBy(responses[0]!).removed).toContain('x-gateway-destination-endpoint');
    stream.requestTrailers(); // no header can be set any more
    await stream.has(2);
    expect(toldBy(responses[1]!)).toMatchObject({ part: 'requestTrailers', headers: {}, endpoint: '10.0.0.1:8000' });
    stream.end();
    await rig.idle();
  });

  it.each([
    ['without a body', modes.duplex, true, 'no_body'],
    ['whose body the rig.gateway keeps', modes.headersOnly, false, 'not_sent'],
    [
      'of a rig.gateway that waits for the headers’ answer',
      { ...modes.duplex, request: BodySendMode.STREAMED },
      false,
      'not_sent',
    ],
  ] as const)('%s is routed by its headers', async (_, modes, endOfStream, reason) => {
    const stream = rig.gateway.open({ modes });
    stream.requestHeaders({ ':method': 'GET', ':path': '/v1/models' }, endOfStream);
    const [response] = await stream.has(1);
    expect(toldBy(response!)).toMatchObject({ part: 'requestHeaders', endpoint: '10.0.0.1:8000' });
    expect(rig.dispatch.asked[0]).toMatchObject({ model: 'm', tokens: 1, blockTokens: 32, keys: new Int32Array(0) });
    expect(rig.dispatch.asked[0]?.hasAnswer).toBe(false);
    stream.responseHeaders('10.0.0.1:8000', { ':status': '200' }, true);
    await stream.has(2);
    expect(rig.dispatch.told.slice(1)).toEqual(['first pod-0', 'ended pod-0']);
    expect(await rig.metric(`kvtier_picker_unread_total{reason="${reason}"}`)).toBe(1);
    stream.end();
  });

  it('with trailers: they end its body', async () => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body, false);
    stream.requestTrailers();
    const responses = await stream.has(3);
    expect(parts(stream)).toEqual(['requestHeaders', 'requestBody', 'requestTrailers']);
    expect(sentOn(responses, 'requestBody').toString()).toBe(body);
    expect(rig.reader.asked[0]?.body).toBe(body);
    expect(rig.dispatch.asked[0]?.hasAnswer).toBeUndefined();
    stream.responseHeaders('10.0.0.1:8000');
    stream.responseBody('x', false);
    stream.responseTrailers();
    await stream.has(6);
    expect(rig.dispatch.told.slice(1)).toEqual(['first pod-0', 'ended pod-0']);
    stream.end();
  });

  it('that nobody understands is routed by load', async () => {
    rig.reader.script = () => Promise.reject(new Error('no JSON'));
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post('/v1/audio');
    stream.requestBody('?'.repeat(400));
    await stream.has(2);
    expect(rig.dispatch.asked[0]).toMatchObject({ model: 'm', tokens: 100 });
    expect(await rig.metric('kvtier_picker_unread_total{reason="not_understood"}')).toBe(1);
    stream.cancel();
    await rig.idle();
  });

  it('of a rig.gateway that only observes gets no answer and no worker', async () => {
    const stream = rig.gateway.open();
    stream.call.write({
      request: { $case: 'requestHeaders', value: { headers: { headers: [] }, endOfStream: true } },
      metadataContext: undefined,
      observabilityMode: true,
      protocolConfig: undefined,
    });
    stream.end();
    expect(await stream.closed()).toBe(status.OK);
    expect([stream.responses, rig.dispatch.asked]).toEqual([[], []]);
  });
});

describe('a subset', () => {
  beforeEach(() => rig.start());
  const hint = (value: unknown) => ({
    'envoy.lb.subset_hint': { 'x-gateway-destination-endpoint-subset': value },
  });

  it.each([
    ['a list', ['10.0.0.9:1', '10.0.0.2:8000'], '10.0.0.2:8000'],
    ['a text with commas', '10.0.0.2:8000, 10.0.0.9:1', '10.0.0.2:8000'],
    ['hosts', ['10.0.0.2'], '10.0.0.2:8000'],
    ['IPv6', ['[FD00::3]:8000'], '[fd00::3]:8000'],
    ['an IPv6 host', ['fd00::3'], '[fd00::3]:8000'],
  ])('as %s is obeyed', async (_, value, endpoint) => {
    const stream = rig.gateway.open({ modes: modes.duplex, metadata: hint(value) });
    stream.post();
    stream.requestBody(body);
    const [response] = await stream.has(2);
    expect(toldBy(response!).endpoint).toBe(endpoint);
    stream.cancel();
    await rig.idle();
  });

  it.each([
    ['empty', []],
    ['of others', ['10.0.0.1:8001', '10.9.9.9:8000']],
    ['of what is no text', [1, null, {}]],
    ['that is none', 7],
    ['empty as text', ''],
  ])('%s: 503, and nobody is asked', async (_, value) => {
    const stream = rig.gateway.open({ modes: modes.duplex, metadata: hint(value) });
    stream.post();
    stream.requestBody(body);
    const [response] = await stream.has(1);
    expect(toldBy(response!)).toMatchObject({
      part: 'immediateResponse',
      status: 503,
      headers: { 'x-llm-d-request-dropped-reason': 'no_worker', 'retry-after': '1' },
    });
    expect(await stream.closed()).toBe(status.OK);
    expect(rig.dispatch.asked).toEqual([]);
  });
});

describe('what cannot be served', () => {
  const refusal = async (stream: GatewayStream) => {
    const [response] = await stream.has(1);
    expect(await stream.closed()).toBe(status.OK);
    expect(stream.responses.length).toBe(1);
    const value = response!.response!.$case === 'immediateResponse' ? response!.response!.value : undefined;
    return { ...toldBy(response!), body: JSON.parse(value!.body.toString()) as unknown };
  };
  const ask = (): GatewayStream => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    return stream;
  };

  it.each([
    ['DISCONNECTED', 503, 'no_worker', 'server_error'],
    ['BUSY', 429, 'saturated', 'rate_limit_error'],
    ['TOO_LONG', 400, 'refused', 'invalid_request_error'],
    ['GPU', 500, 'failed', 'server_error'],
  ] as const)('%s is %d', async (code, told, outcome, type) => {
    await rig.start();
    rig.dispatch.script = () => {
      throw new KvError(code, 'that is why');
    };
    expect(await refusal(ask())).toMatchObject({
      part: 'immediateResponse',
      status: told,
      headers: { 'content-type': 'application/json', 'x-llm-d-request-dropped-reason': outcome },
      body: { error: { message: 'that is why', type, code: outcome } },
    });
    expect(await rig.metric(`kvtier_picker_requests_total{outcome="${outcome}"}`)).toBe(1);
  });

  it('saturated and without an endpoint: when to come again', async () => {
    await rig.start();
    rig.dispatch.script = () => {
      throw new KvError('BUSY', 'full');
    };
    expect((await refusal(ask())).headers['retry-after']).toBe('1');
    rig.workers = [undefined, rig.pods[3]];
    expect(await refusal(ask())).toMatchObject({ status: 503, headers: { 'retry-after': '1' } });
  });

  it('how long to stay away is what was predicted', async () => {
    await rig.start();
    rig.dispatch.script = () => {
      throw new Saturated('full', 12.3);
    };
    expect((await refusal(ask())).headers['retry-after']).toBe('13');
  });

  it('where all endpoints are refused, it says why, and what to do', async () => {
    await rig.start();
    const why = 'worker pod-1: may not be reached so; configure it';
    rig.workers = [rig.pods[3], { ...rig.pods[1]!, state: 'refused', why }];
    const message = `No endpoint is known that a gateway can reach; ${why}`;
    expect(await refusal(ask())).toMatchObject({ status: 503, body: { error: { message, code: 'no_worker' } } });
  });

  it('where all have a name in place of an IP, it says which, and what to do', async () => {
    await rig.start();
    rig.workers = [pod(0, 'http://vllm-b:8000'), rig.pods[3]];
    const message =
      "No endpoint is known that a gateway can reach; worker pod-0: http://vllm-b:8000 has a host's name, " +
      'and a gateway takes IP:PORT alone; write its IP';
    expect(await refusal(ask())).toMatchObject({ status: 503, body: { error: { message, code: 'no_worker' } } });
  });

  it('a defect says nothing of its inside', async () => {
    await rig.start();
    rig.dispatch.script = () => {
      throw new TypeError('secret');
    };
    const told = await refusal(ask());
    expect(told.status).toBe(500);
    expect(JSON.stringify(told.body)).not.toContain('secret');
  });

  it('waits for a worker at most waitMs, whatever Dispatch does', async () => {
    await rig.start({ waitMs: 30 });
    let come = (_: Worker): void => {};
    rig.dispatch.script = () => new Promise((resolve) => (come = resolve));
    expect(await refusal(ask())).toMatchObject({ status: 429, headers: { 'retry-after': '1' } });
    come(rig.pods[0]!); // too late: it is given back
    await sleep(5);
    await rig.idle();
    expect(rig.dispatch.told.slice(1)).toEqual(['ended pod-0']);
  });

  it('a worker that the request may not go to is a defect, and is given back', async () => {
    await rig.start();
    rig.dispatch.script = () => rig.pods[3]!;
    expect(await refusal(ask())).toMatchObject({ status: 500 });
    expect(rig.dispatch.running).toBe(0);
  });
});

it('names fallbacks in order: ready, of the same model, the least loaded first', async () => {
  const load = (running: number) => ({ load: { ...rig.pods[0]!.load, running } });
  rig.workers = [
    pod(0, 'http://10.0.0.1:8000', load(0)),
    pod(1, 'http://10.0.0.2:8000', load(9)),
    pod(2, 'http://10.0.0.3:8000', load(2)),
    pod(3, 'http://10.0.0.4:8000', { state: 'silent' }),
    pod(4, 'http://10.0.0.5:8000', {}, 'other'),
    pod(5, 'http://10.0.0.6:8000', load(4)),
  ];
  rig.dispatch = new ScriptedDispatch(rig.workers.filter((worker) => worker !== undefined));
  await rig.start({ fallbacks: 2 });
  const stream = rig.gateway.open({ modes: modes.duplex });
  stream.post();
  stream.requestBody(body);
  const [response] = await stream.has(2);
  const expected = '10.0.0.1:8000,10.0.0.3:8000,10.0.0.6:8000';
  expect(toldBy(response!)).toMatchObject({
    endpoint: expected,
    headers: { 'x-gateway-destination-endpoint': expected },
  });
  expect(rig.dispatch.asked[0]?.among).toBeUndefined(); // all of them
  stream.responseHeaders('10.0.0.1:8000', { ':status': '200' }, true);
  await stream.has(3);
  expect(await rig.metric('kvtier_picker_elsewhere_total')).toBe(0);
  stream.end();
});

it('names none for a body that brings blocks on loan: nobody else gets what is good once', async () => {
  rig.workers = [pod(0, 'http://10.0.0.1:8000'), pod(1, 'http://10.0.0.2:8000')];
  rig.dispatch = new ScriptedDispatch(rig.workers.filter((worker) => worker !== undefined));
  for (const [isLoan, expected] of [
    [true, '10.0.0.1:8000'],
    [undefined, '10.0.0.1:8000,10.0.0.2:8000'],
  ] as const) {
    rig.reader.script = () => ({ ...rig.reader.facts, unsplit: 'brings parameters', ...(isLoan && { isLoan }) });
    await rig.start({ fallbacks: 2 });
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    const [response] = await stream.has(2);
    expect(toldBy(response!).endpoint).toBe(expected);
    expect(rig.dispatch.asked.at(-1)).not.toHaveProperty('isLoan');
    stream.end();
    await rig.close();
  }
});
