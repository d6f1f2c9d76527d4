/** What a gateway or its client does wrong, stops doing or does too much of: bounds, ends at each moment, nonsense. */
import { setImmediate as nextTurn, setTimeout as sleep } from 'node:timers/promises';
import { status } from '@grpc/grpc-js';
import type { ProcessingResponse } from '@kvtier/wire/ext-proc';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Gateway, type GatewayStream, modes, PickerRig, sentOn, toldBy } from './testing/index.ts';

const body = JSON.stringify({ model: 'm', prompt: 'one two three', max_tokens: 7 });
let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
});
afterEach(async () => {
  vi.useRealTimers();
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});

/** What has no response was taken when a later word on the same connection is answered. */
async function taken(): Promise<void> {
  const later = rig.gateway.open({ modes: modes.duplex });
  later.requestBody('{}');
  expect(await later.closed()).toBe(status.INVALID_ARGUMENT);
}

const parts = ({ responses }: GatewayStream) => responses.map((response) => toldBy(response).part);

describe('bounds', () => {
  it('a client that stalls in its body: 408', async () => {
    await rig.start({ receiveMs: 40 });
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody('{', false);
    const [response] = await stream.has(1);
    expect(toldBy(response!)).toMatchObject({ part: 'immediateResponse', status: 408 });
    expect(await stream.closed()).toBe(status.OK);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
  });

  it('a stream without a word: a status', async () => {
    await rig.start({ receiveMs: 40 });
    const stream = rig.gateway.open({ modes: modes.duplex });
    expect(await stream.closed()).toBe(status.DEADLINE_EXCEEDED);
  });

  it('a gateway that only observes, for longer than a request may take to come: no status, and it is let go when it is silent', async () => {
    await rig.start({ receiveMs: 40, silenceMs: 400 });
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
    const stream = rig.gateway.open();
    const observed = async (): Promise<void> => {
      stream.call.write({
        request: { $case: 'requestHeaders', value: { headers: { headers: [] }, endOfStream: true } },
        metadataContext: undefined,
        observabilityMode: true,
        protocolConfig: undefined,
      });
      await taken();
    };
    await observed();
    vi.advanceTimersByTime(300);
    await observed();
    vi.advanceTimersByTime(399); // from its last word
    await taken();
    expect(stream.ended).toBeUndefined();
    vi.advanceTimersByTime(1);
    expect(await stream.closed()).toBe(status.OK);
    expect([stream.responses, rig.dispatch.asked]).toEqual([[], []]);
    expect(await rig.metric('kvtier_picker_requests_total{outcome="failed"}')).toBe(3); // of `taken`
  });

  it('an answer without a word: its share of the load ends, the answer goes on', async () => {
    await rig.start({ silenceMs: 40 });
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    await stream.has(2);
    expect(await stream.closed()).toBe(status.OK);
    expect(rig.dispatch.told.slice(1)).toEqual(['ended pod-0']);
  });

  it('a gateway that stops reading: the stream is reset, and others of its connection go on', async () => {
    await rig.start({ silenceMs: 400, endMs: 40 });
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    await stream.has(2);
    stream.call.pause();
    stream.responseHeaders('10.0.0.1:8000');
    // Sent back, it is more than HTTP/2 lets through to who does not read.
    for (let at = 0; at < 64; at++) stream.responseBody(Buffer.alloc(50_000), false);
    while (!rig.dispatch.told.includes('first pod-0')) await nextTurn();
    const isOpen = async (): Promise<boolean> => (await rig.metric('kvtier_picker_streams')) > 0;
    expect(await isOpen()).toBe(true);
    for (; await isOpen(); await nextTurn()) vi.advanceTimersByTime(20); // what comes meanwhile is no silence
    vi.useRealTimers();
    await rig.idle();
    expect(rig.dispatch.told.slice(1)).toEqual(['first pod-0', 'ended pod-0']);
    const other = rig.gateway.open({ modes: modes.duplex });
    other.post();
    other.requestBody(body);
    await other.has(2);
    other.end();
    expect(await other.closed()).toBe(status.OK);
    stream.call.resume();
    expect(await stream.closed()).toBe(status.CANCELLED);
    await rig.idle();
  });

  it('more streams than maxStreams: a status, for the gateway’s failure mode', async () => {
    await rig.start({ maxStreams: 1 });
    const first = rig.gateway.open({ modes: modes.duplex });
    first.post();
    first.requestBody(body);
    await first.has(2);
    const other = new Gateway(rig.picker.address);
    const second = other.open({ modes: modes.duplex });
    second.post();
    expect(await second.closed()).toBe(status.RESOURCE_EXHAUSTED);
    first.end();
    await first.closed();
    const third = other.open({ modes: modes.duplex });
    third.post();
    third.requestBody(body);
    await third.has(2);
    third.cancel();
    other.close();
    await rig.idle();
  });

  it.each([
    ['its own limit', { bodyBytes: 100_000 }],
    ['the limit of all', { heldBytes: 100_000 }],
  ])('a body above %s is routed by load and goes through whole', async (_, limit) => {
    await rig.start(limit);
    const whole = Buffer.alloc(1_000_000, 'abcdefghij');
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    for (let at = 0; at < whole.length; at += 50_000) {
      stream.requestBody(whole.subarray(at, at + 50_000), at + 50_000 === whole.length);
    }
    await stream.until(({ responses }) => sentOn(responses, 'requestBody').length === whole.length);
    expect(toldBy(stream.responses[0]!)).toMatchObject({ part: 'requestHeaders', endpoint: '10.0.0.1:8000' });
    expect(sentOn(stream.responses, 'requestBody').equals(whole)).toBe(true);
    expect(rig.reader.asked).toEqual([]);
    expect(await rig.metric('kvtier_picker_unread_total{reason="too_large"}')).toBe(1);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
    stream.cancel();
    await rig.idle();
  });

  it('a body that is far above its own limit and comes as one is routed by load', async () => {
    await rig.start({ bodyBytes: 1_000 });
    const stream = rig.gateway.open({ modes: modes.buffered });
    stream.post();
    stream.requestBody(Buffer.alloc(300_000, 'x'));
    const [, response] = await stream.has(2);
    expect(toldBy(response!)).toMatchObject({ part: 'requestBody', endpoint: '10.0.0.1:8000' });
    expect(rig.reader.asked).toEqual([]);
    expect(await rig.metric('kvtier_picker_unread_total{reason="too_large"}')).toBe(1);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
    stream.cancel();
    await rig.idle();
  });

  it('a large body is read and sent back in pieces that Envoy takes', async () => {
    await rig.start();
    const whole = Buffer.alloc(6_000_000, 'abcdefghij');
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    // Each in a turn of its own: how long the gateway here takes to write them is not what is tested.
    for (let at = 0; at < whole.length; at += 1_500_000) {
      stream.requestBody(whole.subarray(at, at + 1_500_000), at + 1_500_000 >= whole.length);
      await nextTurn();
    }
    const endOf = (answer: ProcessingResponse | undefined) => {
      const { response } = answer ?? {};
      const mutation = response?.$case === 'requestBody' ? response.value.response?.bodyMutation?.mutation : undefined;
      return mutation?.$case === 'streamedResponse'
        ? [mutation.value.body.length <= 62_000, mutation.value.endOfStream]
        : [];
    };
    await stream.until(({ responses }) => endOf(responses.at(-1))[1] === true);
    expect(sentOn(stream.responses, 'requestBody').equals(whole)).toBe(true);
    const ends = stream.responses.map(endOf);
    expect(ends.slice(1, -1).every(([fits, end]) => fits === true && end === false)).toBe(true);
    expect(ends.at(-1)).toEqual([true, true]);
    expect(rig.reader.asked[0]?.body.length).toBe(whole.length);
    stream.cancel();
    await rig.idle();
  });

  it('a body of a thousand pieces', async () => {
    await rig.start();
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    for (let at = 0; at < 1_000; at++) stream.requestBody(String.fromCharCode(97 + (at % 26)), at === 999);
    await stream.has(1_001);
    expect(sentOn(stream.responses, 'requestBody').toString()).toBe(rig.reader.asked[0]?.body);
    for (let at = 0; at < 1_000; at++) stream.responseBody(`${at} `, at === 999);
    await stream.has(2_001);
    expect(sentOn(stream.responses, 'responseBody').toString()).toBe(
      Array.from({ length: 1_000 }, (_, at) => `${at} `).join(''),
    );
    stream.end();
  });
});

