/** Names that nodes beside engines of other names share: how long they stay, who gives them to whom, and what one who lies can do. */
import { nodeRecordSchema, workerRecordSchema } from '@kvtier/config';
import { encodeBatch, type KvEvent, type PackedBatch, PackedDecoder, type StreamItem } from '@kvtier/events';
import { describe, expect, it, vi } from 'vitest';
import {
  bare,
  blockTokens,
  described,
  first,
  foreignRig,
  length,
  promptOf,
  removed,
  second,
} from '../testing/foreign-nodes.ts';
import type { FollowedWorker } from './followed.ts';
import type { Subscribe } from './followed-stream.ts';
import { IndexFeed } from './index-feed.ts';

const [prompt, other] = [promptOf(1), promptOf(2)];
const namespaceOf = (number: number): string => `${number + 1}`.padStart(16, '0');

describe('a node that starts again', () => {
  it.each([
    ['one rank', 1, ['DISK']],
    ['two ranks', 2, ['DISK']],
    ['eight ranks', 8, ['DISK']],
    ['one rank and two tiers', 1, ['DISK', 'S3']],
  ] as const)('is credited with all of a large disk: %s', (_, ranks, media) => {
    const blocks = 20_000;
    const { say, begins, held } = foreignRig({ namesBytes: 1 << 23 });
    const large = promptOf(7, blocks);
    const page = 500;
    const pages = (ofPage: (from: number, namespace: string, medium: string) => void): void => {
      for (let from = 0; from < blocks; from += page)
        for (let rank = 0; rank < ranks; rank++) for (const medium of media) ofPage(from, namespaceOf(rank), medium);
    };
    pages((from, namespace, medium) => say([described(large, from, from + page, medium)], namespace));
    expect(held(large)).toBe(blocks);
    begins('restarted');
    begins();
    pages((from, namespace, medium) => say([bare(large, from, from + page, medium)], namespace));
    expect(held(large)).toBe(blocks);
  });

  it('keeps the names of what it has not told of again, while others store as much as it holds', () => {
    const blocks = 9_000;
    const { all } = foreignRig({ namesBytes: 1 << 23, nodes: 2 });
    const [mine, theirs] = [promptOf(7, blocks), promptOf(8, blocks)];
    all[0]!.say([described(mine, 0, blocks)]);
    all[0]!.begins('restarted');
    all[1]!.say([described(theirs, 0, blocks)]);
    all[0]!.say([bare(mine, 0, blocks)]);
    expect(all.map(({ held }, i) => held([mine, theirs][i]!))).toEqual([blocks, blocks]);
  });
});

describe('what somebody else has told the tokens of', () => {
  it('is named where it is brought from a peer, before or after that is told, and so is what follows it', () => {
    for (const isFirst of [true, false]) {
      const { all, told } = foreignRig({ nodes: 2 });
      const [prefill, decode] = all;
      const long = promptOf(1, 12);
      if (isFirst) prefill!.say([described(long, 0, 8)]);
      decode!.say([bare(long, 0, 8, 'CPU')]);
      decode!.say([described(long, 8, 12)]);
      if (!isFirst) {
        expect(decode!.held(long)).toBe(0);
        // Whom it counts for is worked out anew once, not with each block.
        prefill!.say([described(long, 0, 4), described(long, 4, 8)]);
        expect(decode!.changes()).toBe(1);
      }
      expect([prefill!.held(long), decode!.held(long), told.unnamed]).toEqual([8, 12, isFirst ? 0 : 12]);
      decode!.say([removed(long, 4, 8)]);
      expect([prefill!.held(long), decode!.held(long)]).toEqual([8, 4]);
    }
  });

  it('is not credited where it was removed before its name was known, and another copy of it is', () => {
    const { all } = foreignRig({ nodes: 2 });
    const [prefill, decode] = all;
    decode!.say([bare(prompt, 0, 8, 'CPU'), bare(prompt, 0, 6, 'DISK')]);
    decode!.say([removed(prompt, 2, 8, 'CPU')]);
    prefill!.say([described(prompt)]);
    expect(decode!.held(prompt)).toBe(6);
    decode!.say([removed(prompt, 0, 8, 'DISK')]);
    expect(decode!.held(prompt)).toBe(2);
  });

  it('is named in shared tiers, whoever is believed of them', () => {
    const { all } = foreignRig({ nodes: 2 });
    const [a, b] = all;
    // The second one is believed: it told first.
    b!.say([described(other, 0, 8), described(other, 0, 8, 'REDIS')]);
    a!.say([described(prompt), described(prompt, 0, 8, 'REDIS')]);
    b!.say([bare(prompt, 0, 8, 'REDIS')]);
    a!.say([bare(other, 0, 8, 'REDIS')]);
    a!.say([removed(prompt)]);
    expect(all.map(({ held }) => [held(prompt), held(other)])).toEqual([
      [8, 8],
      [8, 8],
    ]);
  });

  it('is not for namespaces that nobody tells tokens in, as of groups with a window, and is once somebody does', () => {
    const { all } = foreignRig({ nodes: 2 });
    const [prefill, decode] = all;
    decode!.say([bare(prompt, 0, 8, 'CPU')]);
    decode!.say([bare(prompt, 4, 8, 'CPU')], second);
    prefill!.say([described(prompt)]);
    expect([decode!.held(prompt), decode!.listing.namespaces]).toEqual([8, [first]]);
    decode!.say([bare(prompt, 0, 4, 'CPU')], second);
    prefill!.say([described(prompt)], second);
    expect(decode!.listing.namespaces).toEqual([first, second]);
    expect(decode!.held(prompt)).toBe(8);
    decode!.say([removed(prompt, 3, 4)], second);
    expect(decode!.held(prompt)).toBe(3);
  });

  it('but with other tokens is credited to nobody any more, and counted', () => {
    const { all, lies, lines, index } = foreignRig({ nodes: 3 });
    const [liar, honest, third] = all;
    // As the blocks of one prompt, by the names of another one's.
    liar!.say([{ ...described(other), blockHashes: prompt.hashes } as ReturnType<typeof described>]);
    third!.say([bare(prompt)]);
    expect(all.map(({ held }) => held(other))).toEqual([8, 0, 8]);
    honest!.say([described(prompt)]);
    expect(all.map(({ held }) => [held(prompt), held(other)])).toEqual([
      [0, 0],
      [0, 0],
      [0, 0],
    ]);
    expect(lies.tokens).toBe(1);
    expect(lines).toEqual([
      'KV events of cache node m: other tokens of a block than another node told; nobody is credited with it; ignored',
    ]);
    honest!.say([described(prompt)]);
    expect([honest!.held(prompt), index.stats().blocks]).toEqual([0, 0]);
    index.checkIntegrity();
  });
});

