/** A gateway's client that tells pods where blocks come from: refused where its body is read, unless the configuration lets it. */
import { PodHandOff } from '@kvtier/pod-handoff';
import { afterEach, beforeEach, expect, it } from 'vitest';
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
