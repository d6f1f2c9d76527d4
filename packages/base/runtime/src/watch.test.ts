/** The clock that stands still with its process. */
import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { MessageChannel } from 'node:worker_threads';
import { afterEach, expect, it } from 'vitest';
import { runningTimeout, Watch } from './watch.ts';

let watch: Watch | undefined;
afterEach(() => {
  watch?.stop();
  watch = undefined;
});

/** The event loop does nothing else. */
function standStill(ms: number): void {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
}

it('goes as real time goes while the process runs', async () => {
  watch = new Watch(50, () => {});
  const [startMs, realStartMs] = [watch.nowMs(), performance.now()];
  await sleep(200);
  const [ms, realMs] = [watch.nowMs() - startMs, performance.now() - realStartMs];
  expect(ms).toBeLessThanOrEqual(realMs + 1);
  expect(ms).toBeGreaterThan(50);
});

it('counts a standstill of any length as two intervals at most, however often it is read', () => {
  watch = new Watch(20, () => {});
  const startMs = watch.nowMs();
  standStill(500);
  expect(watch.nowMs() - startMs).toBeLessThan(42);
  expect(watch.nowMs() - startMs).toBeLessThan(50);
});

it('looks only when what arrived during a standstill has been taken in', async () => {
  const { port1, port2 } = new MessageChannel();
  const order: string[] = [];
  const looked = new Promise<void>((resolve) => {
    watch = new Watch(20, () => {
      order.push('look');
      resolve();
    });
  });
  port2.on('message', () => order.push('message'));
  port1.postMessage('');
  standStill(100);
  await looked;
  port2.close();
  expect(order).toEqual(['message', 'look']);
});

it('does not look any more when it was stopped', async () => {
  let looks = 0;
  watch = new Watch(5, () => looks++);
  setTimeout(() => watch?.stop(), 0);
  standStill(20);
  await sleep(50);
  expect(looks).toBe(0);
});

it('a limit runs out while the process runs, and not because it stood still', async () => {
  const limit = runningTimeout(160);
  const aborted = once(limit.signal, 'abort');
  standStill(400);
  await sleep(20);
  expect(limit.signal.aborted).toBe(false);
  await aborted;
  expect((limit.signal.reason as Error).name).toBe('TimeoutError');
  const other = runningTimeout(32);
  other.end();
  await sleep(200);
  expect(other.signal.aborted).toBe(false);
});
