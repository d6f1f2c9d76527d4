import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { type Looked, QueueLooks } from './queue-looks.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['performance', 'setTimeout', 'clearTimeout', 'setImmediate', 'clearImmediate'] });
});
afterEach(() => {
  vi.useRealTimers();
});

/** Looks of which each takes so long; when they began, and what they found. */
function rig(tookMs: number, found: () => Partial<Looked> = () => ({})) {
  const at: number[] = [];
  const state = { opens: false, isWanted: true };
  const beginMs = performance.now();
  const looks = new QueueLooks({
    isWanted: () => state.isWanted,
    glance: () => state.opens,
    look: () => {
      at.push(performance.now() - beginMs);
      vi.advanceTimersByTime(tookMs);
      state.opens = false;
      return { hasGiven: false, isCut: false, isMidway: false, ...found() };
    },
  });
  /** News in each millisecond. */
  const run = (ms: number): void => {
    const untilMs = performance.now() + ms;
    while (performance.now() < untilMs) {
      looks.wake();
      vi.advanceTimersByTime(1);
    }
  };
  return { at, state, looks, run };
}

/** The shortest time from one look to the next; and no other is longer by more than the news takes. */
function gapsOf(at: readonly number[]): { readonly least: number; readonly isShort: boolean } {
  const gaps = at.slice(1).map((ms, i) => ms - at[i]!);
  const least = Math.min(...gaps);
  return { least: Math.floor(least / 5) * 5, isShort: gaps.length > 3 && Math.max(...gaps) <= least + 4 };
}

it('looks every 2 ms while something comes of it', () => {
  const { at, run } = rig(0, () => ({ hasGiven: true }));
  run(9);
  expect(at).toEqual([0, 2, 4, 6, 8]);
});

it('pauses for four times as long as a look took that gave nothing, and no longer than 25 ms', () => {
  const shortly = rig(2);
  shortly.run(100);
  expect(gapsOf(shortly.at)).toEqual({ least: 10, isShort: true });
  const long = rig(50);
  long.run(400);
  expect(gapsOf(long.at)).toEqual({ least: 75, isShort: true });
});

it('a worker that opens ends the pause, but for as long as the look took', () => {
  const { at, run, state } = rig(5);
  run(7);
  state.opens = true;
  run(2);
  expect(at.length).toBe(1);
  run(4);
  expect(at.length).toBe(2);
  run(8);
  expect(at.length).toBe(2);
  state.opens = true;
  run(3);
  expect(at.length).toBe(3);
});

it('goes on with what was cut without any news', () => {
  let left = 3;
  const { at, looks } = rig(5, () => ({ isCut: --left > 0 }));
  looks.wake();
  vi.advanceTimersByTime(500);
  expect(at).toEqual([0, 25, 50]);
});

it('pauses no longer than that either where a worker has opened, however long the look took', () => {
  const { at, run, state } = rig(800);
  run(802);
  state.opens = true;
  run(40);
  expect(at.length).toBe(2);
  expect(at[1]! - at[0]!).toBeLessThan(830);
});

it.each([true, false])('looks once more after one that was cut, where there was news meanwhile: %s', (isNews) => {
  let left = 3;
  const { at, looks } = rig(1, () => ({ isCut: --left > 0, isMidway: left > 0 }));
  looks.wake();
  vi.advanceTimersByTime(3);
  if (isNews) looks.wake();
  vi.advanceTimersByTime(500);
  expect(at.length).toBe(isNews ? 4 : 3);
});

it('remembers what was cut and cannot go on now: news is for those, and then for all', () => {
  const found: Partial<Looked>[] = [{ isCut: true, isMidway: true }, { isMidway: true }, {}, {}];
  const { at, looks } = rig(1, () => found[at.length - 1]!);
  looks.wake();
  vi.advanceTimersByTime(100);
  expect(at.length).toBe(2);
  looks.wake();
  vi.advanceTimersByTime(100);
  expect(at.length).toBe(4);
});

it('does nothing when nobody waits, and nothing after its end', () => {
  const { at, looks, run, state } = rig(1);
  state.isWanted = false;
  run(10);
  state.isWanted = true;
  looks.wake();
  looks.close();
  run(10);
  expect(at).toEqual([]);
});
