/** How far one look at those that wait goes. */
import { maxMedia } from '@kvtier/kv-index';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { LateBinding, lateBindingDefaults, type RoutedRequest, type WorkerState } from './index.ts';
import { requestOf as request, stateOf as state } from './testing/late-rig.ts';

const chance = (): number => 0.5;

/** Requests for worker 0, which is busy, and which see worker 1, too; the last one is for worker 1 alone, which is idle. */
function queue(picky: number, maxLooked = 64) {
  const late = new LateBinding<number>({ ...lateBindingDefaults, maxLooked });
  const requests = Array.from({ length: picky + 1 }, () => request());
  for (const [i, one] of requests.entries()) late.add(i, one, i, 100);
  const asked: number[] = [];
  const statesFor = (one: RoutedRequest): (WorkerState | undefined)[] => {
    const number = requests.indexOf(one);
    asked.push(number);
    return number === picky ? [undefined, state(0)] : [state(5_000), undefined];
  };
  const mayGo = (one: RoutedRequest): boolean => requests.indexOf(one) === picky;
  return { late, asked, statesFor, mayGo };
}

it('goes on where its time was over', () => {
  const { late, asked, statesFor } = queue(10);
  const take = (nowMs: number) => {
    let left = 3;
    return late.take(statesFor, nowMs, chance, { isOver: () => left-- === 0 });
  };
  for (let turn = 1; turn <= 3; turn++) {
    expect(take(50 + 20 * turn)).toBe(undefined);
    expect([late.isMidway, asked]).toEqual([true, Array.from({ length: 3 * turn }, (_, i) => i)]);
  }
  expect(take(130)).toMatchObject({ item: 10, worker: 1 });
  expect(take(130)).toBe(undefined);
  expect(late.size).toBe(10);
});

it('leaves out who has gone meanwhile, and begins anew where that is long ago', () => {
  const { late, asked, statesFor } = queue(4);
  const takeOf = (count: number, nowMs: number): number | undefined => {
    let left = count;
    return late.take(statesFor, nowMs, chance, { isOver: () => left-- === 0 })?.item;
  };
  expect(takeOf(2, 100)).toBe(undefined);
  late.remove(2);
  expect(takeOf(1, 110)).toBe(undefined);
  expect(takeOf(1, 500)).toBe(undefined);
  expect(asked).toEqual([0, 1, 3, 0]);
  expect(takeOf(3, 510)).toBe(4);
});

it('goes on behind who was given: those in front were looked at', () => {
  const { late, asked, statesFor } = queue(8);
  const before = (): number => asked.filter((number) => number === 0).length;
  const more = request();
  late.add(99, more, 9, 100);
  const withMore = (one: RoutedRequest) => (one === more ? [undefined, state(50)] : statesFor(one));
  expect(late.take(withMore, 100, chance)).toMatchObject({ item: 8 });
  const looked = asked.length;
  expect(late.take(withMore, 100, chance)).toMatchObject({ item: 99 });
  expect([before(), asked.length - looked]).toEqual([1, 0]);
});

it('considers only those that can go somewhere, so that others do not take their place', () => {
  const { late, statesFor, mayGo } = queue(6, 4);
  expect(late.take(statesFor, 100, chance)).toBe(undefined);
  expect(late.take(statesFor, 101, chance, { mayGo })).toMatchObject({ item: 6, worker: 1 });
});

/** Busy, but for a little room: ten blocks. */
const almostFull = (): WorkerState => ({ ...state(0), running: 1, usedBlocks: 9_990 });

it('keeps of a look that was cut the claims of those that wait still, and no others', () => {
  const taken = (leaves: boolean): number | undefined => {
    const late = new LateBinding<number>();
    // All need the same, but for the first one, which has no room where the last one would have it.
    const requests = [5_000, 100, 100, 100].map((tokens) => request(tokens));
    for (const [i, one] of requests.entries()) late.add(i, one, i, 100);
    const statesFor = (one: RoutedRequest): (WorkerState | undefined)[] =>
      one === requests[0] || one === requests[3] ? [almostFull(), undefined] : [undefined, state(5_000)];
    let left = 2;
    expect(late.take(statesFor, 100, chance, { isOver: () => left-- === 0 })).toBe(undefined);
    if (leaves) late.remove(0);
    return late.take(statesFor, 110, chance)?.item;
  };
  expect([taken(true), taken(false)]).toEqual([3, undefined]);
});

