/** Partitions that go and come back one by one: what is listed of them, when, and what others are told. */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog } from '../kit/testing/objects.ts';
import { type Directory, NewerDirectory } from './directory.ts';
import { Partitions, partitionOf } from './partitions.ts';
import type { RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import type { RedisTierOptions } from './settings.ts';
import type { Values } from './values.ts';

const count = 4;
const [one, two] = [namespaceNamed('one'), namespaceNamed('two')];
const hashes = Array.from({ length: 20_000 }, (_, i) => hashNamed(i));
const gone = new KvError('IO', 'redis: Connection is closed.', { retry: true });
const silent = new KvError('IO', 'redis: Command timed out', { retry: true });
const foreign = new KvError(
  'CONFIG',
  'redis: kvtier:{p1}:blocks is a string; choose another keyPrefix, or remove that key',
);
const newer = new NewerDirectory('redis: kvtier:{p1}:ledger has format kvtier-redis-3');
const turn = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));

/** A millisecond at each look: a slice is some looks long, whatever the machine does. */
beforeEach(() => {
  let nowMs = performance.now();
  vi.spyOn(performance, 'now').mockImplementation(() => nowMs++);
});
afterEach(() => void vi.restoreAllMocks());

/** Directories that list what `has` says, in both namespaces. */
class Rig {
  readonly index = new RedisIndex();
  readonly calls: string[] = [];
  /** What fails, by call: "open 2", "look 2". */
  readonly failing = new Map<string, KvError>();
  /** Calls without an answer. */
  readonly silent = new Set<string>();
  /** Those that have no ledger. */
  readonly absent = new Set<number>();
  /** By partition: what INFO says. */
  readonly infos = new Map<number, string | Promise<string>>();
  #isListing = false;
  readonly directories: Directory[];
  readonly partitions: Partitions;

  constructor(has: readonly HashKey[] = hashes, mode = 'cluster') {
    this.directories = Array.from({ length: count }, (_, index) => {
      const call = (name: string): void => {
        this.calls.push(`${name} ${index}`);
        const error = this.failing.get(`${name} ${index}`);
        if (error !== undefined) throw error;
      };
      const directory = {
        ...{ partition: { index, base: `{p${index}}:` }, isOpen: false, nonsense: 0, capacityBytes: 256 },
        look: async () => {
          const error = this.failing.get(`look ${index}`);
          if (error !== undefined) throw error;
          if (this.silent.has(`look ${index}`)) await new Promise(() => {});
          return !this.absent.has(index);
        },
        open: async () => {
          call('open');
          if (this.silent.has(`open ${index}`)) await new Promise(() => {});
          this.calls.push(`listed ${this.#listedOf(index)}`);
          directory.isOpen = true;
          return true;
        },
        list: async () => {
          if (!directory.isOpen) throw new KvError('CANCELLED', 'redis: it was lost meanwhile', { retry: true });
          if (this.#isListing) throw new Error('two are listed at once');
          this.#isListing = true;
          await Promise.resolve();
          this.#isListing = false;
          for (const hash of has) if (partitionOf(hash, count) === index) this.set(hash);
          call('list');
        },
        poll: async () => {},
        end: () => {
          directory.isOpen = false;
        },
      };
      return directory as unknown as Directory;
    });
    const commands = {
      ...{
        address: () => undefined,
        command: async ({ index }: { index: number }) => (await this.infos.get(index)) ?? '',
      },
      resetServer: ({ index }: { index: number }) => this.calls.push(`reset ${index}`),
    } as unknown as RedisCommands;
    const values = { probe: async () => 'ok' } as unknown as Values;
    const options = { settings: { bytes: 1024, mode }, log: silentLog } as unknown as RedisTierOptions;
    this.partitions = new Partitions(options, this.index, commands, values, this.directories);
  }

  set(hash: HashKey): void {
    for (const space of [one, two]) this.index.set(space, hash, '20256 4096 n.1');
  }

  /** Numbers of those that came in. */
  async enter(): Promise<number[]> {
    await this.partitions.mended();
    const { directories } = await this.partitions.open(false);
    await this.partitions.list(directories);
    return directories.filter((each) => this.partitions.isIn(each)).map(({ partition }) => partition.index);
  }

  #listedOf(number: number): number {
    return this.held().filter((hash) => partitionOf(hash, count) === number).length;
  }

  held(): HashKey[] {
    const held: HashKey[] = [];
    this.index.follow(({ namespace, hashes: some }) => held.push(...(namespace?.key === one.key ? some : [])))();
    return held;
  }
}

const kept = (...out: number[]): HashKey[] => hashes.filter((hash) => !out.includes(partitionOf(hash, count)));

