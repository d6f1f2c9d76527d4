/**
 * Whatever a gateway sends, in whatever order, in whatever mode, however Dispatch answers and however the stream ends: counts of load,
 * bytes and streams return to zero, a choice is told of its first token at most once and of its end exactly once, and nothing fails
 * that is not the gateway's doing.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { endpointPickerSchema } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { type EndpointPicker, startEndpointPicker } from './index.ts';
import { Gateway, type GatewayStream, pod, ScriptedDispatch } from './testing/index.ts';

const pods = [pod(0, 'http://10.0.0.1:8000'), pod(1, 'http://10.0.0.2:8000')];
const dispatch = new ScriptedDispatch(pods);
const defects: unknown[] = [];
let picker: EndpointPicker;
let gateway: Gateway;
beforeAll(async () => {
  picker = await startEndpointPicker({
    // A client that cancels what it has just begun may send no reset: then the deadlines end it.
    config: endpointPickerSchema.parse({
      port: 0,
      health: null,
      bodyBytes: 2_000,
      waitMs: 20,
      receiveMs: 60,
      silenceMs: 100,
      endMs: 100,
    }),
    dispatch,
    reader: { read: () => Promise.reject(new Error('not read')) },
    workers: () => pods,
    outcomes: { went: () => {}, heard: () => {}, succeeded: () => {}, failed: () => {}, doubted: () => {} },
    inTime: { admit: () => {}, came: () => {} },
    isReady: () => true,
    logger: { error: (told: unknown) => defects.push(told), debug: () => {} } as never,
  });
  gateway = new Gateway(picker.address);
});
afterAll(async () => {
  gateway.close();
  await picker.close(0);
});

const event = fc.oneof(
  { arbitrary: fc.constant('requestHeaders' as const), weight: 1 },
  fc.constantFrom(
    'requestBody' as const,
    'requestBodyEnd' as const,
    'requestTrailers' as const,
    'responseHeaders' as const,
    'responseHeadersEnd' as const,
    'responseBody' as const,
    'responseBodyEnd' as const,
    'responseTrailers' as const,
    'nothing' as const,
    'pause' as const,
  ),
);
const play = async (stream: GatewayStream, events: readonly string[], bytes: number): Promise<void> => {
  const body = Buffer.alloc(bytes, 'x');
  for (const name of events) {
    if (name === 'requestHeaders') stream.post();
    else if (name === 'requestBody') stream.requestBody(body, false);
    else if (name === 'requestBodyEnd') stream.requestBody(body, true);
    else if (name === 'requestTrailers') stream.requestTrailers();
    else if (name === 'responseHeaders') stream.responseHeaders('10.0.0.1:8000');
    else if (name === 'responseHeadersEnd') stream.responseHeaders('10.0.0.2:8000', { ':status': '200' }, true);
    else if (name === 'responseBody') stream.responseBody(body, false);
    else if (name === 'responseBodyEnd') stream.responseBody(body, true);
    else if (name === 'responseTrailers') stream.responseTrailers();
    else if (name === 'nothing') stream.send(undefined);
    else await sleep(2);
  }
};
/** The picker has got all that was sent before: frames of one connection keep their order. */
const seen = async (): Promise<void> => {
  const stream = gateway.open();
  stream.send(undefined);
  await stream.closed();
};
const gauge = async (name: string): Promise<number> =>
  Number(new RegExp(`^${name} (\\d+)$`, 'm').exec(await picker.metrics())![1]);

it('counts return to zero', async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.boolean(),
      fc.array(event, { maxLength: 10 }),
      fc.integer({ min: 0, max: 5 }),
      fc.integer({ min: 0, max: 5 }),
      fc.constantFrom(0, 1, 1_500),
      fc.constantFrom('choose' as const, 'late' as const, 'never' as const, 'refuse' as const),
      fc.constantFrom('end' as const, 'cancel' as const),
      async (inOrder, drawn, request, response, bytes, answer, how) => {
        dispatch.script = async (_, signal) => {
          if (answer === 'refuse') throw new KvError('BUSY', 'full');
          if (answer === 'never') {
            return new Promise((_resolve, reject) => signal.addEventListener('abort', () => reject(signal.reason)));
          }
          if (answer === 'late') await sleep(3);
          return pods[0]!;
        };
        const stream = gateway.open({ modes: { request: request as never, response: response as never } });
        const events = inOrder ? ['requestHeaders', 'requestBodyEnd', 'pause', ...drawn] : drawn;
        await play(stream, events, bytes);
        if (how === 'end') stream.end();
        else stream.cancel();
        await stream.closed();
        await seen();
        while ((await gauge('kvtier_picker_streams')) > 0) await sleep(1);
        while (dispatch.choosing + dispatch.running > 0) await sleep(1);
        expect(await gauge('kvtier_picker_held_bytes')).toBe(0);
        const told = dispatch.told.splice(0).map((line) => line.split(' ')[0]);
        expect(['', 'choose', 'choose ended', 'choose first ended']).toContain(told.join(' '));
        expect(defects).toEqual([]);
      },
    ),
    { numRuns: 60 },
  );
});
