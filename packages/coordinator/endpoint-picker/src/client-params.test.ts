/** A gateway's client that tells pods where blocks come from: refused where its body is read, unless the configuration lets it. */
import { KvError } from '@kvtier/errors';
import { PodHandOff } from '@kvtier/pod-handoff';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { modes, PickerRig, toldBy } from './testing/index.ts';

let rig: PickerRig;
beforeEach(() => {
  rig = new PickerRig();
  rig.reader.script = () => ({ ...rig.reader.facts, whyNoTransfer: 'kv_hints: clients may not. Leave it out' });
});
afterEach(async () => {
  await rig.close();
  expect(rig.dispatch.running).toBe(0);
});
const handOff = (clientParams: boolean): PodHandOff =>
  new PodHandOff({
    dispatch: rig.dispatch,
    pods: { workers: () => rig.workers, forward: () => Promise.reject() },
    config: { clientParams },
  });

it.each(['duplex', 'buffered'] as const)('is answered 400 at once, and no pod is chosen: %s', async (mode) => {
  for (const pods of [undefined, handOff(false)]) {
    rig.handOff = pods;
    await rig.start();
    const stream = rig.gateway.open({ modes: modes[mode] });
    stream.post('/v1/completions');
    stream.requestBody('{"model":"m"}', true);
    const responses = await stream.has(mode === 'duplex' ? 1 : 2);
    const { response } = responses.at(-1)!;
    if (response?.$case !== 'immediateResponse') throw new Error(`answered ${response?.$case}`);
    expect(response.value.status?.code).toBe(400);
    const message = 'kv_hints: clients may not. Leave it out, or let all clients (podHandOff.clientParams).';
    expect(JSON.parse(response.value.body.toString())).toEqual({
      error: { message, type: 'invalid_request_error', param: null, code: 'refused' },
    });
    expect(rig.dispatch.told).toEqual([]);
    await rig.close();
  }
  await rig.start();
});

it('goes to a pod where the configuration lets clients', async () => {
  rig.handOff = handOff(true);
  await rig.start();
  const stream = rig.gateway.open({ modes: modes.buffered });
  stream.post('/v1/completions');
  stream.requestBody('{"model":"m"}', true);
  const responses = await stream.has(2);
  expect(toldBy(responses[1]!).endpoint).toBe('10.0.0.1:8000');
  stream.end();
  await stream.closed();
});

describe('in a body that is not read', () => {
  const odd = new Error('no JSON that can be read');
  const busy = new KvError('BUSY', 'later', { retry: true });
  const utf16 = Buffer.from('{"kv_transfer_params":{"x":NaN}}', 'utf16le');
  it.each<[string, Error, string | Buffer, number, string?]>([
    ['by its name', busy, '{"model":"m","kv_transfer_params":{}}', 400],
    ['another one by its name', odd, '{"bootstrap_room":NaN}', 400],
    ['in pieces', odd, '{"kv_hint', 400, 's":1}'],
    ['in other letters', odd, '{"kv_tr\\u0061nsfer_params":NaN}', 400],
    ['in wide letters', odd, utf16, 400],
    ['not, and we were busy', busy, '{"prompt":"\\u00e4"}', 200],
    ['not, and it is odd', odd, '{"prompt":NaN}', 200],
  ])('%s', async (_, error, first, status, rest) => {
    rig.reader.script = () => {
      throw error;
    };
    await rig.start();
    const stream = rig.gateway.open({ modes: modes.duplex });
    stream.post('/v1/completions');
    stream.requestBody(first, rest === undefined);
    if (rest !== undefined) stream.requestBody(rest);
    const { response } = (await stream.has(1))[0]!;
    if (response?.$case === 'immediateResponse') {
      const message = JSON.parse(response.value.body.toString()).error.message;
      expect(message).toMatch(/^A body that cannot be read here may tell pods no transfer of blocks\./);
      expect(rig.dispatch.told).toEqual([]);
    } else expect(response?.$case).toBe('requestHeaders');
    expect(response?.$case === 'immediateResponse' ? response.value.status?.code : 200).toBe(status);
    stream.end();
    await stream.closed();
  });
});
