/** Many requests by one call, over a scripted call: who is told what, when the call breaks, and when one of them does not read. */
import { EventEmitter } from 'node:events';
import type { GenerateEvent, GenerateOrder, NumberedEvent } from '@kvtier/wire/grpc';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { mayShare, SharedCall, type Underway } from './shared-call.ts';
import { cacheUse, event, greedy } from './testing/scripted-engine.ts';

class ScriptedCall extends EventEmitter {
  readonly orders: GenerateOrder[] = [];
  cancelled = false;
  paused = false;
  write(order: GenerateOrder): boolean {
    expect(this.cancelled).toBe(false);
    this.orders.push(order);
    return true;
  }
  cancel(): void {
    this.cancelled = true;
  }
  pause(): void {
    this.paused = true;
  }
  resume(): void {
    this.paused = false;
  }
  come(...events: [number, Partial<GenerateEvent>][]): void {
    const all: NumberedEvent[] = events.map(([number, fields]) => ({ number, event: event(fields) }));
    this.emit('data', { events: all });
  }
}

class Reader {
  readonly events: GenerateEvent[] = [];
  readonly failures: unknown[] = [];
  underway!: Underway;
  onEvent: (event: GenerateEvent) => void = () => {};
  readonly told = {
    event: (each: GenerateEvent) => {
      this.events.push(structuredClone(each));
      this.onEvent(each);
    },
    failed: (why: unknown) => void this.failures.push(why),
  };
  get tokens(): number[] {
    return this.events.flatMap(({ tokenIds }) => tokenIds);
  }
}

let brokenCount = 0;
function open(): { call: ScriptedCall; shared: SharedCall; begin: (maxTokens?: number) => Reader } {
  brokenCount = 0;
  const call = new ScriptedCall();
  const onBroken = (): void => void brokenCount++;
  const shared = new SharedCall(call as never, (ended) => `failed by ${(ended as { code: number }).code}`, onBroken);
  const begin = (maxTokens = 1e6): Reader => {
    const reader = new Reader();
    reader.underway = shared.begin(greedy({ requestId: 'r', maxTokens }), reader.told);
    return reader;
  };
  return { call, shared, begin };
}
const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

it('each is told its own events, in their order; of a request that left nothing is told, and the engine is told once', () => {
  const { call, begin } = open();
  const [a, b] = [begin(), begin()];
  call.come([1, { tokenIds: [1], cache: cacheUse() }], [2, { tokenIds: [2] }]);
  b.underway.leave(false);
  b.underway.leave(false);
  call.come([2, { tokenIds: [3] }], [1, { tokenIds: [4], finishReason: 'stop' }], [77, { tokenIds: [5] }]);
  a.underway.leave(true);
  expect(a.events).toEqual([
    event({ tokenIds: [1], cache: cacheUse() }),
    event({ tokenIds: [4], finishReason: 'stop' }),
  ]);
  expect(b.tokens).toEqual([2]);
  expect(call.orders.map(({ number, begin: begun }) => [number, begun !== undefined])).toEqual([
    [1, true],
    [2, true],
    [2, false],
  ]);
});

it('one that takes no more holds no other; what came meanwhile it is told as one, with the end apart from no token', () => {
  const { call, begin } = open();
  const [slow, quick] = [begin(), begin()];
  call.come([1, { tokenIds: [0] }]);
  slow.underway.pause();
  for (let token = 1; token <= 500; token++) call.come([1, { tokenIds: [token] }], [2, { tokenIds: [token] }]);
  call.come([1, { tokenIds: [501], finishReason: 'length' }]);
  expect(quick.events).toHaveLength(500);
  expect(slow.events).toHaveLength(1);
  expect(call.paused).toBe(false);
  slow.underway.resume();
  expect(slow.events).toHaveLength(2);
  expect(slow.events[1]!.finishReason).toBe('length');
  expect(slow.tokens).toEqual(Array.from({ length: 502 }, (_, i) => i));
});