it('as many blocks are named as the last bound says', () => {
  const { say, held, names } = foreignRig({ namesBlocks: 8 });
  const [one, two] = [promptOf(2), promptOf(3)];
  say([described(one), described(two)]);
  expect([held(one), held(two)]).toEqual([8, 0]);
  names.resize(16);
  say([described(two)]);
  expect([held(one), held(two)]).toEqual([8, 8]);
});

it('a namespace of a former life does not count before it is told of again', () => {
  const { say, begins, held } = foreignRig();
  for (const namespace of [first, second]) say([described(prompt)], namespace);
  begins('restarted');
  begins();
  say([bare(prompt)], second);
  expect(held(prompt)).toBe(8);
});

describe('what waits', () => {
  it('in a shared tier and is removed is credited to nobody, whoever tells of it in that turn', () => {
    const at = 'REDIS';
    // Of one of these the turn ends between what the others of its slice and what it itself is told of.
    for (let before = 600; before <= 1_200; before += 60) {
      const { all, index } = foreignRig({ nodes: 2 });
      const [believed, other] = all;
      const [few, many] = [promptOf(2, before), promptOf(3, 1_000)];
      believed!.say([described(few, 0, before, at), described(many, 0, 1_000, at), bare(prompt, 0, 8, at)]);
      const rest = { ...removed(many, 0, 1_000, at), blockHashes: [...prompt.hashes, ...many.hashes] };
      const work = believed!.saying([removed(few, 0, before, at), rest as KvEvent]);
      expect(work.next().done).toBe(false);
      other!.say([described(prompt)]);
      while (work.next().done !== true);
      other!.say([removed(prompt)]);
      expect(index.stats().blocks).toBe(0);
    }
  });

  it('and is removed, or void, while others are told of it in turns, is not credited', () => {
    for (const how of ['removed', 'void', 'left'] as const) {
      const { all, budget } = foreignRig({ namesBytes: 1 << 24, nodes: 2 });
      const [prefill, decode] = all;
      const large = promptOf(7, 6_000);
      decode!.say([described(large, 5_000, 6_000), bare(large, 0, 5_000, 'CPU')]);
      const work = prefill!.saying([described(large, 0, 6_000)]);
      expect(work.next().done).toBe(false);
      const before = decode!.held(large);
      expect(before).toBeGreaterThan(0);
      expect(before).toBeLessThan(5_000);
      if (how === 'removed') decode!.say([removed(large, 0, 5_500)]);
      if (how === 'void') decode!.begins();
      if (how === 'left') decode!.listing.forget();
      while (work.next().done !== true);
      expect([prefill!.held(large), decode!.held(large)]).toEqual([6_000, 0]);
      if (how !== 'left') decode!.say([bare(large, 0, 5_500, 'CPU')]);
      expect(decode!.held(large)).toBe({ removed: 6_000, void: 5_500, left: 0 }[how]);
      for (const { listing } of all) listing.forget();
      expect(budget.bytes).toBe(0);
    }
  });

  it('is over where who is told of it goes meanwhile', () => {
    const { all, budget } = foreignRig({ namesBytes: 1 << 24, nodes: 2 });
    const [prefill, decode] = all;
    const large = promptOf(7, 6_000);
    decode!.say([described(large, 4_000, 6_000)]);
    const work = prefill!.saying([described(large, 0, 5_000)]);
    expect(work.next().done).toBe(false);
    prefill!.listing.forget();
    work.return(false);
    decode!.listing.forget();
    expect(budget.bytes).toBe(0);
  });

  it('does not hold back what is stored again with its tokens', () => {
    const { say, held } = foreignRig();
    say([described(other, 4, 8)]); // something waits
    say([bare(prompt, 0, 8, 'CPU')]);
    say([removed(prompt)]);
    say([described(prompt)]);
    expect(held(prompt)).toBe(8);
    say([removed(prompt, 2, 3), described(prompt, 2, 3)]);
    expect(held(prompt)).toBe(8);
  });

  it('and is removed is not credited, though it has a name that its parent has no more', () => {
    const { say, held } = foreignRig({ maxBlocks: 20 });
    say([described(prompt, 0, 8, 'DISK')]);
    say([removed(prompt, 0, 4, 'DISK'), removed(prompt, 7, 8, 'DISK')]);
    say([described(other), described(promptOf(3))]); // there is no room, so that names of no use go
    say([described(prompt, 4, 8)]);
    say([removed(prompt, 4, 8), removed(prompt, 4, 8, 'DISK'), removed(promptOf(3))]);
    say([described(prompt, 0, 4)]);
    expect(held(prompt)).toBe(4);
  });

  it('takes a sixteenth of the bytes, and gives way to names: the oldest first', () => {
    const { say, held, budget, told } = foreignRig({ namesBytes: 1 << 18 });
    for (let i = 0; i < 500; i++) say([described(promptOf(100 + i), 4, 8)]);
    expect(budget.bytes).toBeLessThanOrEqual(1 << 14);
    expect(budget.bytes).toBeGreaterThan(1 << 13);
    say([described(promptOf(100), 0, 4), described(promptOf(599), 0, 4)]);
    expect([held(promptOf(100)), held(promptOf(599)), told.leftOut]).toEqual([4, 8, 0]);
  });

  it('is none where names of pods need all there is', () => {
    const { say, budget } = foreignRig({ namesBytes: 131_072 });
    for (let i = 0; i < 50; i++) say([described(promptOf(100 + i), 4, 8)]);
    expect(budget.bytes).toBeGreaterThan(0);
    expect([budget.take(131_072), budget.bytes]).toEqual([true, 131_072]);
  });

  it('and names leave a quarter of all bytes to those of pods, whatever nodes tell', () => {
    const { say, budget, told } = foreignRig({ namesBytes: 1 << 20 });
    for (let i = 0; told.leftOut === 0; i++) say([described(promptOf(100 + i))]);
    expect(budget.bytes).toBeLessThanOrEqual(3 << 18);
    expect(budget.take(1 << 18)).toBe(true);
  });

  it('gives way to the names of pods as well', () => {
    const { say, held, budget } = foreignRig({ namesBytes: 1 << 18 });
    for (let i = 0; i < 50; i++) say([described(promptOf(100 + i), 4, 8)]);
    expect([budget.bytes > 0, budget.take(1 << 18), budget.bytes]).toEqual([true, true, 1 << 18]);
    expect(budget.take(1)).toBe(false);
    budget.give(1 << 18);
    say([described(promptOf(149), 0, 4)]);
    expect(held(promptOf(149))).toBe(4);
  });

  it('yields, however much it is', () => {
    const { saying } = foreignRig();
    const events = Array.from({ length: 4_096 }, () => described(other, 4, 8));
    const unknown = Array.from({ length: 1_024 }, (_, i) => bare(promptOf(10 + (i % 7)), 0, 8));
    for (const some of [events, unknown]) {
      let turns = 0;
      for (const _ of saying(some)) turns++;
      expect(turns).toBeGreaterThanOrEqual(2);
    }
  });
});