describe('a load that was counted returns to zero', () => {
  beforeEach(() => rig.start());
  type Step = (stream: GatewayStream) => void;
  const steps: readonly (readonly [string, Step, responses: number])[] = [
    ['the headers', (stream) => stream.post(), 0],
    ['a part of the body', (stream) => stream.requestBody('{', false), 0],
    ['the body', (stream) => stream.requestBody('}', true), 3],
    ['the answer’s headers', (stream) => stream.responseHeaders('10.0.0.1:8000'), 4],
    ['a part of the answer', (stream) => stream.responseBody('x', false), 5],
    ['the answer', (stream) => stream.responseBody('y', true), 6],
  ];

  it.each(steps.map(([name], at) => [name, at] as const))('when the client leaves after %s', async (_, last) => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    for (const [, step, count] of steps.slice(0, last + 1)) {
      step(stream);
      await stream.has(count);
    }
    if (last < 2) await taken();
    stream.cancel();
    expect(await stream.closed()).toBe(status.CANCELLED);
    while ((await rig.metric('kvtier_picker_streams')) > 0) await sleep(1);
    expect(rig.dispatch.running).toBe(0);
    expect(rig.dispatch.told.filter((line) => line.startsWith('ended'))).toEqual(last < 2 ? [] : ['ended pod-0']);
    expect(await rig.metric('kvtier_picker_requests_total{outcome="cancelled"}')).toBe(last < 2 ? 1 : 0);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
  });

  it('when the client leaves while a worker is waited for', async () => {
    let signal: AbortSignal | undefined;
    rig.dispatch.script = (_, given) => {
      signal = given;
      return new Promise((_resolve, reject) => given.addEventListener('abort', () => reject(given.reason)));
    };
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    while (signal === undefined) await sleep(1);
    stream.cancel();
    while (!signal.aborted) await sleep(1);
    while ((await rig.metric('kvtier_picker_streams')) > 0) await sleep(1);
    expect(rig.dispatch.told.length).toBe(1);
  });

  it('when another endpoint served it, and when it failed there', async () => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    await stream.has(2);
    stream.responseHeaders('10.0.0.2:8000', { ':status': '200' });
    await stream.has(3);
    expect(rig.dispatch.told.slice(1)).toEqual(['ended pod-0']);
    stream.responseBody('x', true);
    await stream.has(4);
    stream.end();
    await stream.closed();
    expect(await rig.metric('kvtier_picker_elsewhere_total')).toBe(1);

    const failed = rig.gateway.open({ modes: modes.duplex });
    failed.post();
    failed.requestBody(body);
    await failed.has(2);
    failed.responseHeaders('10.0.0.1:8000', { ':status': '503' });
    failed.responseBody('{"error":{}}', true);
    await failed.has(4);
    // No prompt was computed: no first token.
    expect(rig.dispatch.told.slice(3)).toEqual(['ended pod-0']);
    // Neither says that the one that was chosen lives: another one's, and what may be the gateway's own word.
    expect(rig.heard).toEqual([]);
    failed.end();
  });

  it('when the rig.gateway answers by itself before the body is whole', async () => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody('{', false);
    stream.responseHeaders('', { ':status': '504' });
    stream.responseBody('late', true);
    await stream.has(2);
    expect(parts(stream)).toEqual(['responseHeaders', 'responseBody']);
    expect(rig.dispatch.asked).toEqual([]);
    expect(await rig.metric('kvtier_picker_held_bytes')).toBe(0);
    stream.end();
  });
});