it('for one that takes no more no more is kept than it asked for: an engine that says more fails it, and it alone', () => {
  const { call, begin } = open();
  const [slow, quick] = [begin(100), begin(100)];
  slow.told.failed = (why) => {
    slow.failures.push(why);
    slow.underway.leave(false);
  };
  slow.underway.pause();
  // So many beside the tokens may be other events.
  for (let token = 0; token < 1_123; token++) call.come([1, { tokenIds: [token] }]);
  expect(slow.failures).toEqual([]);
  call.come([1, { tokenIds: [-1, -2] }], [1, { tokenIds: [-3] }], [2, { tokenIds: [7] }]);
  expect(slow.failures).toMatchObject([
    { code: 'PROTOCOL', message: expect.stringMatching(/^engine: gave more tokens/) },
  ]);
  expect([slow.tokens, quick.tokens]).toEqual([[], [7]]);
  expect(call.orders.at(-1)).toEqual({ number: 1 });
  // What was told makes room again.
  quick.underway.pause();
  for (let round = 0; round < 50; round++) {
    for (let token = 0; token < 99; token++) call.come([2, { tokenIds: [token] }]);
    quick.underway.resume();
    quick.underway.pause();
  }
  expect([quick.tokens.length, quick.failures]).toEqual([1 + 50 * 99, []]);
});

it('a failure is told by itself, behind the tokens that came before it', () => {
  const { call, begin } = open();
  const slow = begin();
  slow.underway.pause();
  const failure = { code: 'IO', message: 'gone', retry: false } as never;
  call.come([1, { tokenIds: [1] }], [1, { tokenIds: [2] }], [1, { failure }]);
  slow.underway.resume();
  expect(slow.events).toEqual([event({ tokenIds: [1, 2] }), event({ failure })]);
});

it('a message for very many is told in several turns, and nothing more is read while very many wait', async () => {
  const { call, begin } = open();
  const readers = Array.from({ length: 1_400 }, () => begin());
  call.come(...readers.map((_, i): [number, Partial<GenerateEvent>] => [i + 1, { tokenIds: [i] }]));
  const told = (): number => readers.filter(({ events }) => events.length > 0).length;
  expect([told(), call.paused]).toEqual([128, true]);
  await turn();
  expect([told(), call.paused]).toEqual([256, true]);
  await turn();
  expect([told(), call.paused]).toEqual([384, false]);
  call.come([1, { tokenIds: [2_000] }]);
  while (told() < 1_400) await turn();
  await turn();
  expect(readers.map(({ tokens }) => tokens)).toEqual(readers.map((_, i) => (i === 0 ? [0, 2_000] : [i])));
});

it('a first event goes before all that wait for their turn, so many in a turn', async () => {
  const { call, begin } = open();
  const readers = Array.from({ length: 400 }, () => begin());
  const all = (token: number): [number, Partial<GenerateEvent>][] =>
    readers.map((_, i) => [i + 1, { tokenIds: [token, i] }]);
  call.come(...all(1));
  for (let turns = 0; turns < 4; turns++) await turn();
  call.come(...all(2));
  const late = Array.from({ length: 150 }, () => begin());
  late.forEach((_, i) => {
    call.come([401 + i, { tokenIds: [3] }], [401 + i, { tokenIds: [4] }]);
  });
  const told = (of: Reader[], tokens: number): number => of.filter((reader) => reader.tokens.length >= tokens).length;
  expect([told(readers, 4), told(late, 1), told(late, 2)]).toEqual([128, 128, 0]);
  await turn();
  expect([told(readers, 4), told(late, 1), told(late, 2)]).toEqual([234, 150, 0]);
  for (let turns = 0; turns < 3; turns++) await turn();
  expect(readers.map(({ tokens }) => tokens)).toEqual(readers.map((_, i) => [1, i, 2, i]));
  expect(late.map(({ tokens }) => tokens)).toEqual(late.map(() => [3, 4]));
});

it('of one message, the first events go first', () => {
  const { call, begin } = open();
  const order: number[] = [];
  const readers = [begin(), begin()];
  readers.forEach((reader, i) => {
    reader.onEvent = () => order.push(i);
  });
  call.come([1, { tokenIds: [1] }]);
  call.come([1, { tokenIds: [2] }], [1, { tokenIds: [3] }], [2, { tokenIds: [4] }]);
  expect(order).toEqual([0, 1, 0, 0]);
});

