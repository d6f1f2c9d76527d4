/**
 * Starts with a device that is broken, hangs or is not mounted: it begins out of service, and is taken when it is well. What fails are
 * the calls from native code; real mounts are in mounts.slow.test.ts.
 */
import { existsSync, mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('start');
const chain: HashKey[] = Array.from({ length: 10 }, (_, i) => hashNamed(`s${i}`));
const patience = { timeout: 20_000, interval: 5 };

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
    ...{ dir: join(bench.dir, 'a'), capacityBytes: 4 << 20, arena: bench.arena, slots: bench.tier, log: silentLog },
    ...{ retry: { firstMs: 10, longestMs: 40 } },
    ...options,
  });
async function filled(): Promise<void> {
  const tier = await open();
  expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
  await tier.close();
}
const isBack = (tier: DiskTier): Promise<unknown> => vi.waitUntil(() => tier.stats().inService, patience);

describe.each(['fileFolder', 'fileIdentity', 'fileLock'] as const)('%s', (name) => {
  /** It fails so while the result says so. */
  function refused(errno: number): { isBroken: boolean } {
    const state = { isBroken: true };
    const original = native[name] as (...given: unknown[]) => Promise<never>;
    vi.spyOn(native, name).mockImplementation((...given: unknown[]) => {
      if (!state.isBroken) return original.apply(native, given);
      return Promise.reject(Object.assign(new Error(`IO: ${given[1]}: cannot be used`), { errno }));
    });
    return state;
  }

  it.each([
    ['EIO', 5],
    ['ENXIO', 6],
    ['ENODEV', 19],
    ['EROFS', 30],
    ['EBADMSG', 74],
    ['ENOTCONN', 107],
    ['ESTALE', 116],
    ['EUCLEAN', 117],
  ])('%s: begins out of service, and is back with what it holds', async (_, errno) => {
    await filled();
    const state = refused(errno);
    const tier = await open({ mountsFile: join(bench.dir, 'disk-mounts.json') });
    expect(tier.stats()).toMatchObject({ inService: false, blocks: 0, detail: { devices_out_of_service: 1 } });
    expect(tier.stats().outOfServiceReason).toMatch(/cannot be used/);
    state.isBroken = false;
    await isBack(tier);
    expect(tier.lookup(space, chain)).toBe(chain.length);
    await tier.close();
  });

  it.each([
    ['EACCES', 13],
    ['EPERM', 1],
  ])('%s: no start', async (_, errno) => {
    refused(errno);
    const mountsFile = join(bench.dir, 'disk-mounts.json');
    await expect(open({ mountsFile })).rejects.toMatchObject({
      code: 'IO',
      message: expect.stringMatching(/cannot be used/),
    });
  });
});

it('a folder that another node has locked: no start', async () => {
  const tier = await open();
  const dirs = [join(bench.dir, 'b'), join(bench.dir, 'a')];
  await expect(open({ dirs, capacityBytes: 8 << 20 })).rejects.toMatchObject({ code: 'LOCKED' });
  await tier.close();
});

describe('a lock that does not come in time', () => {
  /** Its calls are made, and do not answer before `answer`. */
  function late(): { answer: () => void; isAsked: Promise<void> } {
    const original = native.fileLock;
    let answer = (): void => {};
    const answered = new Promise<void>((resolve) => {
      answer = resolve;
    });
    let ask = (): void => {};
    const isAsked = new Promise<void>((resolve) => {
      ask = resolve;
    });
    vi.spyOn(native, 'fileLock').mockImplementation(async (...given) => {
      ask();
      const taken = await original.apply(native, given);
      await answered;
      return taken;
    });
    return { answer, isAsked };
  }

  it('begins out of service, and is not in the way of the next try', async () => {
    await filled();
    const { answer } = late();
    const tier = await open({ timeoutMs: 200 });
    expect(tier.stats().outOfServiceReason).toMatch(/a: the device did not answer for 200 ms$/);
    answer();
    await isBack(tier);
    expect(tier.lookup(space, chain)).toBe(chain.length);
    await tier.close();
    native.unlock(native.lockFile(join(bench.dir, 'a', 'lock')));
  });

  it('is given back when it comes after the end', async () => {
    await filled();
    const { answer, isAsked } = late();
    const [tier] = await Promise.all([open({ timeoutMs: 1_000 }), isAsked]);
    await tier.close();
    const path = join(bench.dir, 'a', 'lock');
    expect(() => native.lockFile(path)).toThrow(/^LOCKED/);
    answer();
    await vi.waitFor(() => native.unlock(native.lockFile(path)), patience);
  });

  it('is given back when its try was under way at the end', async () => {
    await filled();
    const refusing = vi.spyOn(native, 'fileLock');
    refusing.mockRejectedValueOnce(Object.assign(new Error('IO: cannot be locked'), { errno: 5 }));
    const tier = await open({ timeoutMs: 1_000 });
    refusing.mockRestore();
    const { answer, isAsked } = late();
    await isAsked;
    await tier.close();
    answer();
    await vi.waitFor(() => native.unlock(native.lockFile(join(bench.dir, 'a', 'lock'))), patience);
  });
});

describe('a folder for which there is none above it', () => {
  /** As if all were on one file system, or what lies in the bench's folder on one of its own, whatever this machine's /tmp is. */
  function mountedAt(mount: string): void {
    const original = native.fileIdentity;
    vi.spyOn(native, 'fileIdentity').mockImplementation(async (files, path) => {
      const found = await original.call(native, files, path);
      return found && { ...found, device: path.startsWith(mount) ? 2n : 1n };
    });
  }
  const missing = (): string => join(bench.dir, 'mount', 'kvtier');
  const message = (): string =>
    `${missing()}: is not mounted: it is not there, nor a folder to make it in; mount its disk, or make the folder above it`;

  it('one of several begins out of service, once loudly, and is made when it can be', async () => {
    const told: string[] = [];
    const log = { ...silentLog, error: (fields: object) => void told.push((fields as { reason: string }).reason) };
    const dirs = [join(bench.dir, 'a'), missing()];
    mountedAt('/');
    const tier = await open({ dirs, capacityBytes: 8 << 20, log });
    expect(tier.devices.map(({ reason }) => reason)).toEqual(['', message()]);
    expect(told).toEqual([message()]);
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    expect(existsSync(join(bench.dir, 'mount'))).toBe(false);
    mkdirSync(join(bench.dir, 'mount'));
    await vi.waitUntil(() => tier.devices[1]!.inService, patience);
    expect(readdirSync(missing())).toContain('lock');
    expect(told).toHaveLength(1);
    await tier.close();
  });

  it('the only one: no start, and nothing is made', async () => {
    const before = readdirSync(bench.dir);
    mountedAt('/');
    await expect(open({ dirs: [missing()] })).rejects.toMatchObject({ code: 'IO', message: message() });
    expect(readdirSync(bench.dir)).toEqual(before);
  });

  it('is made with all above it on a volume of its own', async () => {
    mountedAt(bench.dir);
    const tier = await open({ dirs: [missing()] });
    expect(tier.stats()).toMatchObject({ inService: true });
    expect(readdirSync(missing())).toContain('lock');
    await tier.close();
  });
});