describe('namespaces', () => {
  it('do not run out: of more than there is room for, the one that was silent longest goes', () => {
    const { say, held, listing, lies } = foreignRig();
    for (let i = 0; i < 70; i++) say([described(prompt)], namespaceOf(i), 100 * i);
    expect([listing.namespaces, held(prompt)]).toEqual([[namespaceOf(69)], 8]);
    expect(listing.partOf(namespaceOf(5))).toBeUndefined();
    expect(listing.partOf(namespaceOf(6))).toBeDefined();
    expect(Object.values(lies).every((count) => count === 0)).toBe(true);
    say([bare(prompt, 0, 3, 'CPU')], namespaceOf(2), 7_000);
    expect(held(prompt)).toBe(3);
  });
});

describe('whether nothing of a node can be named', () => {
  const remedyOf = ({ listing }: ReturnType<typeof foreignRig>) => listing.problem?.remedy;

  it('is not said of what lies on a disk, and not of one that has told tokens', () => {
    const rig = foreignRig();
    rig.say([bare(prompt)]);
    expect(rig.listing.problem).toBeUndefined();
    rig.say([bare(prompt, 0, 8, 'CPU')]);
    expect(remedyOf(rig)).toMatch(/say `kvEvents.tokenIdBytes`.*beside SGLang, name no events of it/);
    rig.say([described(other)]);
    expect(rig.listing.problem).toBeUndefined();
    rig.begins();
    rig.say([bare(promptOf(3), 0, 8, 'CPU')]);
    expect(rig.listing.problem).toBeUndefined();
    rig.begins('restarted');
    rig.say([bare(promptOf(3), 0, 8, 'CPU')]);
    expect(remedyOf(rig)).toMatch(/tokenIdBytes/);
  });

  it('has another remedy where its blocks are of another size, and that is counted', () => {
    const rig = foreignRig();
    rig.say([{ ...described(prompt), blockSize: 2 * blockTokens } as ReturnType<typeof described>]);
    expect(rig.listing.problem).toEqual({
      what: 'none of its blocks can be named, as they have 8 tokens and those of the pods 4',
      remedy: "let the node's engines have blocks as the other pods",
    });
    expect(rig.lies.block_size).toBe(1);
    rig.say([described(prompt)]);
    expect([rig.listing.problem, rig.held(prompt)]).toEqual([undefined, length]);
  });

  it('is not said of adapters and salts', () => {
    const rig = foreignRig();
    rig.say([{ ...described(prompt), loraId: 1, loraName: 'a' } as ReturnType<typeof described>]);
    expect([rig.listing.problem, rig.told.unnamed, rig.held(prompt)]).toEqual([undefined, 8, 0]);
  });
});

