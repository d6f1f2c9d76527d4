/**
 * Mutation check of the simulation's checkers: each of these defects, of a kind that users of today's systems have met
 * (docs/lessons.md), is planted in the real code and must be found within a few seeds, by the check that is there for it. Where no
 * defect is planted, the same worlds keep all laws.
 */

import { native } from '@kvtier/data-plane';
import { Outside } from '@kvtier/errors';
import { Awaiting, BlockTurns, Deadlines, Load, Pins, SessionWrites, Tenants } from '@kvtier/placement/testing';
import { RedisClient } from '@kvtier/redis';
import { ArenaTier, Followers, SlotAllocator } from '@kvtier/tiers';
import { DeviceFiles, DiskIo, type ObjectRow } from '@kvtier/tiers/disk/testing';
import { PeerDirectory } from '@kvtier/tiers/peer/testing';
import { Directory, scripts } from '@kvtier/tiers/redis/testing';
import { Discovery, PackWriter, S3Api } from '@kvtier/tiers/s3/testing';
import { type Pages, SizeClass } from '@kvtier/tiers/testing';
import { afterEach, expect, it } from 'vitest';
import { chainOf, contentOf, spaces } from './contents.ts';
import { type SimOptions, simulate } from './simulation.ts';
import { checksums } from './virtual-arena.ts';

const maxSeeds = 40;
let mend: (() => void)[] = [];
afterEach(() => {
  for (const undo of mend) undo();
  mend = [];
});

/** Replace a method; `by` gets the original. */
function plant<T extends object, K extends keyof T>(prototype: T, name: K, by: (original: T[K]) => T[K]): void {
  const original = prototype[name];
  prototype[name] = by(original);
  mend.push(() => {
    prototype[name] = original;
  });
}

/** True in one of so many calls. */
function oneIn(count: number): () => boolean {
  let calls = 0;
  return () => ++calls % count === 0;
}

/** Worlds in which a defect is likely to show: whatever else changes in the code, the first few seeds must find it. */
const worlds: Record<string, Partial<SimOptions>> = {
  'a page of a directory is never told': { tiers: ['peer'] },
  'a peer that comes back is told over what is still going': { tiers: ['peer'], faults: ['peers reset'] },
  'bytes are trusted without a checksum': { tiers: ['peer'], faults: ['peer flips'] },
  's3: a read does not ask for the pack that it means': { tiers: ['s3'], faults: ['kill', 's3 forgets'] },
  's3: stored is told before the pack is': { tiers: ['s3'] },
  's3: other nodes are followed for a while only': { tiers: ['s3'] },
  's3: credentials are waited for without a limit': { tiers: ['s3'], faults: ['s3 credentials'] },
  'redis: a past that was undone is not noticed': { tiers: ['redis'], faults: ['redis goes back'] },
  'redis: a payload travels as an argument': { tiers: ['redis'] },
};

/** What must be found of each: another finding is luck, or the doing of the plant. */
const findings: Record<string, RegExp> = {
  'ready is told before the bytes have arrived': /^law 1: \S+\.disk read: /,
  'calls to a file system do not wait for each other': /^law 3: .*calls to its file system: \d+, 1 allowed$/,
  'bytes are trusted without a checksum': /^law 1: \S+\.peer read: the payload at \d+ is not that of block/,
  'what was awaited and came wakes nobody': /^law 2: \w+ is awaited, and lies in the arena$/,
  'a load that has ended waits on': /^law 5: .*blocks are awaited, by its engines/,
  'a pin is not given back': /^law 5: left behind: .*pinned_blocks/,
  'a reservation that is left between two steps keeps what it has pinned': /^law 5: left behind: .*pinned_blocks/,
  'what is let go over several turns is forgotten after the first':
    /^law (2: .*bytes of the arena belong to nobody|5: left behind: .*pinned_blocks)/,
  'pinned blocks are evicted': /^law 1: .*(a lease|a ready block|is to write|has written): /,
  'a slot is given away twice': /^law 1: the slot at \d+ is reserved twice$/,
  'a quota is not asked': /^law 3: .*tenant small in the arena: \d+, \d+ allowed$/,
  'the end of a block is not in its object': /^law 1: .*after its time to live$/,
  'what has ended stays': /^law 1: .* holds a block .* after its time to live$/,
  'a load has no deadline': /^law 2: a load of \d+ ms has not ended by its deadline$/,
  'a removal is not told': /^InvariantError: residency: a record names the wrong tiers|^law 6: .*, which was told$/,
  'a page of a directory is never told': /^law 6: peers are not seen as they are: /,
  'a peer that comes back is told over what is still going':
    /^InvariantError: peer directory: who is going holds something/,
  's3: a read does not ask for the pack that it means': /^law 1: s3: \d+ blocks were corrupt, with \d+ damaged bytes$/,
  's3: stored is told before the pack is': /^law 1: s3: \S+: the header at \d+ is that of another block$/,
  's3: other nodes are followed for a while only': /^law 2: the bucket is not seen as it is/,
  's3: credentials are waited for without a limit': /^law 5: left behind: .*writedown\.s3\.pending_bytes/,
  'redis: a past that was undone is not noticed': /^law 2: the directory in redis is not seen as it is/,
  'redis: a payload travels as an argument': /^law 4: a command to redis has \d+ bytes beside the names in it$/,
};

