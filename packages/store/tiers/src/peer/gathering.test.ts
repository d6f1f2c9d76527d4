/** Blocks of one read are told together, and nobody waits for a read's last one. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Gathering } from './gathering.ts';

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

const [one, other] = [{}, {}];

function gathering() {
  const turns: number[][] = [];
  let now: number[] = [];
  const told = new Gathering<string>((tag) => void now.push(tag));
  /** What was told since the last look. */
  const look = (): number[] => {
    const tags = now;
    now = [];
    if (tags.length > 0) turns.push(tags);
    return tags;
  };
  const came = (read: object, tag: number, isGood = true): number[] => {
    told.came(read, tag, isGood ? 'ready' : 'failed', isGood);
    told.turnOver();
    return look();
  };
  return { told, came, look };
}

it('blocks that come one after another are told together', () => {
  const { told, came, look } = gathering();
  told.asked(one, 4);
  expect([came(one, 0), came(one, 1), came(one, 2)]).toEqual([[], [], []]);
  vi.advanceTimersByTime(7);
  expect(look()).toEqual([]);
  vi.advanceTimersByTime(1);
  expect(look()).toEqual([0, 1, 2]);
  expect(vi.getTimerCount()).toBe(0);
});

it('the last one of a read is told at once, with all before it, whatever else is under way', () => {
  const { told, came } = gathering();
  told.asked(one, 2);
  told.asked(other, 3);
  expect([came(other, 10), came(one, 0), came(one, 1)]).toEqual([[], [], [10, 0, 1]]);
  expect(vi.getTimerCount()).toBe(0);
  expect([came(other, 11), came(other, 12)]).toEqual([[], [11, 12]]);
});

it('a block alone is told at once', () => {
  const { told, came } = gathering();
  told.asked(one, 1);
  expect(came(one, 7)).toEqual([7]);
});

it('one that failed is told at once: it is sought elsewhere', () => {
  const { told, came } = gathering();
  told.asked(one, 4);
  expect([came(one, 0), came(one, 1, false)]).toEqual([[], [0, 1]]);
});

it('of a fast peer no more than sixteen wait', () => {
  const { told, came } = gathering();
  told.asked(one, 100);
  const told16 = Array.from({ length: 16 }, (_, tag) => came(one, tag)).at(-1);
  expect(told16).toHaveLength(16);
});

it('what waits when all is closed is told then', () => {
  const { told, came, look } = gathering();
  told.asked(one, 4);
  came(one, 0);
  told.flush();
  expect(look()).toEqual([0]);
  expect(vi.getTimerCount()).toBe(0);
});