it('a call that breaks tells what has come, then the failure to all that are left, once', () => {
  const { call, shared, begin } = open();
  const readers = Array.from({ length: 200 }, () => begin());
  call.come(
    ...readers.map((_, i): [number, Partial<GenerateEvent>] => [
      i + 1,
      { tokenIds: [i], finishReason: i === 199 ? 'stop' : '' },
    ]),
  );
  readers[199]!.onEvent = () => readers[199]!.underway.leave(true);
  call.emit('error', { code: 14 });
  call.emit('status', { code: 14 });
  expect(readers.map(({ tokens }) => tokens)).toEqual(readers.map((_, i) => [i]));
  expect(readers[199]!.failures).toEqual([]);
  for (const { failures } of readers.slice(0, 199)) expect(failures).toEqual(['failed by 14']);
  expect([shared.broken, brokenCount]).toEqual([true, 1]);
  // Who leaves afterwards writes nothing.
  const before = call.orders.length;
  readers[0]!.underway.leave(false);
  expect(call.orders).toHaveLength(before);
});

it('a call that is cut is cancelled, and fails all with the reason given', () => {
  const { call, shared, begin } = open();
  const readers = [begin(), begin()];
  shared.cut('why');
  shared.cut('again');
  expect(call.cancelled).toBe(true);
  expect(readers.map(({ failures }) => failures)).toEqual([['why'], ['why']]);
});

it('requests that would hold up others, or break the call, do not share it', () => {
  expect(mayShare(greedy({ promptTokenIds: new Array(65_536).fill(1) as number[], seed: 2n ** 64n - 1n }))).toBe(true);
  const [long, seed] = [new Array(65_537).fill(1) as number[], 2n ** 64n];
  const others = [
    { promptTokenIds: long },
    { seed },
    { seed: -1n },
    { stopTokenIds: long },
    { cacheSalt: 'x'.repeat(4_097) },
  ];
  expect(others.map((part) => mayShare(greedy(part)))).toEqual(others.map(() => false));
});

const step = fc.oneof(
  { weight: 3, arbitrary: fc.record({ kind: fc.constant('begin' as const) }) },
  {
    weight: 8,
    arbitrary: fc.record({
      kind: fc.constant('come' as const),
      of: fc.array(fc.tuple(fc.nat(), fc.boolean()), { maxLength: 300 }),
    }),
  },
  {
    weight: 3,
    arbitrary: fc.record({
      kind: fc.constantFrom('pause' as const, 'resume' as const, 'leave' as const),
      which: fc.nat(),
    }),
  },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('turn' as const) }) },
);

it('whatever the order of things, each is told its own tokens: all that were sent, or up to when it left', async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
      const { call, begin } = open();
      const readers: Reader[] = [];
      const sent: number[][] = [];
      const finished = new Set<number>();
      const left = new Set<number>();
      let token = 0;
      for (const each of steps) {
        const at = 'which' in each && readers.length > 0 ? each.which % readers.length : undefined;
        if (each.kind === 'begin') {
          readers.push(begin());
          sent.push([]);
        } else if (each.kind === 'turn') await turn();
        else if (each.kind === 'come') {
          const events = each.of.flatMap(([which, isLast]): [number, Partial<GenerateEvent>][] => {
            const to = which % Math.max(1, readers.length);
            if (readers.length === 0 || finished.has(to)) return [];
            const ends = isLast && which % 7 === 0;
            if (ends) finished.add(to);
            sent[to]!.push(token);
            return [[to + 1, { tokenIds: [token++], finishReason: ends ? 'stop' : '' }]];
          });
          call.come(...events);
        } else if (at === undefined) continue;
        else if (each.kind === 'pause') readers[at]!.underway.pause();
        else if (each.kind === 'resume') readers[at]!.underway.resume();
        else {
          left.add(at);
          readers[at]!.underway.leave(false);
          readers[at]!.onEvent = () => expect.unreachable('told after it had left');
        }
      }
      for (let untold = token; untold > 0; untold -= 128) await turn();
      expect(call.paused).toBe(false);
      for (const { underway } of readers) underway.resume();
      readers.forEach((reader, at) => {
        if (left.has(at)) expect(reader.tokens).toEqual(sent[at]!.slice(0, reader.tokens.length));
        else expect(reader.tokens).toEqual(sent[at]);
        expect(reader.failures).toEqual([]);
      });
      expect(call.orders.filter(({ begin: begun }) => begun === undefined)).toHaveLength(left.size);
    }),
    { numRuns: 150 },
  );
});
