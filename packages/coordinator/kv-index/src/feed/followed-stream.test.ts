/** Streams of the test's own, without sockets: who is followed no more in the middle of what it says, and clocks that are set. */
import { type EventSource, workerRecordSchema } from '@kvtier/config';
import { encodeBatch, type KvEvent, type PackedBatch, PackedDecoder, type StreamItem } from '@kvtier/events';
import { foreignBatch } from '@kvtier/events/testing';
import { afterEach, expect, it, vi } from 'vitest';
import { KvIndex } from '../kv-index.ts';
import type { FollowedWorker } from './followed.ts';
import type { Subscription } from './followed-stream.ts';
import { IndexFeed } from './index-feed.ts';
import { turnBlocks } from './slices.ts';

const blockTokens = 16;
const ends: (() => void)[] = [];
afterEach(() => {
  for (const end of ends.splice(0).reverse()) end();
  vi.restoreAllMocks();
});

/** One publisher of the test's own. */
class Stream implements Subscription {
  readonly connected = true;
  /** Replays asked for in vain. */
  unanswered = 0;
  readonly #bursts: StreamItem<PackedBatch>[][] = [];
  readonly #decoder = new PackedDecoder({ tokens: false });
  #wake: () => void = () => {};
  #isClosed = false;

  /** Arrives at once, as publishers of others write it. */
  tell(events: readonly unknown[]): void {
    const payload = foreignBatch(events, null);
    try {
      this.#bursts.push([{ kind: 'batch', seq: 0, topic: '', batch: this.#decoder.decode(payload) }]);
    } catch (error) {
      const { message: reason } = error as Error;
      this.#bursts.push([{ kind: 'gap', fromSeq: 0, untilSeq: 1, reason, isUnread: true }]);
    }
    this.#wake();
  }

  /** Arrives at once: a batch of each of these events. */
  say(events: readonly KvEvent[], ts = Date.now() / 1_000): void {
    const batches = events.map((event) =>
      this.#decoder.decode(encodeBatch({ ts, events: [event], dataParallelRank: null })),
    );
    this.#bursts.push(batches.map((batch, seq) => ({ kind: 'batch', seq, topic: '', batch })));
    this.#wake();
  }

  async *packed(): AsyncGenerator<readonly StreamItem<PackedBatch>[]> {
    while (!this.#isClosed) {
      while (this.#bursts.length > 0) yield this.#bursts.shift()!;
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  resync(): void {}

  stats() {
    const none = { gaps: 0, restarts: 0, snapshots: 0, reconnects: 0, unanswered: this.unanswered };
    return { ...none, batches: 0, replayed: 0, repeated: 0, undecodable: 0 } as ReturnType<Subscription['stats']>;
  }

  close(): void {
    this.#isClosed = true;
    this.#wake();
  }
}

function rig() {
  const streams = new Map<string, Stream>();
  const subscribe = ({ topic }: EventSource): Stream => {
    const stream = new Stream();
    streams.set(topic, stream);
    return stream;
  };
  const logger = { info: () => {}, warn: () => {} };
  const feed = new IndexFeed({ maxBytes: 64 << 20, blockTokens, logger, subscribe });
  ends.push(() => feed.close());
  return { feed, said: (name: string): Stream => streams.get(name)! };
}

const worker = (number: number, publishes = true, replayEndpoint: string | null = null): FollowedWorker => {
  const name = `w${number}`;
  const events = publishes ? { endpoint: 'ipc:///x', replayEndpoint, topic: name } : null;
  const record = workerRecordSchema.parse({ name, kind: 'kvtier', address: 'unix:/x', node: null, events });
  return { number, record, node: undefined, totalBlocks: 100_000 };
};

const keysFrom = (first: number, blocks: number): Int32Array =>
  Int32Array.from({ length: 2 * blocks }, (_, i) => (i % 2 === 0 ? first + i / 2 : 0));
const stored = (first: number, blocks: number): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: Array.from({ length: blocks }, (_, i) => BigInt(first + i)) },
  ...{ parentBlockHash: null, tokenIds: [], blockSize: blockTokens, loraId: null, loraName: null, medium: 'GPU' },
});
const wait = { timeout: 15_000, interval: 1 };
const turn = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));

it('what a worker says is not credited to the one that has its place, though it leaves in the middle of it', async () => {
  const { feed, said } = rig();
  feed.follow([worker(5, false), worker(0)]);
  said('w0').say([stored(1, 1)]);
  await vi.waitFor(() => expect(feed.state().workers.map(({ why }) => why)[1]).toBeUndefined(), wait);
  const long = 2 * turnBlocks;
  said('w0').say([stored(1, long)]);
  while (feed.state().index.blocks < turnBlocks) await turn();
  expect(feed.state().index.blocks).toBe(turnBlocks);
  // Publishes nothing: what it holds is guessed, in sources that have the numbers that are free now.
  feed.follow([worker(5, false), worker(1, false), worker(2, false)]);
  for (let i = 0; i < 5; i++) await turn();
  const later = keysFrom(1 + turnBlocks, long - turnBlocks);
  expect(feed.match(later, [1, 2, 5]).map(({ blocks }) => blocks)).toEqual([0, 0, 0]);
  expect(feed.state().index.blocks).toBeLessThanOrEqual(turnBlocks);
});

