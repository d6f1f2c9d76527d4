/**
 * Recovery of a folder of which the device cannot read a page (EIO), and of one with much in it: what lies in other pages is listed, the
 * tier opens whatever happens, engines are served meanwhile, and a try that fails takes nothing away. Refusals are injected where
 * calls come from native code; a device that answers EIO to everything is in test/faults/node-bad-disk.slow.test.ts.
 */
import { cpSync, existsSync, readdirSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { slicing } from '../kit/slices.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DeviceFiles } from './device-files.ts';
import { DiskTier } from './disk-tier.ts';
import { emptyRecords, encodeFooter, pageBytes, record } from './format.ts';
import type { DiskTierOptions } from './options.ts';
import { checkpointName, recoverContents, segmentName } from './recovery.ts';
import type { Segment } from './segment.ts';

const payloadBytes = 12_000;
const objectPages = 3;
/** The header, ten objects, the footer. */
const segmentBytes = 128 << 10;
const lastPage = segmentBytes / pageBytes - 1;
const pageOf = (object: number): number => 1 + object * objectPages;
const space = namespaceNamed('recovery');
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));
/** Two sealed segments and an open one with five. */
const chain = names('block', 25);
const patience = { timeout: 20_000, interval: 10 };
const eio = 5;

let bench: TestBench;
beforeEach(() => {
  bench = new TestBench();
});
afterEach(() => {
  vi.restoreAllMocks();
  bench.dispose();
});

const open = (options: Partial<DiskTierOptions> = {}): Promise<DiskTier> =>
  DiskTier.open({
    ...{ dir: join(bench.dir, 'a'), capacityBytes: 4 << 20, segmentBytes, arena: bench.arena, slots: bench.tier },
    ...{ log: silentLog, retry: { firstMs: 20, longestMs: 100 }, io: { backend: 'threads' } },
    ...options,
  });

const refused = (path: string): Promise<never> =>
  Promise.reject(Object.assign(new Error(`IO: ${path}: cannot be read`), { errno: eio }));

/** A page of a file that is there cannot be read while `isBad` says so. */
function refuseReads(isBad: (path: string, page: number) => boolean): void {
  const original = native.fileRead;
  vi.spyOn(native, 'fileRead').mockImplementation((files, path, position, bytes) => {
    for (let at = Math.floor(position / pageBytes); at * pageBytes < position + bytes; at++)
      if (isBad(path, at)) return refused(path);
    return original.apply(native, [files, path, position, bytes]);
  });
}

/** Names of the segments, oldest first, of a folder as a kill left it: no footer at the end of the open one. */
async function killed(to: string): Promise<string[]> {
  const tier = await open();
  for (let at = 0; at < chain.length; at += 5) await bench.write(tier, space, chain.slice(at, at + 5), payloadBytes);
  const written = (): { sealed: number; footed: number } => {
    const all = [...tier.devices[0]!.segments];
    return {
      sealed: all.filter(({ state }) => state === 'sealed').length,
      footed: all.filter(({ hasFooter }) => hasFooter).length,
    };
  };
  await vi.waitUntil(() => written().sealed === 2 && written().footed === 2, patience);
  const segments = [...tier.devices[0]!.segments]
    .filter(({ state }) => state !== 'free')
    .sort((a, b) => a.generation - b.generation)
    .map(({ path }) => basename(path));
  // The next segment may be made meanwhile, and gets its name when it is whole.
  cpSync(join(bench.dir, 'a'), to, { recursive: true, filter: (path) => !path.endsWith('.new') });
  await tier.close();
  return segments;
}

const heldOf = (tier: DiskTier): HashKey[] => chain.filter((hash) => tier.lookup(space, [hash]) === 1);
const all = [...chain.keys()];