const wait = { timeout: 20_000, interval: 5 };

it('a pod counts for what its node brought as soon as the other node tells the tokens of it', async () => {
  const told = new Map<string, (events: readonly KvEvent[]) => void>();
  const subscribe: Subscribe = ({ endpoint }) => ({
    connected: true,
    async *packed() {
      const decoder = new PackedDecoder({ tokens: true });
      for (let seq = 0; ; seq++) {
        const events = await new Promise<readonly KvEvent[]>((resolve) => told.set(endpoint, resolve));
        const batch = decoder.decode(encodeBatch({ ts: 1, events, dataParallelRank: null }));
        yield [{ kind: 'batch', seq, topic: `kv@${first}`, batch } satisfies StreamItem<PackedBatch>];
      }
    },
    resync: () => {},
    stats: () => ({ gaps: 0, restarts: 0, snapshots: 0, reconnects: 0 }) as ReturnType<ReturnType<Subscribe>['stats']>,
    close: () => {},
  });
  const feed = new IndexFeed({ maxBytes: 4 << 20, blockTokens, logger: { info: () => {}, warn: () => {} }, subscribe });
  try {
    const workers = ['prefill', 'decode'].map((name, number): FollowedWorker => {
      const record = workerRecordSchema.parse({ name, kind: 'openai', address: 'http://x', node: name });
      const node = nodeRecordSchema.parse({ name, events: { endpoint: `ipc:///tmp/${name}` } });
      return { number, record, node };
    });
    feed.follow(workers);
    const held = (): number[] => feed.match(prompt.keys, [0, 1]).map(({ blocks }) => blocks);
    const say = async (name: string, event: KvEvent): Promise<void> => {
      await vi.waitFor(() => expect(told.has(`ipc:///tmp/${name}`)).toBe(true), wait);
      told.get(`ipc:///tmp/${name}`)!([event]);
    };
    await say('decode', bare(prompt, 0, 8, 'CPU'));
    await vi.waitFor(() => expect(feed.state().totals.unnamedBlocks).toBe(8), wait);
    expect(held()).toEqual([0, 0]);
    await say('prefill', described(prompt));
    await vi.waitFor(() => expect(held()).toEqual([8, 8]), wait);
    feed.follow([]);
    expect(feed.state().namesBytes).toBe(0);
  } finally {
    feed.close();
  }
});
