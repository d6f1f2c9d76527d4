/** What is awaited for long, and taken once; who is woken meanwhile leaves nothing behind. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, vi } from 'vitest';
import { Arrival } from './arrival.ts';
import { KvEventPublisher } from './publisher.ts';
import { type Burst, EventReceiver } from './receiver.ts';
import { KvEventSubscriber } from './subscriber.ts';

it('gives what came once, or what was thrown; what was dropped comes no more', async () => {
  const arrival = new Arrival<number | null>();
  expect(arrival.isBegun).toBe(false);
  let come!: (value: number | null) => void;
  arrival.begin(new Promise((resolve) => (come = resolve)));
  expect([arrival.isBegun, arrival.take()]).toEqual([true, undefined]);
  const waiting = arrival.wait();
  come(null);
  await waiting;
  await arrival.wait();
  expect([arrival.take(), arrival.take(), arrival.isBegun]).toEqual([null, undefined, false]);
  arrival.begin(Promise.resolve(1));
  arrival.begin(Promise.resolve(2));
  await arrival.wait();
  expect(arrival.take()).toBe(2);
  arrival.begin(Promise.resolve(3));
  arrival.drop();
  await Promise.resolve();
  expect(arrival.take()).toBe(undefined);
  arrival.begin(Promise.reject(new Error('gone')));
  await arrival.wait();
  expect(() => arrival.take()).toThrow('gone');
});

it('a subscriber of a publisher that says nothing has no more to do with what it awaits after a hundred probes', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-arrival-'));
  const [endpoint, replayEndpoint] = [`ipc://${folder}/pub`, `ipc://${folder}/replay`];
  const publisher = await KvEventPublisher.start({ endpoint, replayEndpoint });
  publisher.tellSnapshots(() => []);
  const awaited = new Promise<Burst | null>(() => {});
  const then = vi.spyOn(awaited, 'then');
  const { next } = EventReceiver.prototype;
  EventReceiver.prototype.next = () => awaited;
  const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint });
  void (async () => {
    for await (const _ of subscriber);
  })();
  try {
    const probed = (): void => {
      subscriber.resync();
      expect(subscriber.stats().snapshots).toBeGreaterThanOrEqual(100);
    };
    await vi.waitFor(probed, { timeout: 20_000, interval: 2 });
    expect(then.mock.calls.length).toBe(1);
  } finally {
    EventReceiver.prototype.next = next;
    subscriber.close();
    await publisher.close();
    rmSync(folder, { recursive: true });
  }
});
