import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { decodeBatch, encodeBatch } from './codec.ts';
import { Continuity, type Replay, type StreamItem } from './continuity.ts';
import type { KvEvent } from './event.ts';
import { type Published, ReplayBuffer } from './replay-buffer.ts';
import { foreignBatch } from './testing/foreign.ts';
import { NaiveHolders } from './testing/naive-holders.ts';

const storedEvent = (hash: bigint): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: [hash], parentBlockHash: null, tokenIds: [], blockSize: 16 },
  ...{ loraId: null, loraName: null, medium: 'GPU' },
});

/** A publisher without sockets: what it published in its present life, and which of it can be replayed. */
class Source {
  buffer = new ReplayBuffer(5, 1 << 20);
  nextSeq = 0;
  #clock = 0;

  get now(): number {
    return this.#clock;
  }

  publish(...events: readonly KvEvent[]): Published {
    const payload = encodeBatch({ ts: this.#clock++, events, dataParallelRank: 0 });
    const one = { seq: this.nextSeq++, topic: 'kv', payload };
    this.buffer.push(one);
    return one;
  }

  restart(): void {
    this.buffer = new ReplayBuffer(5, 1 << 20);
    this.nextSeq = 0;
  }

  readonly replay = async function* (this: Source, from: number): AsyncGenerator<Published> {
    for (let one = this.buffer.firstFrom(from); one; one = this.buffer.firstFrom(one.seq + 1)) yield one;
  }.bind(this);
}

async function all(items: AsyncIterable<StreamItem>): Promise<(number | string)[]> {
  const said: (number | string)[] = [];
  for await (const item of items)
    if (item.kind === 'batch') said.push(item.seq);
    else if (item.kind === 'gap') said.push(`gap ${item.fromSeq}-${item.untilSeq}`);
    else said.push(item.kind === 'restarted' ? `restarted ${item.lastSeq}` : `snapshot ${item.seq}`);
  return said;
}

describe('one stream', () => {
  it('fills a gap in order, and only up to what arrived', async () => {
    const source = new Source();
    const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
    const batches = Array.from({ length: 6 }, (_, i) => source.publish(storedEvent(BigInt(i))));
    expect(await all(stream.arrived(batches[0]!))).toEqual([0]);
    expect(await all(stream.arrived(batches[3]!))).toEqual([1, 2, 3]);
    expect(await all(stream.arrived(batches[4]!))).toEqual([4]);
    expect(stream.counts).toMatchObject({ batches: 5, replayed: 2, gaps: 0, restarts: 0 });
  });

  it('who comes late gets what is still there', async () => {
    const source = new Source();
    const batches = Array.from({ length: 9 }, (_, i) => source.publish(storedEvent(BigInt(i))));
    expect(await all(new Continuity(decodeBatch, { replay: source.replay }, '').arrived(batches[8]!))).toEqual([
      'gap 0-4',
      4,
      5,
      6,
      7,
      8,
    ]);
    expect(await all(new Continuity(decodeBatch, { replay: null }, '').arrived(batches[8]!))).toEqual(['gap 0-8', 8]);
  });

  it('a number that goes backwards is a new life, of which nothing is missed', async () => {
    const source = new Source();
    const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
    for (let i = 0; i < 4; i++) await all(stream.arrived(source.publish(storedEvent(1n))));
    source.restart();
    source.publish(storedEvent(2n));
    expect(await all(stream.arrived(source.publish(storedEvent(3n))))).toEqual(['restarted 3', 0, 1]);
  });

  it.each([
    ['the number that was expected', 3],
    ['a later number', 5],
  ])('a restart while disconnected is seen even at %s', async (_, seq) => {
    const source = new Source();
    const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
    for (let i = 0; i < 3; i++) await all(stream.arrived(source.publish(storedEvent(1n))));
    source.restart();
    stream.suspect();
    const batches = Array.from({ length: seq + 1 }, () => source.publish(storedEvent(2n)));
    const still = Array.from({ length: Math.min(5, seq + 1) }, (_, i) => i + Math.max(0, seq - 4));
    const lost = still[0]! > 0 ? [`gap 0-${still[0]}`] : [];
    expect(await all(stream.arrived(batches[seq]!))).toEqual(['restarted 2', ...lost, ...still]);
  });

  it('a lost connection alone is no restart; without replay nobody can know', async () => {
    for (const [withReplay, expected] of [
      [true, [1]],
      [false, ['gap 1-1', 1]],
    ] as const) {
      const source = new Source();
      const stream = new Continuity(decodeBatch, { replay: withReplay ? source.replay : null }, '');
      expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual([0]);
      stream.suspect();
      expect(await all(stream.arrived(source.publish(storedEvent(2n))))).toEqual(expected);
    }
  });

  it('a replay that fails is a gap, and the stream goes on', async () => {
    const source = new Source();
    const stream = new Continuity(
      decodeBatch,
      {
        replay: () => {
          throw new KvError('DEADLINE', 'late');
        },
      },
      '',
    );
    const batches = Array.from({ length: 4 }, () => source.publish(storedEvent(1n)));
    await all(stream.arrived(batches[0]!));
    const items: StreamItem[] = [];
    for await (const item of stream.arrived(batches[2]!)) items.push(item);
    expect(items[0]).toEqual({ kind: 'gap', fromSeq: 1, untilSeq: 2, reason: 'late' });
    expect(await all(stream.arrived(batches[3]!))).toEqual([3]);
  });

  it('an answer that breaks off is asked for again from there', async () => {
    const source = new Source();
    let answers = 0;
    const stream = new Continuity(
      decodeBatch,
      {
        replay: async function* (from) {
          answers++;
          let count = 0;
          for await (const one of source.replay(from)) if (count++ < 2) yield one;
        },
      },
      '',
    );
    const batches = Array.from({ length: 5 }, () => source.publish(storedEvent(1n)));
    expect(await all(stream.arrived(batches[4]!))).toEqual([0, 1, 2, 3, 4]);
    expect(answers).toBe(3);
  });

  it('other topics count, but are not handed out; what cannot be read is a gap of one', async () => {
    const source = new Source();
    const stream = new Continuity(decodeBatch, { replay: source.replay }, 'kv');
    expect(await all(stream.arrived({ ...source.publish(), topic: 'other' }))).toEqual([]);
    expect(await all(stream.arrived({ seq: 1, topic: 'kv', payload: Buffer.from('nonsense') }))).toEqual(['gap 1-2']);
    source.nextSeq = 2;
    expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual([2]);
  });

  it('blocks stored that cannot be read are no gap: nothing else is forgotten', async () => {
    const stream = new Continuity(decodeBatch, { replay: null }, '');
    const index = new NaiveHolders();
    const [good, bad] = [
      ['BlockStored', [1], null, [], 16, null],
      ['BlockStored', [2], null, 'x', 16, null],
    ];
    const kinds: unknown[] = [];
    for (const [seq, events] of [[good], [bad], [bad, ['BlockRemoved', ['x']]]].entries()) {
      for await (const item of stream.arrived({ seq, topic: '', payload: foreignBatch(events) })) {
        kinds.push(item.kind === 'gap' ? item.isUnread : item.kind);
        index.apply('engine', item);
      }
      expect(index.holdersOf(1n).length).toBe(seq < 2 ? 1 : 0);
    }
    expect([kinds, stream.counts.undecodable]).toEqual([['batch', 'batch', true], 1]);
  });
});

describe('a publisher that tells snapshots', () => {
  const held = [7n, 8n];
  const rig = (source: Source) => {
    let asked = 0;
    const snapshot = async function* (): AsyncGenerator<Published> {
      asked++;
      const seq = source.nextSeq;
      for (const hash of held)
        yield {
          seq,
          topic: 'kv',
          payload: encodeBatch({ ts: source.now, events: [storedEvent(hash)], dataParallelRank: 0 }),
        };
    };
    const stream = new Continuity(decodeBatch, { replay: source.replay, snapshot }, '');
    return { stream, asked: () => asked };
  };

  it('is asked where batches are gone for ever, and what it said before that is not heard twice', async () => {
    const source = new Source();
    const { stream, asked } = rig(source);
    const batches = Array.from({ length: 9 }, (_, i) => source.publish(storedEvent(BigInt(i))));
    expect(await all(stream.arrived(batches[7]!))).toEqual(['snapshot 9', 9, 9]);
    expect(await all(stream.arrived(batches[8]!))).toEqual([]);
    expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual([9]);
    expect([asked(), stream.counts.repeated, stream.counts.gaps]).toEqual([1, 1, 0]);
  });

  it('is asked what it holds although nothing comes, and once more after each loss', async () => {
    const source = new Source();
    const { stream, asked } = rig(source);
    for (let i = 0; i < 9; i++) source.publish(storedEvent(1n));
    expect(await all(stream.probe())).toEqual(['snapshot 9', 9, 9]);
    source.publish(storedEvent(1n));
    expect(await all(stream.probe())).toEqual([9]);
    expect(await all(stream.probe())).toEqual([]);
    // A new life that has said nothing yet.
    source.restart();
    expect(await all(stream.probe())).toEqual(['snapshot 0', 0, 0]);
    expect(asked()).toBe(2);
  });

  it('is asked once more when all is wanted anew while it tells', async () => {
    const source = new Source();
    const { stream, asked } = rig(source);
    for (let i = 0; i < 9; i++) source.publish(storedEvent(1n));
    for await (const { kind } of stream.probe()) if (kind === 'snapshot') stream.resync();
    expect([stream.wantsProbe, asked()]).toEqual([true, 1]);
    expect(await all(stream.probe())).toEqual(['snapshot 9', 9, 9]);
    expect([stream.wantsProbe, asked()]).toEqual([false, 2]);
  });

  it('what cannot be read is void until the next probe brings all', async () => {
    const source = new Source();
    const { stream } = rig(source);
    await all(stream.arrived(source.publish(storedEvent(1n))));
    expect(await all(stream.arrived({ seq: 1, topic: 'kv', payload: Buffer.from('nonsense') }))).toEqual(['gap 1-2']);
    source.nextSeq = 2;
    expect(stream.wantsProbe).toBe(true);
    expect(await all(stream.probe())).toEqual(['snapshot 2', 2, 2]);
    expect(stream.wantsProbe).toBe(false);
  });
});

it('what comes once more, or late, is nothing new; without a replay a later batch is a gap', async () => {
  const source = new Source();
  const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
  const [first, second, third] = [1n, 2n, 3n].map((hash) => source.publish(storedEvent(hash)));
  expect(await all(stream.arrived(first!))).toEqual([0]);
  expect(await all(stream.arrived(third!))).toEqual([1, 2]);
  expect(await all(stream.arrived(second!))).toEqual([]);
  expect(await all(stream.arrived(third!))).toEqual([]);
  expect(stream.counts).toMatchObject({ repeated: 2, restarts: 0, batches: 3 });
});

it('a publisher that does not answer a probe cannot show that nothing was missed', async () => {
  const source = new Source();
  let answers = true;
  const replay: Replay = (from) => {
    if (!answers) throw new KvError('DEADLINE', 'late');
    return source.replay(from);
  };
  const stream = new Continuity(decodeBatch, { replay }, '');
  await all(stream.arrived(source.publish(storedEvent(1n))));
  answers = false;
  expect([await all(stream.probe()), stream.counts.unanswered]).toEqual([[], 1]); // it may be chance
  expect([await all(stream.probe()), stream.counts.unanswered]).toEqual([['gap 1-1'], 2]);
  expect([await all(stream.probe()), stream.wantsProbe]).toEqual([[], true]);
  answers = true;
  // What it holds is told again, all of it, though it would not have been missed otherwise.
  expect([await all(stream.probe()), stream.wantsProbe]).toEqual([[0], false]);
  expect([await all(stream.probe()), stream.counts.unanswered]).toEqual([[], 0]);
});

it('what continues shows that nothing was missed, whoever does not answer', async () => {
  const source = new Source();
  const replay: Replay = () => {
    throw new KvError('DEADLINE', 'late');
  };
  const stream = new Continuity(decodeBatch, { replay }, '');
  for (let seq = 0; seq < 4; seq++) {
    expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual([seq]);
    expect(await all(stream.probe())).toEqual([]);
  }
  expect(stream.counts).toMatchObject({ gaps: 0, unanswered: 4 });
});

it('what arrives waits for no answer where there was none; what was missed is told once there is one', async () => {
  const source = new Source();
  let answers = false;
  let asked = 0;
  const replay: Replay = (from) => {
    asked++;
    if (!answers) throw new KvError('DEADLINE', 'late');
    return source.replay(from);
  };
  const stream = new Continuity(decodeBatch, { replay }, '');
  await all(stream.arrived(source.publish(storedEvent(1n))));
  const next = (): Published => {
    source.publish(storedEvent(1n)); // lost
    return source.publish(storedEvent(1n));
  };
  expect([await all(stream.arrived(next())), asked]).toEqual([['gap 1-2', 2], 1]);
  expect([await all(stream.arrived(next())), asked]).toEqual([['gap 3-4', 4], 1]);
  source.buffer = new ReplayBuffer(5, 1 << 20);
  expect([await all(stream.arrived(next())), asked]).toEqual([['gap 5-6', 6], 1]);
  answers = true;
  expect([await all(stream.probe()), stream.counts.unanswered]).toEqual([['gap 7-7', 5, 6], 0]);
  expect([await all(stream.arrived(next())), asked]).toEqual([[7, 8], 3]);
});

it('what came after nobody had answered is told once more, with all that was before', async () => {
  const source = new Source();
  let answers = false;
  const replay: Replay = (from) => {
    if (!answers) throw new KvError('DEADLINE', 'late');
    return source.replay(from);
  };
  const stream = new Continuity(decodeBatch, { replay }, '');
  for (let i = 0; i < 3; i++) source.publish(storedEvent(1n));
  expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual(['gap 0-3', 3]);
  expect([await all(stream.probe()), stream.wantsProbe]).toEqual([[], true]);
  answers = true;
  expect(await all(stream.probe())).toEqual(['gap 4-4', 0, 1, 2, 3]);
  expect([await all(stream.probe()), stream.wantsProbe]).toEqual([[], false]);
  // What it does not hold any more is not asked for for ever.
  answers = false;
  for (let i = 0; i < 5; i++) source.publish(storedEvent(1n));
  expect(await all(stream.arrived(source.publish(storedEvent(1n))))).toEqual(['gap 4-9', 9]);
  source.buffer = new ReplayBuffer(1, 1 << 20);
  const last = source.publish(storedEvent(1n));
  answers = true;
  expect(await all(stream.probe())).toEqual([10]);
  expect([await all(stream.arrived(last)), await all(stream.probe()), stream.wantsProbe]).toEqual([[], [], false]);
});

it('another life that has said less than the one before is heard from its beginning, though nothing comes', async () => {
  const source = new Source();
  const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
  for (let i = 0; i < 4; i++) await all(stream.arrived(source.publish(storedEvent(1n))));
  source.restart();
  stream.suspect();
  for (let i = 0; i < 2; i++) source.publish(storedEvent(2n));
  expect(await all(stream.probe())).toEqual(['gap 4-4', 0, 1]);
  expect(await all(stream.arrived(source.publish(storedEvent(2n))))).toEqual([2]);
});

describe('an answer to a probe that does not end', () => {
  const late = (): never => {
    throw new KvError('DEADLINE', 'late');
  };
  /** What of the batches from `from` on comes of an answer before it breaks off; the last one ends it. */
  const rig = (count: number, comes: (from: number) => readonly number[]) => {
    const source = new Source();
    source.buffer = new ReplayBuffer(count, 1 << 24);
    const batches = Array.from({ length: count }, (_, i) => source.publish(storedEvent(BigInt(i))));
    const asked: number[] = [];
    const replay: Replay = async function* (from) {
      asked.push(from);
      const seqs = comes(from).filter((seq) => seq < count);
      for (const seq of seqs) yield batches[seq]!;
      if (seqs.at(-1) !== count - 1) late();
    };
    return { stream: new Continuity(decodeBatch, { replay }, ''), asked };
  };

  it('is asked on from there, and what it brought stays', async () => {
    const { stream, asked } = rig(5, (from) => [from, from + 1, from + 2]);
    expect(await all(stream.probe())).toEqual([0, 1, 2, 3, 4]);
    expect([asked, stream.counts]).toMatchObject([[0, 2], { gaps: 0, unanswered: 0 }]);
    expect(await all(stream.probe())).toEqual([]);
  });

  it('is asked on as often as it takes, and for what it lost in its middle', async () => {
    const count = 5_000;
    const { stream, asked } = rig(count, (from) => {
      const some = Array.from({ length: 200 }, (_, i) => from + i);
      return [...some, ...some.map((seq) => seq + 1_000)];
    });
    const said = await all(stream.probe());
    expect(said).toEqual(Array.from({ length: count }, (_, i) => i));
    expect(asked.length).toBe(26); // each begins with the last one before it
  });

  it('is asked so often at most where it brings next to nothing', async () => {
    const { stream, asked } = rig(5_000, (from) => [from, from + 1]);
    expect(await all(stream.probe())).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8]);
    expect(asked.length).toBe(8);
  });
});

