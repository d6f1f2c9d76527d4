import { expect, it } from 'vitest';
import { RateMeter } from './rate.ts';

it('reads that overlap count once in time: the rate is the tier’s', () => {
  const meter = new RateMeter({ bytesPerUs: 1, latencyUs: 0 });
  for (let nowUs = 0; nowUs < 100_000; nowUs += 1000) {
    meter.start(nowUs);
    meter.start(nowUs);
    meter.end(nowUs + 500, nowUs, 1000);
    meter.end(nowUs + 1000, nowUs, 1000);
  }
  expect(meter.bytesPerUs).toBeCloseTo(2, 1);
});

it('a failed read says nothing; an estimate adds latency and the queue ahead', () => {
  const meter = new RateMeter({ bytesPerUs: 2, latencyUs: 100 });
  meter.start(0);
  meter.end(1_000_000, 0, 0);
  expect(meter.estimateUs(1000, 0)).toBe(600);
  expect(meter.estimateUs(1000, 2000)).toBe(1600);
  expect(meter.estimateUs(0, 2000)).toBe(0);
});

/** One read after the other of a tier that waits, and then gives so much a microsecond. */
function reads(meter: RateMeter, sizes: readonly number[], bytesPerUs: number, waitUs: number, fromUs = 0): number {
  let nowUs = fromUs;
  for (const bytes of sizes) {
    const startUs = nowUs;
    meter.start(startUs);
    nowUs += waitUs + bytes / bytesPerUs;
    meter.end(nowUs, startUs, bytes);
    nowUs += 1000;
  }
  return nowUs;
}

it('the first read of some size settles what was guessed', () => {
  const meter = new RateMeter({ bytesPerUs: 1000, latencyUs: 300 });
  reads(meter, [8 << 20], 117, 500);
  expect(meter.bytesPerUs / 117).toBeCloseTo(1, 1);
  const small = new RateMeter({ bytesPerUs: 1000, latencyUs: 300 });
  reads(small, [64 << 10], 117, 300);
  expect(small.bytesPerUs).toBeGreaterThan(300); // one small read says little
});

it('many small reads do not make a tier look slow that answers late', () => {
  const meter = new RateMeter({ bytesPerUs: 1000, latencyUs: 300 });
  reads(meter, Array(100).fill(64 << 10), 1000, 300);
  expect(meter.bytesPerUs).toBeGreaterThan(500);
  expect(meter.estimateUs(64 << 10, 0)).toBeLessThan(600);
});

it('what was slow once is believed less and less, and never better than the guess; what was fast stays', () => {
  const slow = new RateMeter({ bytesPerUs: 1000, latencyUs: 300 });
  const endUs = reads(slow, [16 << 20, 16 << 20], 10, 300);
  const after = (s: number): number => slow.estimateUs(10 << 20, 0, endUs + s * 1e6);
  expect(after(0) / (10 << 20)).toBeCloseTo(0.1, 1);
  expect(after(29)).toBe(after(0));
  expect(after(60)).toBeLessThan(after(0) / 5);
  expect(after(3_600)).toBeGreaterThan((10 << 20) / 1000);
  expect(after(3_600)).toBeLessThan((10 << 20) / 900);
  const fast = new RateMeter({ bytesPerUs: 1000, latencyUs: 300 });
  const end = reads(fast, [16 << 20, 16 << 20], 8000, 50);
  expect(fast.estimateUs(1 << 20, 0, end + 3_600e6)).toBe(fast.estimateUs(1 << 20, 0, end));
});