it('begins anew with who comes when all that were looked at have left', () => {
  const { late, statesFor } = queue(3);
  let left = 2;
  expect(late.take(statesFor, 100, chance, { isOver: () => left-- === 0 })).toBe(undefined);
  for (let i = 0; i <= 3; i++) late.remove(i);
  expect(late.isMidway).toBe(false);
  late.add(9, request(), 200, 100);
  expect(late.take(() => [state(0), state(0)], 200, chance)).toMatchObject({ item: 9 });
});

it('asks anew before anybody goes, also to a worker beside the one that has no room', () => {
  const late = new LateBinding<string>();
  const first = request(16);
  const one: RoutedRequest = { ...request(160), keys: new Int32Array(20) };
  const byMedium = new Int32Array(maxMedia);
  byMedium[0] = 9;
  const full = { ...almostFull(), usedBlocks: 10_000, freedBlocksPerS: 3_000, tokensAhead: 50 };
  const holder = { ...full, match: { blocks: 9, byMedium } };
  const beside = { ...state(50), running: 1 };
  late.add('first', { ...first, maxTokens: 159_900 }, 0, 10); // asked for in each look: it comes first
  late.add('one', one, 1, 100);
  let isAllowed = true;
  const statesFor = (asked: RoutedRequest) =>
    asked === one
      ? [holder, isAllowed ? beside : undefined, undefined]
      : [full, { ...beside, usedBlocks: 50 }, undefined];
  const given: (string | undefined)[] = [];
  for (let ms = 100; ms < 340; ms += 10) {
    given.push(late.take(statesFor, ms, chance)?.item);
    isAllowed = false;
  }
  expect(new Set(given)).toEqual(new Set([undefined]));
});

it('counts as waiting for room only the time in which another worker was open', () => {
  const given = (isClosed: 'never' | 'said' | 'seen' | 'left out'): number | undefined => {
    const late = new LateBinding<string>();
    const one: RoutedRequest = { ...request(160), keys: new Int32Array(20) };
    const byMedium = new Int32Array(maxMedia);
    byMedium[0] = 9;
    const full = { ...almostFull(), usedBlocks: 10_000, freedBlocksPerS: 3_000, tokensAhead: 50 };
    const holder = { ...full, match: { blocks: 9, byMedium } };
    late.add('one', one, 0, 100);
    const open = () => [holder, { ...state(50), running: 1 }];
    for (let ms = 10; ms < 2_000; ms += 10) {
      const isOpen = ms < 20 || ms > 800 || isClosed === 'never';
      if (!isOpen && isClosed === 'said') late.closed(ms);
      else {
        const states = isOpen || isClosed === 'left out' ? open : () => [{ ...holder, tokensAhead: 900 }, state(900)];
        const limits = isOpen || isClosed === 'seen' ? {} : { mayGo: () => false };
        if (late.take(states, ms, chance, limits) !== undefined) return ms;
      }
    }
    return undefined;
  };
  const afterMs = given('never')! - 10;
  expect(afterMs).toBeGreaterThan(50);
  for (const how of ['said', 'seen', 'left out'] as const) expect(given(how)! - 810).toBe(afterMs);
});

it('knows what the one needs that needs the fewest blocks, beside those that a worker was last known to have', () => {
  const count = fc.nat(20);
  const step = fc.record({
    ...{ tokens: fc.integer({ min: 1, max: 500 }), held: count, later: count },
    ...{ leaves: fc.nat(9), looks: fc.boolean() },
  });
  fc.assert(
    fc.property(fc.array(step, { minLength: 1, maxLength: 30 }), (steps) => {
      const late = new LateBinding<number>();
      const waiting = new Map<number, { readonly one: RoutedRequest; needs: number }>();
      const blocksOf = ({ tokens }: RoutedRequest): number => Math.ceil((tokens + 1) / 16);
      for (const [i, { tokens, held, later, leaves, looks }] of steps.entries()) {
        const one = request(tokens);
        late.add(i, one, i, tokens, held);
        waiting.set(i, { one, needs: blocksOf(one) - held });
        const gone = [...waiting.keys()][leaves];
        if (gone !== undefined) {
          late.remove(gone);
          waiting.delete(gone);
        }
        const tells = (asked: RoutedRequest): WorkerState[] => {
          const entry = [...waiting.values()].find((other) => other.one === asked)!;
          entry.needs = blocksOf(asked) - later;
          return [state(9_999, later), state(9_999)];
        };
        if (looks) expect(late.take(tells, i, chance)).toBe(undefined);
        const all = [...waiting.values()].map(({ needs }) => needs);
        expect(late.leastBlocks).toBe(all.length === 0 ? undefined : Math.min(...all));
      }
    }),
  );
});
