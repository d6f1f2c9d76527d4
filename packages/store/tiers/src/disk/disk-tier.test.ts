/** The disk tier over restarts, damage and a world that refuses. What every tier must do is in conformance.test.ts. */
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { decodeHeader, type HashKey, headerBytes, slotBytesFor } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('disk');
const capacityBytes = 4 << 20;
const segmentBytes = 256 << 10;
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));

let bench: TestBench;
let dir: string;
beforeEach(() => {
  bench = new TestBench();
  dir = join(bench.dir, 'segments');
});
afterEach(() => bench.dispose());

const open = (options: Partial<DiskTierOptions> = {}): Promise<DiskTier> =>
  DiskTier.open({
    ...{
      dir,
      capacityBytes,
      segmentBytes,
      arena: bench.arena,
      slots: bench.tier,
      log: silentLog,
      io: { backend: 'threads' },
    },
    ...options,
  });
const segmentFiles = (): string[] => readdirSync(dir).filter((name) => name.endsWith('.kvs'));
/** A segment may be renamed or removed between the listing and its turn: then it counts as nothing. */
const bytesOnDisk = (): number =>
  readdirSync(dir).reduce(
    (sum, name) => sum + (statSync(join(dir, name), { throwIfNoEntry: false })?.blocks ?? 0) * 512,
    statSync(dir).blocks * 512,
  );
/** Everything as it lies on the disk now. A segment that is renamed between the listing and its turn has another listing begun with. */
function copied(attempts = 100): { name: string; bytes: Buffer }[] {
  try {
    return readdirSync(dir).map((name) => ({ name, bytes: readFileSync(join(dir, name)) }));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT' || attempts === 1) throw error;
    return copied(attempts - 1);
  }
}
/** As after SIGKILL: no close, no checkpoint. */
function crash(tier: DiskTier): () => Promise<void> {
  const copies = copied();
  return async () => {
    await tier.close();
    rmSync(dir, { recursive: true });
    mkdirSync(dir);
    for (const { name, bytes } of copies) writeFileSync(join(dir, name), bytes);
  };
}

const patience = { timeout: 20_000 };

