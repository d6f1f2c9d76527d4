/** How often a server is tried that works when it is asked whether it does, and fails soon after. */
import { KvError } from '@kvtier/errors';
import { afterEach, expect, it, vi } from 'vitest';
import { RequestBreaker } from './request-breaker.ts';

afterEach(() => {
  vi.useRealTimers();
});

it('its waits grow from outage to outage, and begin anew only after it was well for a while', async () => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout', 'performance'] });
  const failure = new KvError('IO', 'HTTP 500');
  let closedMs = 0;
  const breaker = new RequestBreaker({
    onOpen: () => {},
    probe: () => Promise.resolve(),
    onClosed: () => {
      closedMs = performance.now();
    },
  });
  const outageMs = async (): Promise<number> => {
    const openedMs = performance.now();
    for (const object of ['a', 'b', 'a', 'b', 'a']) breaker.noted(failure, object);
    expect(breaker.reason).toBe('HTTP 500');
    while (breaker.reason !== '') await vi.advanceTimersToNextTimerAsync();
    return closedMs - openedMs;
  };
  for (const boundMs of [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]) {
    const tookMs = await outageMs();
    expect(tookMs).toBeGreaterThanOrEqual(boundMs / 2 - 1);
    expect(tookMs).toBeLessThanOrEqual(boundMs + 1);
  }
  await vi.advanceTimersByTimeAsync(30_001);
  expect(await outageMs()).toBeLessThanOrEqual(501);
  breaker.stop();
});
