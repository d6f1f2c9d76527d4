/** Hand-offs in virtual time: many lives keep all laws, a seed is a life, and typical defects, planted one by one, are found. */
import type { HandOffEngines } from '@kvtier/handoff';
import { expect, it } from 'vitest';
import { type HandOffSimOptions, simulateHandOffs } from './handoff-simulation.ts';

it('many worlds keep all laws, and everything happened in them', async () => {
  const tally: Record<string, number> = {};
  for (let seed = 1; seed <= 16; seed++) {
    const result = await simulateHandOffs({ seed });
    expect(result.failure, `npm run sim -- --handoff --seed ${seed}\n${result.lines.join('\n')}`).toBeUndefined();
    for (const [name, count] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + count;
  }
  const expected = [
    ...['leg', 'why=sooner', 'why=spares-streams', 'why=alone', 'why=held', 'answer.whole', 'answer.saturated'],
    ...[
      'answer.CANCELLED',
      'answer.stray',
      'moved',
      'fault.kill',
      'fault.stop',
      'fault.node',
      'fault.link',
      'fault.coordinator',
      'answer.lost',
      'handoff-prefill-died',
      'handoff-prefill-stalled',
    ],
    ...['handoff-prefill-short', 'handoff-prefill-busy', 'handoff-no-decode-worker', 'handoff-no-prefill-worker'],
  ];
  expect(expected.filter((name) => (tally[name] ?? 0) === 0)).toEqual([]);
});

it.each([
  [18, 16],
  [96, 64],
  [64, 16],
])(
  '%i nodes, each with %i peers at most: blocks are awaited only where they can come from',
  async (count, maxPeers) => {
    const tally: Record<string, number> = {};
    for (let seed = 1; seed <= 4; seed++) {
      const result = await simulateHandOffs({ seed, nodes: { count, maxPeers } });
      expect(result.failure, `seed ${seed}\n${result.lines.join('\n')}`).toBeUndefined();
      for (const [name, times] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + times;
    }
    expect(tally.leg).toBeGreaterThan(20);
  },
);

it('a seed is a life: the same again, event by event, and another one for another seed', async () => {
  const [first, again, other] = [
    await simulateHandOffs({ seed: 7, verbose: true }),
    await simulateHandOffs({ seed: 7, verbose: true }),
    await simulateHandOffs({ seed: 8 }),
  ];
  expect(again.lines).toEqual(first.lines);
  expect(other.digest).not.toBe(first.digest);
});

const deaf = (): AbortSignal => new AbortController().signal;
const isLeg = (requestId: string): boolean => requestId.includes('-prefill-');
type Bend = NonNullable<HandOffSimOptions['bend']>;
/** A share whose end is not told. */
const keeps =
  (isKept: (requestId: string) => boolean): Bend =>
  (engines) => ({
    sent: (number, share) => {
      const sent = engines.sent(number, share);
      return isKept(share.requestId) ? { ...sent, ended: () => {} } : sent;
    },
  });
/** A call that is asked for otherwise. */
const asks =
  (bend: (...asked: Parameters<HandOffEngines['follow']>) => Parameters<HandOffEngines['follow']>): Bend =>
  (engines) => ({ follow: (...asked) => engines.follow(...bend(...asked)) });

const defects: Record<string, Omit<HandOffSimOptions, 'seed'>> = {
  'what nodes say of their peers is not heard': {
    nodes: { count: 18, maxPeers: 8 },
    bend: () => ({ nodes: () => [] }),
  },
  'a leg of prefill is not cancelled': {
    bend: asks((number, request, signal, onEvent) => [number, request, request.prefillOnly ? deaf() : signal, onEvent]),
  },
  'a call goes on when its client has left': {
    bend: asks((number, request, signal, onEvent) => [number, request, request.prefillOnly ? signal : deaf(), onEvent]),
  },
  'a leg counts on its worker for ever': { bend: keeps(isLeg) },
  'a second leg counts on its worker for ever': { bend: keeps((id) => id.endsWith('-prefill-2')) },
  'a request counts on its worker for ever': { bend: keeps((id) => !isLeg(id)) },
  'a prefill worker is asked for a block less': {
    bend: asks((number, request, signal, onEvent) => {
      const { prefillOnly: asked } = request;
      const blocks = Math.max((asked?.blocks ?? 0) - 1, 1);
      return [number, asked ? { ...request, prefillOnly: { blocks } } : request, signal, onEvent];
    }),
  },
  'a prefill worker is asked before the decode worker has its room': {
    bend: asks((number, request, signal, onEvent) => {
      const handOff = { localBlocks: 0, readyBlocks: 0 };
      if (request.handOff) void onEvent({ tokenIds: [], finishReason: '', failure: undefined, handOff });
      return [number, request, signal, onEvent];
    }),
  },
  'a worker has more legs than it may': { limits: { maxLegsPerWorker: 1_000 } },
  'workers go on with what a dead coordinator had': { ignoresDeaths: true },
  'there are more legs than may be': { limits: { maxLegs: 1_000 } },
  'decode workers are taken for prefill': {
    bend: (engines) => ({
      workers: () =>
        engines.workers().map((worker) =>
          // Another object of the same worker: its load is read when it is asked for.
          worker === undefined
            ? undefined
            : Object.create(worker, { record: { value: { ...worker.record, role: 'both' } } }),
        ),
    }),
  },
};

it.each(Object.keys(defects))('planted, and found: %s', async (name) => {
  let failure: string | undefined;
  for (let seed = 1; seed <= 60 && failure === undefined; seed++)
    failure = (await simulateHandOffs({ ...defects[name], seed, steps: 2_000 })).failure;
  expect(failure).toMatch(/^(promise|law \d|r\d+):? /);
});