const step = fc.oneof(
  {
    weight: 8,
    arbitrary: fc.record({ kind: fc.constant('publish'), hash: fc.nat(5), remove: fc.boolean(), lost: fc.boolean() }),
  },
  {
    weight: 1,
    arbitrary: fc.record({ kind: fc.constant('restart'), hash: fc.nat(5), remove: fc.boolean(), lost: fc.boolean() }),
  },
);

it('with replay, what the index knows is what the publisher holds, whatever is lost and whenever it restarts', async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
      const source = new Source();
      source.buffer = new ReplayBuffer(100, 1 << 20);
      const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
      const index = new NaiveHolders();
      let truth = new Map<bigint, number>();
      const arrives = async (one: Published): Promise<void> => {
        for await (const item of stream.arrived(one)) index.apply('engine', item);
        for (let hash = 0n; hash <= 5n; hash++)
          expect(index.holdersOf(hash).length > 0).toBe((truth.get(hash) ?? 0) > 0);
      };
      for (const { kind, hash, remove, lost } of steps) {
        if (kind === 'restart') {
          source.restart();
          source.buffer = new ReplayBuffer(100, 1 << 20);
          stream.suspect();
          truth = new Map();
        }
        const key = BigInt(hash);
        const held = truth.get(key) ?? 0;
        const gone = remove && held > 0;
        truth.set(key, held + (gone ? -1 : 1));
        const one = source.publish(
          gone ? { type: 'BlockRemoved', blockHashes: [key], medium: 'GPU' } : storedEvent(key),
        );
        if (!lost) await arrives(one);
      }
      await arrives(source.publish(storedEvent(9n)));
    }),
    { numRuns: 300 },
  );
});

it('with too small a replay buffer the index knows no more than what the publisher holds', async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
      const source = new Source();
      const stream = new Continuity(decodeBatch, { replay: source.replay }, '');
      const index = new NaiveHolders();
      let truth = new Map<bigint, number>();
      for (const { kind, hash, remove, lost } of steps) {
        if (kind === 'restart') {
          source.restart();
          stream.suspect();
          truth = new Map();
        }
        const key = BigInt(hash);
        const held = truth.get(key) ?? 0;
        const gone = remove && held > 0;
        truth.set(key, held + (gone ? -1 : 1));
        const one = source.publish(
          gone ? { type: 'BlockRemoved', blockHashes: [key], medium: 'GPU' } : storedEvent(key),
        );
        if (lost) continue;
        for await (const item of stream.arrived(one)) index.apply('engine', item);
        for (let other = 0n; other <= 5n; other++)
          if ((truth.get(other) ?? 0) === 0) expect(index.holdersOf(other)).toEqual([]);
      }
    }),
    { numRuns: 300 },
  );
});
