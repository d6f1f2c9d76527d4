import { expect, it } from 'vitest';
import { native } from '../index.ts';
import { LongestTurn, threadUse } from './longest-turn.ts';
import { dearPagesMs } from './new-page.ts';

/** New pages to this process, each written to once. */
const fill = (count: number): Buffer => {
  const fresh = Buffer.allocUnsafeSlow(Math.max(count * 4096, 64 << 20));
  return fresh.fill(1, 0, count * 4096);
};
const spin = (ms: number): void => {
  const end = native.threadCpuMs() + ms;
  while (native.threadCpuMs() < end);
};
const during = (work: () => unknown): [ReturnType<typeof threadUse>, ReturnType<typeof threadUse>] => {
  const before = threadUse();
  work();
  return [before, threadUse()];
};

it('tells the time and the new pages of this thread alone', () => {
  const [before, after] = during(() => fill(2000));
  expect(after.pages - before.pages).toBeGreaterThanOrEqual(2000);
  // What an engine touches beside it (a larger heap, code that it compiles) is not in all of several.
  const pages = [0, 1, 2, 3, 4].map(() => {
    const [idle, still] = during(() => spin(20));
    expect(still.cpuMs - idle.cpuMs).toBeGreaterThanOrEqual(20);
    return still.pages - idle.pages;
  });
  expect(Math.min(...pages)).toBeLessThan(500);
});

it('is the longest, by what it computed', () => {
  const longest = new LongestTurn();
  expect(longest.ms).toBe(0);
  longest.add({ cpuMs: 10, pages: 0 }, { cpuMs: 30, pages: 100_000 });
  expect(longest.ms).toBe(20);
  longest.add({ cpuMs: 30, pages: 0 }, { cpuMs: 190, pages: 0 });
  longest.add({ cpuMs: 190, pages: 0 }, { cpuMs: 250, pages: 0 });
  expect(longest.ms).toBe(160);
});

it('takes off what new pages cost above the usual', () => {
  const longest = new LongestTurn((pages) => pages * 0.01);
  longest.add({ cpuMs: 0, pages: 0 }, { cpuMs: 90, pages: 5000 });
  expect(longest.ms).toBe(40);
  longest.add({ cpuMs: 90, pages: 5000 }, { cpuMs: 135, pages: 10_000 });
  expect(longest.ms).toBe(45);
  longest.add({ cpuMs: 135, pages: 0 }, { cpuMs: 235, pages: 1000 });
  expect(longest.ms).toBe(90);
});

it('a page costs what this machine says, and no less than nothing', () => {
  const ms = dearPagesMs(1000);
  expect(ms).toBeGreaterThanOrEqual(0);
  expect(ms).toBeLessThan(1000);
});