describe('restart', () => {
  it.each(['after a clean close', 'after a crash'])(
    'tells the ends of its objects as it told them before, %s',
    async (how) => {
      const chain = names('end', 30);
      const told = (tier: DiskTier): Map<HashKey, number> => {
        const ends = new Map<HashKey, number>();
        tier.follow((change) => {
          if (change.kind !== 'stored') return;
          for (const [at, hash] of change.hashes.entries()) ends.set(hash, change.expiresS![at]!);
        });
        return ends;
      };
      let tier = await open();
      const live = told(tier);
      const expected = new Map<HashKey, number>();
      for (const [at, hash] of chain.entries()) {
        const end = at % 3 === 0 ? 0 : 2 ** 32 - 1 - at;
        expect(await bench.write(tier, space, [hash], payloadBytes, end)).toEqual(['stored']);
        expected.set(hash, end);
      }
      expect(live).toEqual(expected);
      if (how === 'after a crash') await crash(tier)();
      else await tier.close();
      tier = await open();
      expect(told(tier)).toEqual(expected);
      // The rows are used again: what comes into them has its own end.
      tier.remove(space, chain, 'asked');
      await bench.write(tier, space, chain, payloadBytes);
      expect([...told(tier).values()]).toEqual(chain.map(() => 0));
      await tier.close();
    },
  );

  it('finds everything after a clean close, in the order of its use', async () => {
    const chain = names('clean', 40);
    let tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    tier.touch(space, chain.slice(0, 3));
    await tier.close();
    expect(existsSync(join(dir, 'checkpoint.kvc'))).toBe(true);
    tier = await open();
    expect(tier.lookup(space, chain)).toBe(40);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    tier.checkIntegrity();
    await tier.close();
  });

  it('finds every stored block after a crash, in sealed and in open segments', async () => {
    const chain = names('crash', 50); // 20 to a segment: two sealed, one open
    const tier = await open();
    for (let from = 0; from < 50; from += 5) await bench.write(tier, space, chain.slice(from, from + 5), payloadBytes);
    const restore = crash(tier);
    const before = tier.stats();
    await restore();
    const again = await open();
    expect(again.lookup(space, chain)).toBe(50);
    expect(await bench.read(again, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    expect(again.stats().blocks).toBe(before.blocks);
    expect(again.stats().bytes).toBeLessThanOrEqual(capacityBytes);
    again.checkIntegrity();
    await bench.write(again, space, names('more', 20), payloadBytes);
    expect(again.lookup(space, chain)).toBe(50);
    await again.close();
  });

  it('does not bring back what a former generation of a recycled file held', async () => {
    const tier = await open();
    for (let round = 0; round < 40; round++) await bench.write(tier, space, names(`round ${round}.`, 16), payloadBytes);
    const held = new Set<number>();
    for (let round = 0; round < 40; round++) if (tier.lookup(space, names(`round ${round}.`, 1)) === 1) held.add(round);
    const { blocks } = tier.stats();
    await crash(tier)();
    const again = await open();
    expect(again.stats().blocks).toBeGreaterThanOrEqual(blocks); // what was just evicted may still lie there whole
    for (let round = 0; round < 40; round++) {
      const statuses = await bench.read(again, space, names(`round ${round}.`, 16), payloadBytes);
      if (held.has(round)) expect(statuses[0]).toBe('ready');
      for (const status of statuses) expect(['ready', 'missing']).toContain(status);
    }
    expect(again.stats().corrupt).toBe(0);
    await again.close();
  });

  it('does not bring back what was removed', async () => {
    const chain = names('removed', 30);
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    expect(tier.remove(space, [chain[0]!, chain[29]!], 'corrupt')).toBe(2);
    await tier.close(); // the marks are written
    rmSync(join(dir, 'checkpoint.kvc'));
    const again = await open();
    const statuses = await bench.read(again, space, chain, payloadBytes);
    expect([statuses[0], statuses[29]]).not.toContain('ready');
    expect(statuses.slice(1, 29)).toEqual(chain.slice(1, 29).map(() => 'ready'));
    await again.close();
  });

  it('brings nothing back of segments that were emptied, and writes to them again', async () => {
    const tier = await open();
    const chain = names('emptied', 60); // three segments, the last one open
    await bench.write(tier, space, chain, payloadBytes);
    await vi.waitUntil(() => [...tier.devices[0]!.segments].filter(({ hasFooter }) => hasFooter).length >= 2, patience);
    expect(tier.remove(space, chain.slice(0, 45), 'asked')).toBe(45);
    await vi.waitUntil(
      () => [...tier.devices[0]!.segments].filter(({ state }) => state === 'free').length >= 2,
      patience,
    );
    // What goes from the open one is marked on the disk.
    await vi.waitUntil(() => [...tier.devices[0]!.segments].every(({ erased }) => erased.length === 0), patience);
    tier.checkIntegrity();
    const restore = crash(tier);
    await restore();
    const again = await open();
    expect(again.stats().blocks).toBe(15);
    expect(await bench.read(again, space, chain, payloadBytes)).toEqual(
      chain.map((_, i) => (i < 45 ? 'missing' : 'ready')),
    );
    for (let i = 0; i < 20; i++) await bench.write(again, space, names(`later ${i}.`, 12), payloadBytes);
    again.checkIntegrity();
    expect(again.stats().corrupt).toBe(0);
    expect(bytesOnDisk()).toBeLessThanOrEqual(capacityBytes);
    await again.close();
  });

  it('does not bring back what was removed from an older copy in a segment that was emptied', async () => {
    const tier = await open();
    const chain = names('twice', 4);
    await bench.write(tier, space, chain, payloadBytes);
    const first = [...tier.devices[0]!.segments][0]!;
    for (let i = 0; first.state !== 'free'; i++) {
      await bench.write(tier, space, names(`filler ${i}.`, 1), payloadBytes);
      expect(i).toBeLessThan(2_000);
    }
    expect(tier.lookup(space, chain)).toBe(0);
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    expect(first.state).toBe('free'); // they lie in another one
    expect(tier.remove(space, chain, 'asked')).toBe(4);
    await vi.waitUntil(() => [...tier.devices[0]!.segments].every(({ erased }) => erased.length === 0), patience);
    await crash(tier)();
    const again = await open();
    expect(await bench.read(again, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
    await again.close();
  });

  it('marks what was removed within a moment, and the file system is called once at a time', async () => {
    const chain = names('marked', 50);
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    const odd = chain.filter((_, i) => i % 2 === 1);
    for (const hash of odd) tier.remove(space, [hash], 'asked');
    expect(tier.devices[0]!.files.openCount).toBeLessThanOrEqual(3);
    await vi.waitUntil(() => [...tier.devices[0]!.segments].every(({ erased }) => erased.length === 0), patience);
    await crash(tier)();
    const again = await open();
    expect(await bench.read(again, space, chain, payloadBytes)).toEqual(
      chain.map((_, i) => (i % 2 === 1 ? 'missing' : 'ready')),
    );
    await again.close();
  });

  it('keeps to a budget that became smaller, and leaves foreign files alone', async () => {
    const tier = await open();
    await bench.write(tier, space, names('shrink', 200), payloadBytes);
    await tier.close();
    writeFileSync(join(dir, 'notes.txt'), 'mine');
    writeFileSync(join(dir, 'segment-7.kvs'), 'not one of ours by name');
    const smaller = await open({ capacityBytes: 1 << 20 });
    expect(smaller.stats().bytes).toBeLessThanOrEqual(1 << 20);
    await bench.write(smaller, space, names('later', 100), payloadBytes);
    expect(segmentFiles().length * segmentBytes).toBeLessThanOrEqual(1 << 20);
    expect(readFileSync(join(dir, 'notes.txt'), 'utf8')).toBe('mine');
    expect(existsSync(join(dir, 'segment-7.kvs'))).toBe(true);
    rmSync(join(dir, 'segment-7.kvs'));
    await smaller.close();
    const other = await open({ segmentBytes: 128 << 10 }); // files of two sizes
    for (let i = 0; i < 20; i++) await bench.write(other, space, names(`two sizes ${i}.`, 16), payloadBytes);
    other.checkIntegrity();
    expect(bytesOnDisk()).toBeLessThanOrEqual(capacityBytes);
    await other.close();
  });

  it('is held by one at a time', async () => {
    const tier = await open();
    await expect(open()).rejects.toThrow(expect.objectContaining({ code: 'LOCKED' }));
    await tier.close();
    await (await open()).close();
  });
});

describe('damage', () => {
  const chain = names('damage', 30);
  /** The files of 30 blocks: one sealed segment of 20, one open one of 10; no checkpoint. */
  async function stored(): Promise<{ name: string; bytes: Buffer }[]> {
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    await tier.close();
    return segmentFiles().map((name) => ({ name, bytes: readFileSync(join(dir, name)) }));
  }
  function put(files: { name: string; bytes: Buffer }[]): void {
    for (const { name, bytes } of files) writeFileSync(join(dir, name), bytes);
    rmSync(join(dir, 'checkpoint.kvc'), { force: true });
  }
  /** Reads everything; TestBench.read throws on a wrong block. Returns how many are right. */
  async function survivors(): Promise<number> {
    const tier = await open();
    const statuses = await bench.read(tier, space, chain, payloadBytes);
    for (const status of statuses) expect(['ready', 'missing', 'corrupt']).toContain(status);
    expect(tier.stats().corrupt).toBe(statuses.filter((status) => status === 'corrupt').length);
    expect(tier.stats().inService).toBe(true);
    tier.checkIntegrity();
    expect(bytesOnDisk()).toBeLessThanOrEqual(capacityBytes);
    await tier.close();
    return statuses.filter((status) => status === 'ready').length;
  }

  it('never delivers a wrong block for any flipped byte', async () => {
    const files = await stored();
    put(files);
    expect(await survivors()).toBe(30);
    const objectBytes = slotBytesFor(payloadBytes);
    const places = [
      ...Array.from({ length: 24 }, (_, i) => i * 3), // segment header
      ...Array.from({ length: 36 }, (_, i) => 4096 + i * 7), // object header
      ...Array.from({ length: 20 }, (_, i) => 4096 + headerBytes + i * 599), // payload
      4096 + objectBytes + 120, // length of the second object's payload
      ...Array.from({ length: 20 }, (_, i) => segmentBytes - 1 - i * 61), // footer
    ];
    const property = fc.asyncProperty(
      fc.constantFrom(...files.keys()),
      fc.integer({ min: 1, max: 255 }),
      fc.integer({ min: 0, max: segmentBytes - 1 }),
      async (number, mask, random) => {
        put(files.map((file, i) => (i === number ? { ...file, bytes: flipped(file.bytes, random, mask) } : file)));
        await survivors();
      },
    );
    await fc.assert(property, { numRuns: 40 });
    for (const at of places) {
      put(files.map((file, i) => (i === 0 ? { ...file, bytes: flipped(file.bytes, at, 0x41) } : file)));
      await survivors();
    }
  });

  it('a block found damaged is gone for good, and can be written anew', async () => {
    const files = await stored();
    put(files.map((file, i) => (i === 0 ? { ...file, bytes: flipped(file.bytes, 4096 + headerBytes + 5, 1) } : file)));
    expect(await survivors()).toBe(29);
    const tier = await open();
    expect(tier.stats().blocks).toBe(29);
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(
      chain.map((_, i) => (i === 0 ? 'stored' : 'held')),
    );
    await tier.close();
    expect(await survivors()).toBe(30);
  });

  it('never delivers a wrong block from a file that was cut, also under its feet', async () => {
    const files = await stored();
    for (const bytes of [0, 1, 4095, 4096, 4097, 20_000, 16 * 4096, segmentBytes - 4096, segmentBytes - 1]) {
      put(files);
      truncateSync(join(dir, files[0]!.name), bytes);
      expect(await survivors()).toBe(10);
    }
    put(files);
    const tier = await open();
    truncateSync(join(dir, files[0]!.name), 40_000);
    const statuses = await bench.read(tier, space, chain, payloadBytes);
    expect(statuses.filter((status) => status === 'ready').length).toBe(12);
    expect(statuses.filter((status) => status === 'corrupt').length).toBe(18);
    await tier.close();
  });

  it('takes a whole object of another place for what it is', async () => {
    const files = await stored();
    const sealed = files[0]!.bytes;
    const objectBytes = slotBytesFor(payloadBytes);
    const swapped = Buffer.from(sealed); // two sound objects change places
    sealed.copy(swapped, 4096, 4096 + objectBytes, 4096 + 2 * objectBytes);
    sealed.copy(swapped, 4096 + objectBytes, 4096, 4096 + objectBytes);
    put([{ ...files[0]!, bytes: swapped }, ...files.slice(1)]);
    expect(await survivors()).toBe(28);
    put(files); // segments that exchanged their names
    renameSync(join(dir, files[0]!.name), join(dir, 'x'));
    renameSync(join(dir, files[1]!.name), join(dir, files[0]!.name));
    renameSync(join(dir, 'x'), join(dir, files[1]!.name));
    expect(await survivors()).toBe(0);
  });

  it('does without a damaged checkpoint', async () => {
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    await tier.close();
    const path = join(dir, 'checkpoint.kvc');
    writeFileSync(path, flipped(readFileSync(path), 100, 1));
    expect(await survivors()).toBe(30);
  });

  const flipped = (bytes: Buffer, at: number, mask: number): Buffer => {
    const copy = Buffer.from(bytes);
    copy[at] = copy[at]! ^ mask;
    return copy;
  };
});

describe('a world that refuses', () => {
  it('refuses a capacity that holds no two segments, and a folder that cannot be written', async () => {
    await expect(open({ capacityBytes: 300 << 10 })).rejects.toThrow(expect.objectContaining({ code: 'CONFIG' }));
    writeFileSync(join(bench.dir, 'file'), '');
    await expect(open({ dir: join(bench.dir, 'file', 'segments') })).rejects.toThrow(KvError);
  });

  it('refuses what is too large, and writes beyond its bound', async () => {
    const tier = await open({ maxPendingBytes: 3 * slotBytesFor(payloadBytes) });
    expect(await bench.write(tier, space, [hashNamed('large')], segmentBytes)).toEqual(['refused']);
    const statuses = await bench.write(tier, space, names('bound', 5), payloadBytes);
    expect(statuses).toEqual(['stored', 'stored', 'stored', 'refused', 'refused']);
    expect(await bench.write(tier, space, names('bound', 5).slice(3), payloadBytes)).toEqual(['stored', 'stored']);
    expect(tier.stats().refused).toBe(3);
    await tier.close();
  });

  it('shares one write of a block between two that ask for it', async () => {
    const tier = await open();
    const both = [hashNamed('twice')];
    const results = await Promise.all([1, 2].map(() => bench.write(tier, space, both, payloadBytes)));
    expect(results).toEqual([['stored'], ['held']]);
    await tier.close();
  });

  it('never writes an object into a slot that is too small for it, and forgets it for one that fits', async () => {
    let tier = await open();
    const hashes = names('long', 2);
    await bench.write(tier, space, hashes, 40_000);
    const told: string[] = [];
    tier.follow(({ kind, hashes: which }) => told.push(`${kind} ${which.length}`));
    told.length = 0;
    expect(await bench.read(tier, space, hashes.slice(0, 1), 1000)).toEqual(['missing']);
    expect(tier.stats()).toMatchObject({ corrupt: 0, blocks: 1 });
    expect(told).toEqual(['removed 1']);
    expect(await bench.write(tier, space, hashes.slice(0, 1), 1000)).toEqual(['stored']);
    expect(await bench.read(tier, space, hashes.slice(0, 1), 1000)).toEqual(['ready']);
    expect(await bench.read(tier, space, hashes.slice(1), 40_000)).toEqual(['ready']);
    await tier.close();
    tier = await open();
    expect(await bench.read(tier, space, hashes.slice(0, 1), 1000)).toEqual(['ready']);
    await tier.close();
  });

  it('stamps each object with the generation of its segment', async () => {
    const tier = await open();
    await bench.write(tier, space, names('stamp', 1), payloadBytes);
    await tier.close();
    const bytes = readFileSync(join(dir, segmentFiles()[0]!));
    expect(decodeHeader(bytes.subarray(4096, 4096 + headerBytes))).toMatchObject({ sequence: 1, payloadBytes });
  });

  it('goes out of service, loudly and once, when it cannot make a segment', async () => {
    const reasons: string[] = [];
    const tier = await open({ onOutOfService: (reason) => reasons.push(reason) });
    const chain = names('out', 12);
    await bench.write(tier, space, chain, payloadBytes);
    for (const name of ['00000003', '00000004', '00000005']) writeFileSync(join(dir, `segment-${name}.kvs.new`), '');
    for (let i = 0; i < 8; i++) await bench.write(tier, space, names(`fill ${i}.`, 12), payloadBytes);
    expect(tier.stats()).toMatchObject({ inService: false, blocks: 0 });
    expect(reasons).toEqual([tier.stats().outOfServiceReason]);
    expect(reasons[0]).toMatch(/segment-0000000\d.kvs.new: cannot be created/);
    expect(tier.lookup(space, chain)).toBe(0);
    expect(await bench.write(tier, space, names('after', 2), payloadBytes)).toEqual(['refused', 'refused']);
    expect(await bench.read(tier, space, chain.slice(0, 1), payloadBytes)).toEqual(['missing']);
    await tier.close();
    const again = await open(); // what was stored is still there
    expect(again.lookup(space, chain)).toBe(12);
    await again.close();
  });
});

describe('eviction', () => {
  it('carries over what was used, whatever is written meanwhile', async () => {
    const tier = await open();
    const hot = names('hot', 3);
    await bench.write(tier, space, hot, payloadBytes);
    for (let round = 0; round < 100; round++) {
      tier.touch(space, hot);
      await bench.write(tier, space, names(`cold ${round}.`, 8), payloadBytes);
      expect(bytesOnDisk()).toBeLessThanOrEqual(capacityBytes);
    }
    expect(await bench.read(tier, space, hot, payloadBytes)).toEqual(['ready', 'ready', 'ready']);
    tier.checkIntegrity();
    await tier.close();
  });

  it('evicts what was used longest ago', async () => {
    const evicted: HashKey[] = [];
    const tier = await open({ onEvict: (_, hash) => evicted.push(hash) });
    const rounds = Array.from({ length: 30 }, (_, i) => names(`lru ${i}.`, 16));
    for (const round of rounds) await bench.write(tier, space, round, payloadBytes);
    expect(evicted.slice(0, 16)).toEqual(rounds[0]);
    expect(tier.stats().evictions).toBe(evicted.length);
    await tier.close();
  });
});
