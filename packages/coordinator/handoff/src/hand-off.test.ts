/** One hand-off over scripted calls: what it tells of its blocks. (Who dies when: the tests of the API server and the simulation.) */
import { FakeWorkers } from '@kvtier/dispatch/testing';
import { KvError } from '@kvtier/errors';
import type { OnEvent } from '@kvtier/registry';
import { event, greedy } from '@kvtier/registry/testing';
import type { GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import { expect, it } from 'vitest';
import type { Split } from './decision.ts';
import { HandOff, type HandOffEngines, type Took } from './hand-off.ts';
import type { Transfer } from './link-rate.ts';

/** What a side says; or its call is waited for to be cancelled; or it dies. */
type Step = readonly ['d' | 'p', Partial<GenerateEvent> | 'cancelled' | 'dies'];
/** What is told to the decode side, and given; `taken`: when the first that is given has been taken; of pauses that are told, whether the prefill side gave the token. */
type Draws = {
  readonly tells: (string | number)[][];
  readonly given: number[][];
  readonly taken?: Promise<void>;
  readonly pauses?: boolean[];
  /** The decode side waits so long. */
  readonly deadlineMs?: number;
  /** So many of the ten are not in the decode side's node either. */
  readonly travels?: number;
  readonly transfers?: Transfer[];
  /** Of another prefill worker that is asked for the same: so many of them are not in the decode side's node. */
  readonly another?: number;
};

/** Ten blocks of 16 tokens that worker 1 computes for worker 0, of which worker 0 holds `local`. Returns what was told at the end. */
async function handedOff(
  events: readonly Step[],
  pending: number[] = [],
  parts: Took[] = [],
  draws: Draws = { tells: [], given: [] },
  came: number[] = [],
  answering = () => {},
): Promise<number[][]> {
  const workers = new FakeWorkers();
  workers.add('d');
  const prefill = { ...workers.add('p'), maxStepTokens: 512 } as unknown as Split['prefill'];
  const told: number[][] = [];
  type Stream = { onEvent: OnEvent; end: () => void; die: (why: KvError) => void; cancelled: Promise<void> };
  const streams = new Map<string, Stream>();
  const follow = (number: number, _: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void> =>
    new Promise((resolve, die) => {
      const cancelled = new Promise<void>((cancel) => {
        signal.addEventListener('abort', () => cancel(), { once: true });
      });
      void cancelled.then(resolve);
      streams.set(number === 0 ? 'd' : 'p', { onEvent, end: resolve, die, cancelled });
    });
  const engines = {
    workers: () => workers.all,
    onChange: () => () => {},
    onLoad: () => () => {},
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: (number: number) => ({
      changeHandOff: async () => true,
      // One that does not answer is none of the answer's business.
      tellFirstToken: async (id: string, token: number) => {
        draws.tells.push([number, id, token]);
        throw new Error('gone');
      },
    }),
    follow,
  } as unknown as HandOffEngines;
  const split = { prefill, blocks: 10, computes: 160, travels: draws.travels ?? 10, draws: true } as Split;
  const run = new HandOff({
    ...{ engines, decode: 0, request: greedy({ requestId: 'r' }), blockTokens: 16, tries: 2 },
    times: { stallMs: 60_000, deadlineMs: draws.deadlineMs ?? 60_000 },
    split,
    listener: {
      leg: () => {},
      ready: () => {},
      pending: (blocks) => pending.push(blocks),
      came: (blocks) => came.push(blocks),
      fellShort: (why) => told.push([why.length]),
      another: () => (draws.another === undefined ? undefined : { ...split, travels: draws.another }),
      firstToken: (...blocks) => told.push(blocks),
      took: (took) => parts.push(took),
      paused: (seconds, isGiven) => {
        expect(seconds >= 0 && seconds < 60).toBe(true);
        draws.pauses?.push(isGiven);
      },
      travelled: (transfer) => draws.transfers?.push(transfer),
    },
  }).run(new AbortController().signal, ({ tokenIds }) => {
    draws.given.push([...tokenIds]);
    return draws.given.length === 1 ? draws.taken : undefined;
  });
  run.catch(() => {}); // awaited below
  for (const [who, said] of events) {
    const { onEvent, end, die, cancelled } = streams.get(who)!;
    if (said === 'dies') {
      die(new KvError('DISCONNECTED', 'killed', { retry: true }));
      break;
    }
    if (said === 'cancelled') {
      await cancelled;
      continue;
    }
    onEvent(event(said));
    if (said.finishReason !== undefined && said.finishReason !== '') end();
    await new Promise(setImmediate);
  }
  answering();
  streams.get('d')?.end();
  await run;
  return told;
}

const state = (localBlocks: number, readyBlocks: number): Partial<GenerateEvent> => ({
  handOff: { localBlocks, readyBlocks },
});
const first = (cachedTokens: number): Partial<GenerateEvent> => ({
  tokenIds: [1],
  finishReason: 'length',
  cache: { promptTokens: 161, cachedTokens, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 },
});

it('blocks have still to travel until the decode worker has them, whatever lies in the prefill worker’s node', async () => {
  const [pending, came]: number[][] = [[], []];
  await handedOff(
    [
      ['d', state(2, 0)],
      ['p', { ...state(0, 10), finishReason: 'prefilled' }],
      ['d', state(2, 6)],
      ['d', state(2, 10)],
      ['d', { ...first(160), finishReason: '' }],
      goesOn,
    ],
    pending,
    [],
    { tells: [], given: [] },
    came,
  );
  expect([pending, came]).toEqual([
    [10, 8, 4, 0, 0, 0],
    [4, 4],
  ]);
});

it('that the last blocks came is told with the first token: from then on nothing travels, however long the answer is', async () => {
  const [pending, came]: number[][] = [[], []];
  await handedOff(
    [
      ['d', state(2, 0)],
      ['p', { ...state(0, 10), finishReason: 'prefilled' }],
      ['d', state(2, 6)],
      ['d', begun],
    ],
    pending,
    [],
    { tells: [], given: [] },
    came,
    () => {
      expect([pending, came]).toEqual([
        [10, 8, 4, 0],
        [4, 4],
      ]);
    },
  );
});

it('what lies in the decode worker’s own node has not come over the link, nor has it still to travel', async () => {
  const [pending, came]: number[][] = [[], []];
  const draws: Draws = { tells: [], given: [], travels: 4, transfers: [] };
  await handedOff(
    [
      ['d', state(2, 0)],
      ['d', state(2, 6)],
      ['p', state(0, 7)],
      ['d', state(2, 7)],
      ['p', { ...state(0, 10), finishReason: 'prefilled' }],
      ['d', state(2, 8)],
      ['d', begun],
      goesOn,
    ],
    pending,
    [],
    draws,
    came,
  );
  expect([pending, came]).toEqual([
    [4, 4, 4, 3, 2, 0, 0],
    [1, 1, 2],
  ]);
  expect(draws.transfers).toEqual([{ blocks: 4, lastBlocks: 3, tookS: seconds, afterS: seconds }]);
});

const seconds = expect.any(Number);
it.each<[string, Partial<Draws>, Step[], number[], Transfer[]]>([
  [
    'lacks what it was to hold',
    { travels: 4 },
    [
      ['p', state(0, 7)],
      ['d', state(2, 6)],
    ],
    [4, 4, 4, 0],
    [],
  ],
  [
    'has blocks of two prefill workers',
    { another: 10 },
    [
      ['p', state(0, 4)],
      ['d', state(2, 4)],
      ['p', { ...state(0, 4), finishReason: 'prefilled' }],
      ['p', state(0, 10)],
    ],
    [10, 8, 6, 6, 0],
    [],
  ],
  [
    'has all blocks of the second prefill worker',
    { another: 10 },
    [
      ['p', { ...state(0, 0), finishReason: 'prefilled' }],
      ['p', state(0, 10)],
    ],
    [10, 8, 8, 0],
    [{ blocks: 8, lastBlocks: 8, tookS: seconds, afterS: seconds }],
  ],
  [
    'waits for a second prefill worker that has its node',
    { another: 0 },
    [
      ['d', state(2, 4)],
      ['p', { ...state(0, 4), finishReason: 'prefilled' }],
      ['p', state(0, 10)],
    ],
    [10, 8, 6, 0, 0],
    [],
  ],
])(
  'what came measures the link where nothing else was waited for: the decode side %s',
  async (_, more, steps, left, measured) => {
    const pending: number[] = [];
    const draws: Draws = { tells: [], given: [], transfers: [], ...more };
    await handedOff(
      [['d', state(2, 0)], ...steps, ['p', { ...state(0, 10), finishReason: 'prefilled' }], ['d', begun]],
      pending,
      [],
      draws,
      [],
      () => {
        expect([pending, draws.transfers]).toEqual([left, measured]);
      },
    );
  },
);

it.each<[string, Step[]]>([
  ['has waited as long as it does', [['p', 'cancelled']]],
  ['is told to go on alone', [['p', { ...state(0, 4), finishReason: 'prefilled' }]]],
])('nothing travels any more once the decode side %s, however long it computes the rest', async (_, steps) => {
  const [pending, came]: number[][] = [[], []];
  const draws: Draws = { tells: [], given: [], deadlineMs: steps[0]![1] === 'cancelled' ? 20 : 60_000 };
  await handedOff(
    [
      ['d', state(0, 0)],
      ['p', state(0, 4)],
      ['d', state(0, 2)],
      ...steps,
      ['d', state(0, 3)], // it was on its way
    ],
    pending,
    [],
    draws,
    came,
    () => {
      expect([pending, came]).toEqual([
        [10, 10, 8, 0],
        [2, 1],
      ]);
    },
  );
});

it('blocks that came before all were computed are hidden, those that came later are not', async () => {
  const told = await handedOff([
    ['d', state(2, 0)],
    ['p', state(0, 4)],
    ['d', state(2, 4)],
    ['p', state(0, 7)],
    ['d', state(2, 6)],
    ['p', { ...state(0, 10), finishReason: 'prefilled' }],
    ['d', state(2, 9)],
    ['d', first(160)],
  ]);
  expect(told).toEqual([[2, 8, 4]]);
});

it('nothing is hidden where a prefill worker held all, nor where the decode worker says nothing of what comes', async () => {
  const told = await handedOff([
    ['d', state(0, 0)],
    ['p', { ...state(0, 10), finishReason: 'prefilled' }],
    ['d', state(0, 9)],
    ['d', first(160)],
  ]);
  expect(told).toEqual([[0, 10, 0]]);
});

it('no more is hidden than came, whatever a worker says', async () => {
  const told = await handedOff([
    ['d', state(0, 0)],
    ['d', state(0, 1_000)],
    ['p', { ...state(0, 10), finishReason: 'prefilled' }],
    ['d', first(48)],
  ]);
  expect(told.at(-1)).toEqual([0, 3, 3]);
});

it('says what the time to the first token went by, as both workers and its own clock know it', async () => {
  const parts: Took[] = [];
  const cache = { promptTokens: 161, cachedTokens: 0, tokensByTier: {}, queueUs: 7_000, loadUs: 0, prefillUs: 90_000 };
  const token = first(160);
  await handedOff(
    [
      ['d', state(2, 0)],
      ['p', state(0, 4)],
      ['p', { ...state(0, 10), finishReason: 'prefilled', cache }],
      ['d', state(2, 10)],
      ['d', { ...token, cache: { ...token.cache!, tailUs: 0 } }],
    ],
    [],
    parts,
  );
  expect(parts).toHaveLength(1);
  const { admitUs, transferUs, ...told } = parts[0]!;
  expect(told).toEqual({ isEarly: false, queueUs: 7_000, prefillUs: 90_000, tailUs: 0 });
  for (const us of [admitUs, transferUs]) expect(Number.isInteger(us) && us >= 0 && us < 60e6).toBe(true);
});

const computed = { ...first(0).cache!, queueUs: 7_000, prefillUs: 90_000 };
const begun = { ...first(160), finishReason: '', cache: { ...first(160).cache!, tailUs: 0 } };
const goesOn: Step = ['d', { tokenIds: [2], finishReason: 'length' }];
it.each<[string, Step, Step, Step]>([
  ['its end', ['p', state(0, 10)], ['d', begun], ['p', { finishReason: 'prefilled', cache: computed }]],
  ['its token', ['p', state(0, 10)], ['d', begun], ['p', { tokenIds: [1], cache: computed }]],
  [
    'its last blocks',
    ['p', state(0, 4)],
    ['d', begun],
    ['p', { ...state(0, 10), finishReason: 'prefilled', cache: computed }],
  ],
])('says so, too, where the first token overtakes what the prefill side says last: %s', async (_, ...steps) => {
  const parts: Took[] = [];
  const draws: Draws = { tells: [], given: [] };
  await handedOff([['d', state(2, 0)], ...steps, goesOn], [], parts, draws);
  const said = { isEarly: false, queueUs: 7_000, prefillUs: 90_000, tailUs: 0 };
  expect([parts, draws.given]).toEqual([[expect.objectContaining(said)], [[1], [2]]]);
});

it.each<[string, Step]>([
  ['computes on is cancelled', ['p', 'cancelled']],
  ['ends with less falls short of nothing', ['p', { ...state(0, 6), finishReason: 'prefilled' }]],
])('the first token is here: a prefill worker that %s', async (_, step) => {
  const parts: Took[] = [];
  const told = await handedOff([['d', state(2, 0)], ['p', state(0, 4)], ['d', begun], step, goesOn], [], parts);
  expect([told, parts]).toEqual([[[2, 8, 0]], []]);
});

it('the decode side has waited as long as it does: the prefill worker is cancelled before the first token is here', async () => {
  const draws: Draws = { tells: [], given: [], deadlineMs: 20 };
  const steps: Step[] = [
    ['d', state(0, 0)],
    ['p', state(0, 4)],
    ['p', 'cancelled'],
    ['d', first(64)],
  ];
  // Nobody else is asked: what is told is that the decode side computes the rest.
  expect(await handedOff(steps, [], [], draws)).toEqual([['decode-alone'.length], [0, 4, 0]]);
  expect(draws.given).toEqual([[1]]);
});

it('says nothing of what did not come as it should', async () => {
  const parts: Took[] = [];
  await handedOff(
    [
      ['d', state(2, 0)],
      ['p', { ...state(0, 4), finishReason: 'prefilled' }],
      ['d', first(64)],
    ],
    [],
    parts,
  );
  expect(parts).toEqual([]);
});

const drawn = async (...events: Parameters<typeof handedOff>[0]): Promise<Draws> => {
  const of: Draws = { tells: [], given: [] };
  await handedOff(events, [], [], of);
  return of;
};
const has = (tokenIds: number[], finishReason = ''): Partial<GenerateEvent> => ({ tokenIds, finishReason });

it('the decode side is told the prefill side’s token, once, and what it goes on with is given without it', async () => {
  const ends = { ...state(0, 10), finishReason: 'prefilled' };
  const last = { ...first(160), tokenIds: [1, 2] };
  expect(await drawn(['d', state(0, 0)], ['p', has([1])], ['p', has([1])], ['p', ends], ['d', last])).toEqual({
    ...{ tells: [[0, 'r', 1]], given: [[1], [2]] },
  });
});

it('it is not told of a token that ends the answer, nor of one that it had first', async () => {
  expect(await drawn(['d', state(0, 0)], ['p', has([1], 'stop')])).toEqual({ tells: [], given: [[1]] });
  const begun = { ...first(160), finishReason: '' };
  expect(await drawn(['d', state(0, 0)], ['d', begun], ['p', has([1])], ['d', has([2], 'length')])).toEqual({
    ...{ tells: [], given: [[1], [2]] },
  });
});

it('the decode side dies while the first token is being taken: what it said behind it comes from the next worker alone', async () => {
  let take = (): void => {};
  const taken = new Promise<void>((resolve) => {
    take = resolve;
  });
  const draws: Draws = { tells: [], given: [], taken };
  const both: Step = ['d', { ...begun, tokenIds: [1, 2] }];
  const run = handedOff(
    [['d', state(0, 0)], ['p', { ...state(0, 10), tokenIds: [1] }], both, ['d', 'dies']],
    [],
    [],
    draws,
  );
  await expect(run).rejects.toMatchObject({ code: 'DISCONNECTED' });
  take();
  await new Promise(setImmediate);
  expect(draws.given).toEqual([[1]]);
});

const told64 = { ...first(64), finishReason: '' };
it.each<[string, boolean[], Step[]]>([
  [
    'the prefill side gave the first token: until the next',
    [true],
    [
      ['p', { ...state(0, 10), tokenIds: [1] }],
      ['d', begun],
    ],
  ],
  [
    'and whatever fell short behind it',
    [true],
    [
      ['p', { ...state(0, 4), tokenIds: [1] }],
      ['d', told64],
    ],
  ],
  [
    'the decode side gives it: from the last block on',
    [false],
    [
      ['p', state(0, 10)],
      ['d', begun],
    ],
  ],
  [
    'the decode side had it before all was told',
    [],
    [
      ['p', state(0, 4)],
      ['d', begun],
    ],
  ],
  [
    'what fell short',
    [],
    [
      ['p', { ...state(0, 4), finishReason: 'prefilled' }],
      ['d', told64],
    ],
  ],
])('a pause behind the first token is told once: %s', async (_, told, steps) => {
  const draws: Draws = { tells: [], given: [], pauses: [] };
  await handedOff([['d', state(0, 0)], ...steps, ['d', has([2])], ['d', has([3], 'length')]], [], [], draws);
  expect(draws.pauses).toEqual(told);
});