describe('one page that the device cannot read', () => {
  const [first, second] = [all.slice(0, 10), all.slice(10, 20)];
  it.each([
    ['the header of a segment: its blocks are lost, and its file goes', 0, 0, [...second, ...all.slice(20)]],
    ['the footer of a sealed segment: it is walked over', 1, lastPage, all],
    ['the end of the open segment', 2, lastPage, all],
    ['a payload in the open segment', 2, pageOf(1) + 1, all],
    ['the header of an object in the open segment: the walk ends there', 2, pageOf(3), all.slice(0, 23)],
    ['the first header in the open segment', 2, pageOf(0), [...first, ...second]],
  ])('%s', async (_, segment, page, left) => {
    const dir = join(bench.dir, 'b');
    const segments = await killed(dir);
    const bad = join(dir, segments[segment]!);
    refuseReads((path, at) => path === bad && at === page);
    const tier = await open({ dir });
    expect(tier.stats()).toMatchObject({ inService: true, detail: { outages: 0 } });
    const held = left.map((at) => chain[at]!);
    expect(heldOf(tier)).toEqual(held);
    expect(await bench.read(tier, space, held, payloadBytes)).toEqual(held.map(() => 'ready'));
    expect(existsSync(bad)).toBe(page > 0);
    // Nothing goes where the device cannot be read.
    const damaged = [...tier.devices[0]!.segments].find(({ path }) => path === bad);
    if (page > 0) expect(damaged!.state).toBe('sealed');
    expect(await bench.write(tier, space, names('after', 4), payloadBytes)).toEqual(Array(4).fill('stored'));
    tier.checkIntegrity();
    await tier.close();
  });

  it('a payload that is read with its neighbours: they are delivered, and it alone is not listed again', async () => {
    const tier = await open();
    const few = chain.slice(0, 8);
    await bench.write(tier, space, few, payloadBytes);
    const { io } = tier.devices[0]!;
    const original = io.read.bind(io);
    const asked: number[] = [];
    vi.spyOn(io, 'read').mockImplementation((rows, identities) => {
      asked.push(rows.length);
      const isBad = rows.some(({ offset }) => offset === pageOf(4) * pageBytes);
      // Nothing ends within the call that begins it.
      if (isBad) setImmediate(() => rows.forEach(({ onDone }) => void onDone(-eio)));
      else original(rows, identities);
    });
    const statuses = await bench.read(tier, space, few, payloadBytes);
    expect(statuses).toEqual(few.map((_, at) => (at === 4 ? 'failed' : 'ready')));
    expect(asked).toEqual([8, ...few.map(() => 1)]);
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(heldOf(tier)).toEqual(few.filter((_, at) => at !== 4));
    tier.checkIntegrity();
    await tier.close();
  });

  it('the checkpoint: recency is that of the places', async () => {
    const before = await open();
    await bench.write(before, space, chain, payloadBytes);
    await before.close();
    expect(readdirSync(join(bench.dir, 'a'))).toContain(checkpointName);
    refuseReads((path) => basename(path) === checkpointName);
    const lines: string[] = [];
    const tier = await open({ log: { ...silentLog, warn: (_, line) => void lines.push(line) } });
    expect(lines).toEqual(['the checkpoint is damaged; recency is that of the places instead']);
    expect(heldOf(tier)).toEqual(chain);
    await tier.close();
  });
});