it('those that fail stay out, with their reason, and nothing of them is listed', async () => {
  const rig = new Rig();
  rig.failing.set('open 1', gone).set('list 2', silent);
  expect(await rig.enter()).toEqual([0, 3]);
  expect([rig.partitions.outCount, rig.partitions.reason]).toEqual([2, `2 of 4 partitions are out: ${gone.message}`]);
  await rig.partitions.close();
  expect(new Set(rig.held())).toEqual(new Set(kept(1, 2)));
  expect(rig.calls.filter((call) => call.startsWith('reset'))).toEqual(['reset 2']); // it may be connected to nothing
  rig.failing.clear();
  expect(await rig.enter()).toEqual([1, 2]);
  expect([rig.partitions.outCount, rig.partitions.reason, rig.index.count]).toEqual([0, '', 2 * hashes.length]);
});

it('one that leaves is unlisted in slices, told as removed, and opened anew only then', async () => {
  const rig = new Rig();
  await rig.enter();
  const told = { cleared: 0, removed: new Set<HashKey>() };
  rig.index.follow(({ kind, hashes: some }) => {
    if (kind === 'cleared') told.cleared++;
    if (kind === 'removed') for (const hash of some) told.removed.add(hash);
  });
  rig.calls.length = 0;
  rig.partitions.leave(rig.directories[0]!, gone);
  rig.partitions.leave(rig.directories[2]!, gone);
  const entering = rig.enter();
  await turn();
  expect(told.removed.size).toBeGreaterThan(0);
  expect(rig.index.count).toBeGreaterThan(2 * kept(0, 2).length);
  expect(rig.calls).toEqual([]);
  expect(await entering).toEqual([0, 2]);
  expect(rig.calls).toEqual(['open 0', 'listed 0', 'open 2', 'listed 0', 'list 0', 'list 2']);
  expect([told.cleared, told.removed.size]).toEqual([0, hashes.length - kept(0, 2).length]);
  rig.index.checkIntegrity();
});

it('a server that cannot hold its share: who starts changes nothing at any, who was in service leaves that one out', async () => {
  const rig = new Rig();
  rig.infos.set(2, 'maxmemory:1023\r\nmaxmemory_policy:noeviction\r\n');
  const { directories, failed } = await rig.partitions.open(true);
  expect([directories, failed.map(({ code }) => code), rig.calls]).toEqual([[], ['CONFIG'], []]);
  expect(await rig.enter()).toEqual([0, 1, 3]);
  expect(rig.calls.filter((call) => call.startsWith('open'))).toEqual(['open 0', 'open 1', 'open 3']);
});

it('keys of others in one: who starts opens none after it, who was in service leaves that one out', async () => {
  const rig = new Rig();
  rig.failing.set('open 1', foreign);
  expect((await rig.partitions.open(true)).failed).toEqual([foreign]);
  expect(rig.calls).toEqual(['open 0', 'listed 0', 'open 1']);
  expect(await rig.enter()).toEqual([0, 2, 3]);
});

it('one of another version: none is opened, made or swept, whoever comes in', async () => {
  const rig = new Rig();
  rig.absent.add(0).add(2);
  rig.failing.set('look 3', newer);
  for (const isStrict of [true, false]) {
    const { directories, failed } = await rig.partitions.open(isStrict);
    expect([directories, failed, rig.calls]).toEqual([[], [newer], []]);
  }
  rig.failing.clear();
  expect(await rig.enter()).toEqual([0, 1, 2, 3]);
});

it('one that turns out to be of another version when others are open: none after it is', async () => {
  const rig = new Rig();
  rig.failing.set('open 1', newer);
  expect((await rig.partitions.open(false)).failed).toEqual([newer]);
  expect(rig.calls).toEqual(['open 0', 'listed 0', 'open 1']);
});

it('while others are in, none is made beside one of another version; one that is there is opened', async () => {
  const rig = new Rig();
  await rig.enter();
  rig.calls.length = 0;
  for (const index of [0, 1, 3]) rig.partitions.leave(rig.directories[index]!, gone);
  rig.absent.add(0);
  rig.failing.set('look 3', newer);
  rig.failing.set('look 2', silent); // it says nothing: that is no reason
  rig.partitions.mend(() => {});
  await rig.partitions.mended();
  expect(rig.calls).toEqual(['open 1', 'listed 0', 'list 1']);
  expect(rig.partitions.reason).toBe(`2 of 4 partitions are out: ${newer.message}`);
  rig.failing.delete('look 3');
  rig.partitions.mend(() => {});
  await rig.partitions.mended();
  expect(rig.partitions.outCount).toBe(0);
});

it('one whose server says nothing holds up no other, and is not asked again before it has ended', async () => {
  const rig = new Rig();
  rig.silent.add('open 1').add('look 1');
  const came: number[] = [];
  const mend = (): void => rig.partitions.mend(({ partition }) => came.push(partition.index));
  mend();
  while (came.length < 3) await turn();
  expect([came, rig.partitions.outCount]).toEqual([[0, 2, 3], 1]);
  rig.calls.length = 0;
  rig.partitions.leave(rig.directories[0]!, gone);
  mend();
  while (came.length < 4) await turn();
  expect([came, rig.calls]).toEqual([
    [0, 2, 3, 0],
    ['open 0', 'listed 0', 'list 0'],
  ]);
  expect(new Set(rig.held())).toEqual(new Set(kept(1)));
});