const defects: Record<string, () => void> = {
  'ready is told before the bytes have arrived': () =>
    plant(
      DiskIo.prototype,
      'read',
      (read) =>
        function (this: DiskIo, rows, identities) {
          const early = rows.map((row): ObjectRow => ({ ...row, onDone: () => {} }));
          read.call(this, early, identities);
          for (const { onDone, bytes } of rows) onDone(bytes);
        },
    ),
  'calls to a file system do not wait for each other': () =>
    plant(
      DeviceFiles.prototype,
      'run',
      () =>
        function (this: DeviceFiles, call) {
          return call(this.handle!);
        },
    ),
  'bytes are trusted without a checksum': () => {
    checksums.areCompared = false;
    mend.push(() => {
      checksums.areCompared = true;
    });
  },
  'what was awaited and came wakes nobody': () => plant(Awaiting.prototype, 'arrived', () => () => {}),
  'a load that has ended waits on': () => {
    const now = oneIn(5);
    plant(
      Awaiting.prototype,
      'delete',
      (remove) =>
        function (this: Awaiting, waiter) {
          if (!now()) remove.call(this, waiter);
        },
    );
  },
  'a pin is not given back': () => {
    const now = oneIn(50);
    plant(
      Pins.prototype,
      'unpin',
      (unpin) =>
        function (this: Pins, ...args) {
          if (!now()) unpin.apply(this, args);
        },
    );
  },
  'a reservation that is left between two steps keeps what it has pinned': () =>
    plant(
      SessionWrites.prototype,
      'reserve',
      (reserve) =>
        function* (this: SessionWrites, ...args) {
          const steps = reserve.apply(this, args);
          for (let step = steps.next(); ; step = steps.next()) {
            if (step.done) return step.value;
            yield; // whoever ends this here ends nothing of that
          }
        },
    ),
  'what is let go over several turns is forgotten after the first': () =>
    plant(BlockTurns.prototype, 'add', () => (work, onDone) => {
      for (let left = 3; left > 0; left--) if (work.next().done) return onDone();
    }),
  'pinned blocks are evicted': () =>
    plant(
      SizeClass.prototype,
      'coldest',
      () =>
        function (this: SizeClass<never>) {
          return this.coldestOf(() => true);
        },
    ),
  'a slot is given away twice': () => {
    const now = oneIn(40);
    let last: number | undefined;
    plant(
      SlotAllocator.prototype,
      'allocate',
      (allocate) =>
        function (this: SlotAllocator, slotBytes) {
          if (!now() || last === undefined) last = allocate.call(this, slotBytes);
          return last;
        },
    );
  },
  'a quota is not asked': () => plant(Tenants.prototype, 'reserve', () => () => true),
  'the end of a block is not in its object': () =>
    plant(
      ArenaTier.prototype,
      'publish',
      (publish) =>
        function (this: ArenaTier, namespace, block, slot) {
          publish.call(this, namespace, { ...block, expiresS: 0 }, slot);
        },
    ),
  'what has ended stays': () =>
    plant(
      Deadlines.prototype,
      'set',
      (set) =>
        function (this: Deadlines, row, namespace, hash, second, nowS) {
          set.call(this, row, namespace, hash, second + 60, nowS);
        },
    ),
  'a load has no deadline': () =>
    plant(
      Load.prototype,
      'start',
      (start) =>
        function (this: Load, deadlineMs, awaitMs) {
          start.call(this, deadlineMs === 0 ? 0 : 1e9, awaitMs);
        },
    ),
  'a removal is not told': () => {
    const now = oneIn(30);
    plant(
      Followers.prototype,
      'removed',
      (removed) =>
        function (this: Followers, ...args) {
          if (!now()) removed.apply(this, args);
        },
    );
  },
  'a page of a directory is never told': () => {
    const now = oneIn(20);
    plant(
      Followers.prototype,
      'followInPages',
      (followInPages) =>
        function (this: Followers, listener, pages) {
          const next = (): ReturnType<Pages['next']> => {
            const page = pages.next();
            return now() && page.done !== true ? pages.next() : page;
          };
          return followInPages.call(this, listener, { next });
        },
    );
  },
  'a peer that comes back is told over what is still going': () =>
    plant(
      PeerDirectory.prototype,
      'drop',
      (drop) =>
        function (this: PeerDirectory, bits) {
          const next = drop.call(this, bits);
          let slices = 0;
          return () => (++slices > 2 ? undefined : next());
        },
    ),
  's3: a read does not ask for the pack that it means': () =>
    plant(
      S3Api.prototype,
      'get',
      (get) =>
        function (this: S3Api, key, _, ...rest) {
          return get.call(this, key, null, ...rest);
        },
    ),
  's3: stored is told before the pack is': () =>
    plant(
      PackWriter.prototype,
      'append',
      (append) =>
        function (this: PackWriter, job) {
          append.call(this, { ...job, onDone: () => {} });
          job.onDone(true);
        },
    ),
  's3: other nodes are followed for a while only': () => {
    let calls = 0;
    plant(
      Discovery.prototype,
      'refresh',
      (refresh) =>
        function (this: Discovery, deadlineMs) {
          return ++calls > 20 ? Promise.resolve() : refresh.call(this, deadlineMs);
        },
    );
  },
  's3: credentials are waited for without a limit': () =>
    plant(
      Outside.prototype,
      'ask',
      (ask) =>
        function (this: Outside<object>, limitMs: number, call: never, what?: string) {
          return ask.call(this, what === 'credentials' ? 1e9 : limitMs, call, what);
        } as typeof ask,
    ),
  'redis: a past that was undone is not noticed': () =>
    plant(
      Directory.prototype,
      'poll',
      (poll) =>
        function (this: Directory) {
          return poll.call(this).catch((error: Error) => {
            if (!/past|forgotten/.test(error.message)) throw error;
          });
        },
    ),
  'redis: a payload travels as an argument': () => {
    const { payload } = contentOf(spaces[0]!.namespace, chainOf(0, 0, 0, 1)[0]!);
    plant(
      RedisClient.prototype,
      'run',
      (run) =>
        function (this: RedisClient, script, keys, args) {
          return run.call(this, script, keys, script === scripts.commitScript ? [...args, payload] : args);
        },
    );
  },
};