describe('nonsense', () => {
  beforeEach(() => rig.start());

  it.each<readonly [string, (stream: GatewayStream) => void]>([
    ['a body before headers', (stream) => stream.requestBody('{}')],
    ['trailers before headers', (stream) => stream.requestTrailers()],
    ['a message without a request', (stream) => stream.send(undefined)],
    [
      'headers twice',
      (stream) => {
        stream.post();
        stream.post();
      },
    ],
  ])('%s ends its stream with a status', async (_, say) => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    say(stream);
    expect(await stream.closed()).toBe(status.INVALID_ARGUMENT);
    expect(await rig.metric('kvtier_picker_requests_total{outcome="failed"}')).toBe(1);
  });

  it('what comes after the end is nobody’s', async () => {
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post();
    stream.requestBody(body);
    await stream.has(2);
    stream.responseHeaders('10.0.0.1:8000');
    stream.responseBody('', true);
    stream.responseBody('more', true);
    stream.responseTrailers();
    stream.requestBody('late', true);
    stream.responseHeaders('10.0.0.1:8000');
    await stream.has(8);
    expect(rig.dispatch.told.slice(1)).toEqual(['ended pod-0']);
    stream.end();
    expect(await stream.closed()).toBe(status.OK);
  });

  it('headers of many megabytes, and bytes that are no message, cost their own stream', async () => {
    const stream = rig.gateway.open();
    stream.post('/v1/completions', Object.fromEntries(Array.from({ length: 50_000 }, (_, at) => [`h${at}`, 'x'])));
    expect(await stream.closed()).toBe(status.INTERNAL);
    const raw = rig.gateway.client.makeBidiStreamRequest(
      '/envoy.service.ext_proc.v3.ExternalProcessor/Process',
      (bytes: Buffer) => bytes,
      (bytes: Buffer) => bytes,
    );
    const ended = new Promise<number>((resolve) => raw.on('status', ({ code }) => resolve(code)));
    raw.on('error', () => {});
    raw.write(Buffer.from([0x12, 0xff, 0xff]));
    expect(await ended).toBe(status.INTERNAL);
    const next = rig.gateway.open({ modes: modes.duplex });
    next.post();
    next.requestBody(body);
    await next.has(2);
    next.end();
  });
});