it('the rest of a burst of who is followed no more is not dealt with', async () => {
  const { feed, said } = rig();
  feed.follow([worker(0)]);
  const stores = vi.spyOn(KvIndex.prototype, 'stored');
  said('w0').say(Array.from({ length: 3_000 }, (_, i) => stored(1 + 16 * i, 16)));
  while (feed.state().index.blocks < turnBlocks) await turn();
  feed.follow([]);
  const before = stores.mock.calls.length;
  for (let i = 0; i < 5; i++) await turn();
  expect(stores.mock.calls.length - before).toBe(0);
});

it.each([
  ['ours', 10, 0],
  ['ours', -10, 0],
  ['the one of us both', 10, 10],
  ['the one of us both', -10, -10],
  ['its own, ahead', 0, 10],
])('a clock that is set makes nobody late: %s, by %i s', async (_, ourStepS, itsStepS) => {
  const { feed, said } = rig();
  feed.follow([worker(0)]);
  const unixMs = Date.now;
  let stepMs = 0;
  vi.spyOn(Date, 'now').mockImplementation(() => unixMs() + stepMs);
  let blocks = 0;
  const say = async (aheadS: number): Promise<void> => {
    said('w0').say([stored(++blocks, 1)], unixMs() / 1_000 + aheadS);
    await vi.waitFor(() => expect(feed.state().index.blocks).toBe(blocks), wait);
  };
  await say(0);
  stepMs = 1_000 * ourStepS;
  for (let i = 0; i < 3; i++) {
    await say(itsStepS);
    feed.follow([worker(0)]); // looks at once
    const { lagS, why } = feed.state().workers[0]!;
    expect([lagS < 5, why]).toEqual([true, undefined]);
  }
  // What is late is so by any clock.
  await say(itsStepS - 20);
  feed.follow([worker(0)]);
  const { lagS, why } = feed.state().workers[0]!;
  expect(Math.round(lagS / 10)).toBe(2);
  expect(why).toMatch(/^its KV events are more than 5 s late/);
});

it.each([
  ['batches', [['BlockRemoved', ['x'], 'GPU']], 'unreadable_batch'],
  ['blocks stored', [['BlockStored', [1], null, 'x', 16, null]], 'unreadable'],
] as const)('one of whose %s none can be read is guessed, until some can', async (_, events, kind) => {
  const { feed, said } = rig();
  const why = (): string | undefined => {
    feed.follow([worker(0)]); // looks at once
    return feed.state().workers[0]!.why;
  };
  feed.follow([worker(0)]);
  for (let i = 1; i <= 3; i++) {
    said('w0').tell(events);
    await vi.waitFor(() => expect(feed.state().totals.lies[kind]).toBe(i), wait);
    expect(why()).toMatch(
      /^no KV event of it that tells of blocks can be read: look whether it speaks vLLM's encoding/,
    );
    expect(feed.guesses([0])).toBe(true);
  }
  said('w0').say([stored(1, 1)]);
  await vi.waitFor(() => expect(feed.match(keysFrom(1, 1), [0])[0]!.blocks).toBe(1), wait);
  expect([why(), feed.guesses([0])]).toEqual([undefined, false]);
  // From then on, what cannot be read is left out alone.
  said('w0').tell(events);
  await vi.waitFor(() => expect(feed.state().totals.lies[kind]).toBe(4), wait);
  expect(why()).toBeUndefined();
});

it('one whose replay endpoint does not answer is guessed, and that endpoint is named', async () => {
  const { feed, said } = rig();
  const one = worker(0, true, 'ipc:///replays');
  const why = (): string | undefined => {
    feed.follow([one]); // looks at once
    return feed.state().workers[0]!.why;
  };
  const silent =
    'its replay endpoint ipc:///replays does not answer: look whether that answers replays; of one that does not replay, name no replay endpoint or port';
  expect(why()).toMatch(/^no KV event of it has come/);
  said('w0').unanswered = 1;
  expect(why()).toBe(silent);
  said('w0').say([stored(1, 1)]);
  // Once something has come, one time may be chance.
  await vi.waitFor(() => expect(why()).toBeUndefined(), wait);
  said('w0').unanswered = 2;
  expect([why(), feed.guesses([0])]).toEqual([silent, true]);
  said('w0').unanswered = 0;
  expect([why(), feed.guesses([0])]).toEqual([undefined, false]);
});
