/** Requests for which no slot may be lent: first come first served, in a bounded line, never for long. */
import fc from 'fast-check';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { LendingLine } from './lending-line.ts';
import type { PeerRequest } from './peer-loops.ts';

const request = (token: number): PeerRequest => ({ token, connection: 1, slotBytes: 0, namespaceKey: '', hash: '' });
const tokens = (requests: readonly PeerRequest[]): number[] => requests.map(({ token }) => token);

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

it('those in front go as far as there is room, and nobody overtakes a large one', () => {
  const line = new LendingLine(() => expect.unreachable());
  for (const [token, bytes] of [40, 40, 100, 10].entries()) expect(line.add(request(token), bytes)).toBe(true);
  expect(tokens(line.take(90, false))).toEqual([0, 1]);
  expect(tokens(line.take(99, false))).toEqual([]);
  expect(tokens(line.take(99, true))).toEqual([2]);
  expect(tokens(line.take(99, true))).toEqual([3]);
  expect(tokens(line.take(99, true))).toEqual([]);
});

it('who waited for the limit is given up, and those behind have their own time', () => {
  const gone: number[] = [];
  const line = new LendingLine(({ token }) => gone.push(token), { limitMs: 500 });
  line.add(request(1), 1);
  vi.advanceTimersByTime(300);
  line.add(request(2), 1);
  vi.advanceTimersByTime(199);
  expect(gone).toEqual([]);
  vi.advanceTimersByTime(2);
  expect(gone).toEqual([1]);
  vi.advanceTimersByTime(300);
  expect(gone).toEqual([1, 2]);
  expect([line.length, vi.getTimerCount()]).toEqual([0, 0]);
});

it('a full line takes nobody in, and one that has ended gives all up', () => {
  const gone: number[] = [];
  const line = new LendingLine(({ token }) => gone.push(token), { maxWaiting: 2 });
  expect([1, 2, 3].map((token) => line.add(request(token), 1))).toEqual([true, true, false]);
  line.end();
  expect([gone, line.add(request(4), 1), line.length, vi.getTimerCount()]).toEqual([[1, 2], false, 0, 0]);
});

it('whatever comes in whatever order, each is taken or given up once, in the order in which it came', () => {
  const step = fc.oneof(
    fc.record({ add: fc.nat(50) }),
    fc.record({ take: fc.nat(120), always: fc.boolean() }),
    fc.record({ wait: fc.nat(400) }),
  );
  fc.assert(
    fc.property(fc.array(step, { maxLength: 100 }), (steps) => {
      const told: number[] = [];
      const line = new LendingLine(({ token }) => told.push(token), { limitMs: 500, maxWaiting: 10 });
      const sizes: number[] = [];
      for (const what of steps) {
        if ('add' in what) {
          if (line.add(request(sizes.length), what.add)) sizes.push(what.add);
        } else if ('take' in what) {
          const taken = tokens(line.take(what.take, what.always));
          const bytes = taken.reduce((sum, token) => sum + sizes[token]!, 0);
          expect(bytes <= what.take || (what.always && taken.length === 1)).toBe(true);
          told.push(...taken);
        } else vi.advanceTimersByTime(what.wait);
      }
      vi.advanceTimersByTime(501);
      expect(told).toEqual(sizes.map((_, token) => token));
      expect(vi.getTimerCount()).toBe(0);
    }),
  );
});
