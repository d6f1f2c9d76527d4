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