it('a long turn counts when the same world has it again', async () => {
  const spinAt = async (isIt: (call: number) => boolean): Promise<string | undefined> => {
    let calls = 0;
    plant(
      Tenants.prototype,
      'reserve',
      (reserve) =>
        function (this: Tenants, ...args) {
          const end = native.threadCpuMs() + (isIt(++calls) ? 60 : 0);
          while (native.threadCpuMs() < end);
          return reserve.apply(this, args);
        },
    );
    return (await simulate({ seed: 1, steps: 300 })).failure;
  };
  expect(await spinAt((call) => call === 3)).toBeUndefined();
  expect(await spinAt((call) => call > 3)).toMatch(/^law 2: node\d.*: a turn of \d+ ms, 50 allowed$/);
});

it.each(Object.entries(defects))('%s: found', async (name, planted) => {
  planted();
  const others: string[] = [];
  let found = false;
  for (let seed = 1; seed <= maxSeeds && !found; seed++) {
    const { failure } = await simulate({ seed, steps: 1_500, ...worlds[name] });
    if (failure === undefined) continue;
    // The plant itself is broken: whatever that breaks is no finding.
    expect(failure).not.toMatch(/TypeError|is not a function/);
    found = findings[name]!.test(failure);
    if (!found) others.push(failure.split('\n')[0]!);
  }
  expect(found, `found instead: ${others.join('; ')}`).toBe(true);
});

it.each(Object.entries(worlds))('nothing is found without it: %s', async (_, world) => {
  expect((await simulate({ seed: 1, steps: 1_500, ...world })).failure).toBeUndefined();
});