describe('a device that reads nothing', () => {
  const isSegment = (path: string): boolean => path.startsWith(join(bench.dir, 'a', 'segment-'));

  it('begins out of service, loudly, and comes back with all that it holds', async () => {
    const before = await open();
    await bench.write(before, space, chain, payloadBytes);
    await before.close();
    let isBroken = true;
    refuseReads((path) => isBroken && isSegment(path));
    const told: string[] = [];
    const tier = await open({ log: { ...silentLog, error: (_, line) => void told.push(line) } });
    expect(told).toEqual(['a device of the disk tier is out of service; it will be tried again']);
    expect(tier.stats()).toMatchObject({ inService: false, blocks: 0, detail: { outages: 1 } });
    expect(tier.stats().outOfServiceReason).toMatch(/cannot be read/);
    expect(await bench.write(tier, space, names('during', 2), payloadBytes)).toEqual(['refused', 'refused']);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
    isBroken = false;
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    expect(await bench.write(tier, space, names('after', 2), payloadBytes)).toEqual(['stored', 'stored']);
    tier.checkIntegrity();
    await tier.close();
  });

  it('leaves the others in service, and its lock to the next start', async () => {
    const two = { dirs: [join(bench.dir, 'a'), join(bench.dir, 'b')], capacityBytes: 8 << 20 };
    const before = await open(two);
    for (const hash of chain) await bench.write(before, space, [hash], payloadBytes);
    for (const hash of names('more', 25)) await bench.write(before, space, [hash], payloadBytes);
    expect([...before.devices[0]!.segments].length).toBeGreaterThan(1);
    await before.close();
    let isBroken = true;
    refuseReads((path) => isBroken && isSegment(path));
    const tier = await open(two);
    expect(tier.devices.map(({ inService }) => inService)).toEqual([false, true]);
    expect(tier.stats()).toMatchObject({ inService: true, detail: { devices: 2, devices_out_of_service: 1 } });
    expect(await bench.write(tier, space, names('during', 2), payloadBytes)).toEqual(['stored', 'stored']);
    await tier.close();
    isBroken = false;
    const again = await open(two);
    expect(heldOf(again)).toEqual(chain);
    await again.close();
  });
});

it('a try that fails behind what was listed takes nothing away', async () => {
  // What was removed is marked 0.1 s after a recovery: the next try is later than that.
  const tier = await open({ retry: { firstMs: 400, longestMs: 400 } });
  await bench.write(tier, space, chain, payloadBytes);
  const [device] = tier.devices;
  const having = (what: 'hasFooter' | 'isFree'): Segment[] =>
    [...device!.segments].filter(({ state, hasFooter }) => (what === 'isFree' ? state === 'free' : hasFooter));
  await vi.waitUntil(() => having('hasFooter').length === 2 && having('isFree').length === 1, patience);
  expect(tier.remove(space, chain.slice(0, 1), 'asked')).toBe(1);
  device!.fail(new Error('gone'));
  // There is a file to be made, behind all that is listed.
  for (const { path } of having('isFree')) rmSync(path);
  const original = native.filePrepare;
  let failures = 0;
  vi.spyOn(native, 'filePrepare').mockImplementation((...given) => {
    if (failures > 0 || !basename(given[1]).startsWith('segment-')) return original.apply(native, given);
    failures++;
    return refused(given[1]);
  });
  await vi.waitUntil(() => tier.stats().inService, patience);
  expect(failures).toBe(1);
  expect(heldOf(tier)).toEqual(chain.slice(1));
  tier.checkIntegrity();
  await tier.close();
});

it('lists the records of a footer in slices, one a turn', async () => {
  const count = 4 * slicing.blocks + 10;
  const records = emptyRecords(count);
  for (let i = 0; i < count; i++) {
    const at = i * record.words;
    records.words[at] = i;
    records.words[at + record.page] = 1 + i;
    records.words[at + record.pages] = 1;
    records.words[at + record.kind] = 32;
  }
  const found = { id: 7, generation: 3 };
  const footer = encodeFooter({ ...found, sealed: true, tail: (1 + count) * pageBytes }, [space.digest], records);
  const bytes = (1 + count) * pageBytes + footer.length;
  const path = join(bench.dir, segmentName(found.id));
  writeFileSync(path, '');
  truncateSync(path, bytes - footer.length);
  writeFileSync(path, footer, { flag: 'a' });
  const files = new DeviceFiles(bench.dir, 10_000, () => performance.now());
  let turn = 0;
  const perTurn = new Map<number, number>();
  let isListed = false;
  const listing = recoverContents(bench.dir, files, { ...found, bytes }, () => {
    perTurn.set(turn, (perTurn.get(turn) ?? 0) + 1);
  }).finally(() => {
    isListed = true;
  });
  while (!isListed) {
    await nextTurn();
    turn++;
  }
  expect(await listing).toMatchObject({ sealed: true, hasFooter: true });
  expect([...perTurn.values()]).toEqual([...Array(4).fill(slicing.blocks), 10]);
  files.close();
});