it('all that end while one is tried by itself: it is tried no more', async () => {
  const rig = new Rig();
  let answer = (_: string): void => {};
  rig.infos.set(0, new Promise((resolve) => (answer = resolve)));
  for (const index of [1, 2, 3]) rig.failing.set(`open ${index}`, gone);
  rig.partitions.mend(() => {});
  await turn();
  rig.partitions.endAll('lost');
  rig.calls.length = 0;
  answer('');
  await rig.partitions.mended();
  expect([rig.calls, rig.partitions.reason]).toEqual([[], '4 of 4 partitions are out: lost']);
});

it('where one server has all, one that fails ends the opening, and the listing', async () => {
  const rig = new Rig(hashes, 'single');
  rig.failing.set('open 1', silent);
  expect((await rig.partitions.open(false)).failed).toEqual([silent]);
  expect(rig.calls.filter((call) => call.startsWith('open '))).toEqual(['open 0', 'open 1']);
  rig.failing.clear();
  rig.failing.set('list 1', gone);
  const { directories } = await rig.partitions.open(false);
  expect(await rig.partitions.list(directories)).toEqual([gone]);
  expect(rig.calls.filter((call) => call.startsWith('list '))).toEqual(['list 0', 'list 1']);
  await rig.partitions.close();
});

it('all that end while one is unlisted: what is listed after that stays', async () => {
  const rig = new Rig();
  await rig.enter();
  rig.partitions.leave(rig.directories[0]!, gone);
  await turn();
  rig.partitions.endAll('lost');
  rig.index.clear();
  expect(await rig.enter()).toEqual([0, 1, 2, 3]);
  await rig.partitions.close();
  expect(rig.index.count).toBe(2 * hashes.length);
  rig.index.checkIntegrity();
});

it('whatever goes, comes, and is removed meanwhile, and when: in the end what is in is listed, and nothing else', async () => {
  const some = hashes.slice(0, 1_500);
  const step = fc.record({
    kind: fc.constantFrom('leave', 'enter', 'mend', 'turn', 'fail', 'drop', 'lose'),
    at: fc.nat({ max: count - 1 }),
  });
  const property = fc.asyncProperty(fc.array(step, { maxLength: 30 }), async (steps) => {
    const rig = new Rig(some);
    await rig.enter();
    const followed = new Set<HashKey>();
    rig.index.follow(({ kind, namespace, hashes: told }) => {
      if (kind === 'cleared') followed.clear();
      else if (namespace.key === one.key) for (const hash of told) followed[kind === 'stored' ? 'add' : 'delete'](hash);
    });
    let entering: Promise<unknown> = Promise.resolve();
    for (const { kind, at } of steps) {
      const directory = rig.directories[at]!;
      if (kind === 'leave' && rig.partitions.isIn(directory)) rig.partitions.leave(directory, gone);
      if (kind === 'enter') entering = entering.then(() => rig.enter());
      if (kind === 'mend') entering = entering.then(() => rig.partitions.mend(() => {}));
      if (kind === 'turn') await turn();
      if (kind === 'lose') {
        rig.partitions.endAll('lost');
        rig.index.clear();
      }
      if (kind === 'fail') rig.failing.set(`open ${at}`, gone);
      if (kind === 'drop') for (const hash of some.slice(at * 9, at * 9 + 3)) rig.index.remove(one, hash);
    }
    await entering;
    await rig.partitions.close();
    rig.index.checkIntegrity();
    const held = rig.held();
    expect(new Set(held)).toEqual(followed);
    for (const hash of held) expect(rig.partitions.isIn(rig.directories[partitionOf(hash, count)]!)).toBe(true);
    rig.failing.clear();
    const listed = rig.directories.map((each) => rig.partitions.isIn(each));
    await rig.enter();
    expect(rig.partitions.outCount).toBe(0);
    const now = new Set(rig.held());
    for (const hash of some) if (!listed[partitionOf(hash, count)]) expect(now.has(hash)).toBe(true);
  });
  await fc.assert(property, { numRuns: 30 });
});

it('a block is in the same partition at every node, for ever', () => {
  const hash = (hex: string): HashKey => Buffer.from(hex, 'hex').toString('latin1') as HashKey;
  const some = ['00000000000000ff', '0123456789abcdef', 'ffffffffffffffff', '000000008000000a'].map((start) =>
    hash(start.padEnd(64, '7')),
  );
  const inEach = (count: number): number[] => some.map((each) => partitionOf(each, count));
  expect([1, 3, 16, 256].map(inEach)).toEqual([
    [0, 0, 0, 0],
    [0, 2, 0, 0],
    [15, 15, 15, 10],
    [255, 239, 255, 10],
  ]);
});
