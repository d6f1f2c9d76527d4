/** The decode pod fails between the legs: who is next, and with what of prefill's. */
import { type PodRequest, StorePod } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { jsonOf } from './testing/harness.ts';
import { answerTo, bodiesOf, chat, contentOf, header, messages, twoLegsRig } from './testing/two-legs-rig.ts';

const { at, store, p, d, open, ask, withAlso, atRest } = twoLegsRig();
const other = new StorePod(store, 'pods');
beforeEach(async () => {
  for (const list of [other.seen, other.computed]) list.length = 0;
  await other.start();
});
afterEach(() => other.stop());
const fails: [string, (request: PodRequest) => void][] = [
  ['dies', ({ response }) => void response.socket!.destroy()],
  ['answers 500', ({ response }) => void response.writeHead(500).end()],
  [
    'could not fetch them, as a stream says',
    ({ response }) => {
      const error = 'data: {"error":{"message":"Internal server error","code":500}}\n\ndata: [DONE]\n\n';
      response.writeHead(200, { 'content-type': 'text/event-stream' }).end(error);
    },
  ],
];
/** The first one that is asked to decode fails so. */
const failing = (fail: (request: PodRequest) => void): void => {
  let hasFailed = false;
  for (const pod of [d, other])
    pod.before = (request) => {
      if (hasFailed) return false;
      hasFailed = true;
      fail(request);
      return true;
    };
};
const decoded = () => [...bodiesOf(d), ...bodiesOf(other)].map((body) => body.kv_transfer_params);

it.each(fails)('it %s: what prefill lent goes to nobody else, and prefill is not asked again', async (_, fail) => {
  await open(['p', 'd']);
  await withAlso(other);
  failing(fail);
  const response = await ask();
  expect([response.status, await contentOf(response)]).toEqual([200, answerTo(messages)]);
  // The first one may have read them, and the pod that lent them given their room to another prompt.
  expect(decoded().toSorted()).toEqual([p.params, undefined]);
  expect([p.seen.length, d.seen.length + other.seen.length]).toEqual([1, 2]);
  expect([...d.seen, ...other.seen].map(({ body }) => body)).toContain(JSON.stringify(chat));
  expect(header(response, 'degraded')).toBe('handoff-spent, retried');
  expect(header(response, 'handoff')).toBe('none; why=what prefill lent went to a decode pod that failed');
  await atRest();
});

it('what prefill lent went with it, and fallback is off: 503', async () => {
  await open(['p', 'd'], { fallback: false });
  await withAlso(other);
  failing(fails[0]![1]);
  const response = await ask();
  expect([response.status, (await jsonOf(response)).error.code]).toEqual([503, 'handoff_spent']);
  await atRest();
});

it.each([
  ['blocks with names', { do_remote_prefill: true, remote_block_ids: [[], []], kvtier: { last_hash: 'ab' } }],
  ['nothing of its own', {}],
])('where prefill answers %s, another one gets the same', async (_, params) => {
  await open(['p', 'd']);
  p.params = params;
  await withAlso(other);
  failing(fails[0]![1]);
  const response = await ask();
  expect([response.status, await contentOf(response)]).toEqual([200, answerTo(messages)]);
  expect(decoded()).toEqual([params, params]);
  expect([p.seen.length, header(response, 'degraded')]).toEqual([1, 'retried']);
  await atRest();
});

it.each(['prefill', 'both'] as const)(
  'the pod that prefilled is left, of role %s: it is not sent to itself',
  async (role) => {
    await open(['p', 'd']);
    await at.workers(
      { name: 'p', kind: 'openai', address: p.address, role },
      { name: 'd', kind: 'openai', address: d.address, role: 'decode' },
    );
    const numberOf = (name: string) => at.fleet.workers().find((worker) => worker?.record.name === name)!.number;
    if (role === 'both') at.fleet.lean(numberOf('p'), 'mixed');
    p.params = { kvtier: { last_hash: 'ab' } };
    at.holdings.blocks[numberOf('d')] = 1; // it is asked first
    d.before = ({ response }) => {
      at.discovery.say(
        { name: 'p', kind: 'openai', address: p.address, role },
        { name: 'd', kind: 'openai', address: d.address, role: 'decode', draining: true },
      );
      response.socket!.destroy();
      return true;
    };
    const response = await ask();
    expect([response.status, await contentOf(response)]).toEqual([200, answerTo(messages)]);
    expect(decoded()).toEqual([p.params]);
    expect(bodiesOf(p).slice(1)).toEqual([chat]);
    expect(header(response, 'degraded')).toBe(role === 'both' ? 'retried' : 'handoff-no-decode-worker, retried');
    await atRest();
  },
);
