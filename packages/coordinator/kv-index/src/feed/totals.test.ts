import { workerRecordSchema } from '@kvtier/config';
import type { KvEventSubscriberStats } from '@kvtier/events';
import { expect, it, vi } from 'vitest';
import type { FollowedWorker } from './followed.ts';
import type { Subscription } from './followed-stream.ts';
import { IndexFeed } from './index-feed.ts';

/** One that counts what it is told to, until it is told to end. */
class Counting implements Subscription {
  readonly connected = true;
  readonly counts = { gaps: 0, restarts: 0, snapshots: 0, reconnects: 0 };
  end: () => void = () => {};
  closed = 0;

  async *packed(): ReturnType<Subscription['packed']> {
    await new Promise<void>((resolve) => {
      this.end = resolve;
    });
  }

  resync(): void {}
  stats = (): KvEventSubscriberStats => this.counts as KvEventSubscriberStats;

  close(): void {
    this.closed++;
    this.end();
  }
}

it('what is over leaves its counts: a subscription, a publisher', async () => {
  const made: Counting[] = [];
  const subscribe = (): Counting => {
    made.push(new Counting());
    return made.at(-1)!;
  };
  const logger = { info: () => {}, warn: () => {} };
  const feed = new IndexFeed({ maxBytes: 4 << 20, blockTokens: 16, logger, subscribe });
  const worker = (number: number): FollowedWorker => {
    const events = { endpoint: `ipc:///tmp/${number}` };
    const record = workerRecordSchema.parse({ name: `w${number}`, kind: 'openai', address: 'http://x', events });
    return { number, record, node: undefined };
  };
  const breaks = () => feed.state().totals.breaks;
  feed.follow([worker(0), worker(1)]);
  made[0]!.counts.gaps = 2;
  made[1]!.counts.restarts = 5;
  expect(breaks()).toEqual({ gaps: 2, restarts: 5, snapshots: 0, reconnects: 0 });

  // It ends by itself, and another one takes its place.
  made[0]!.end();
  await vi.waitFor(() => expect(made.length).toBe(3), { timeout: 20_000 });
  expect(breaks()).toEqual({ gaps: 2, restarts: 5, snapshots: 0, reconnects: 0 });
  Object.assign(made[2]!.counts, { gaps: 1, snapshots: 1 });
  expect(breaks()).toEqual({ gaps: 3, restarts: 5, snapshots: 1, reconnects: 0 });

  feed.follow([worker(1)]);
  expect(breaks()).toEqual({ gaps: 3, restarts: 5, snapshots: 1, reconnects: 0 });
  made[1]!.counts.reconnects = 1;
  feed.close();
  expect(breaks()).toEqual({ gaps: 3, restarts: 5, snapshots: 1, reconnects: 1 });
  expect(made.map(({ closed }) => closed)).toEqual([1, 1, 1]);
});
