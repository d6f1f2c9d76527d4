import {
  chownSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { placeId } from '@kvtier/data-plane/places';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { arenaBudget, diskBudget, keepTouched, openDataDir, openRunDir } from './places.ts';

const MiB = 2 ** 20;
const GiB = 2 ** 30;
let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-places-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

describe('budgets', () => {
  it('gives the arena 1 GiB where it fits, else 90 % of what is free, and says so', () => {
    expect(arenaBudget(null, 24 * GiB, 24 * GiB)).toEqual({ bytes: GiB });
    expect(arenaBudget(null, 64 * MiB, 24 * GiB)).toEqual({
      bytes: 57 * MiB,
      remark: 'arena of 57 MiB: /dev/shm has only 64 MiB free',
    });
  });

  it('refuses an arena that cannot fit, with the remedy', () => {
    expect(() => arenaBudget(2 * GiB, GiB, 24 * GiB)).toThrow(
      /2 GiB is more than \/dev\/shm has free \(1 GiB\).*--shm-size/,
    );
    expect(() => arenaBudget(null, MiB, 24 * GiB)).toThrow(/only 1 MiB free, the arena needs 8 MiB.*--shm-size/);
  });

  it('gives the arena half of the free memory at most, and refuses more than there is', () => {
    expect(arenaBudget(null, 2 * GiB, 2 * GiB)).toEqual({ bytes: GiB });
    expect(arenaBudget(null, 2 * GiB, GiB)).toEqual({
      bytes: 512 * MiB,
      remark: 'arena of 512 MiB: only 1 GiB of memory free',
    });
    expect(arenaBudget(GiB, 2 * GiB, GiB)).toEqual({ bytes: GiB });
    expect(() => arenaBudget(GiB + MiB, 2 * GiB, GiB)).toThrow(
      /^--arena-bytes: .* is more memory than is free \(1 GiB\); ask for less, or raise the memory limit \(docker run --memory\)$/,
    );
    expect(() => arenaBudget(null, 2 * GiB, 15 * MiB)).toThrow(
      /^memory: only 15 MiB free, the arena needs 8 MiB and may take half; raise the memory limit/,
    );
  });

  it('counts what the data folder holds already as free for the disk tier', () => {
    expect(diskBudget(null, '/d', [], [], 100 * GiB, 0)).toEqual({ bytes: 8 * GiB });
    expect(diskBudget(null, '/d', [], [], 2 * GiB, 8 * GiB)).toEqual({ bytes: 8 * GiB });
    expect(diskBudget(null, '/d', [], [], GiB, 0)).toEqual({
      bytes: 819 * MiB,
      remark: 'disk tier of 819 MiB: only 1 GiB free there',
    });
    expect(() => diskBudget(null, '/d', [], [], 10 * MiB, 0)).toThrow(
      /^\/d: only 10 MiB free, the disk tier needs 64 MiB/,
    );
    expect(() => diskBudget(2 * GiB, '/d', [], [], GiB, 0)).toThrow(
      /--disk-bytes: 2 GiB is more than the disk of \/d has free/,
    );
  });
});

describe('the disk budget beside former nodes', () => {
  it('takes their bytes for free where they are asked for, and not where it is chosen', () => {
    const [node, lone] = [join(folder, 'node-1'), join(folder, 'node-2')];
    for (const dir of [node, lone]) mkdirSync(join(dir, 'segments'), { recursive: true });
    writeFileSync(join(node, 'segments', 'bytes'), Buffer.alloc(2 * MiB));
    const chosen = (leaving: string[]) => diskBudget(null, folder, [], leaving, 100 * MiB, 0).bytes;
    expect([chosen([]), chosen([node, lone])]).toEqual([80 * MiB, 80 * MiB]);
    expect(diskBudget(101 * MiB, folder, [], [node], 100 * MiB, 0).bytes).toBe(101 * MiB);
    expect(() => diskBudget(101 * MiB, folder, [], [lone], 100 * MiB, 0)).toThrow('has free (100 MiB)');
    const [far, elsewhere] = [join(folder, 'node-3'), mkdtempSync('/dev/shm/kvtier-places-')];
    symlinkSync(elsewhere, far);
    try {
      mkdirSync(join(far, 'segments'));
      writeFileSync(join(far, 'segments', 'bytes'), Buffer.alloc(2 * MiB));
      expect(() => diskBudget(101 * MiB, folder, [], [far], 100 * MiB, 0)).toThrow('has free (100 MiB)');
    } finally {
      rmSync(elsewhere, { recursive: true });
    }
  });
});

describe('folders', () => {
  it('names a short private run folder after the data folder, however deep that is', () => {
    const dataDir = join(folder, 'x'.repeat(120));
    mkdirSync(dataDir);
    const runDir = openRunDir(dataDir, {});
    try {
      expect(join(runDir, 'engine.sock').length).toBeLessThan(60);
      expect(runDir).toContain(placeId(dataDir));
      expect(statSync(runDir).mode & 0o777).toBe(0o700);
      writeFileSync(join(runDir, 'left-behind.sock'), '');
      expect(openRunDir(dataDir, {})).toBe(runDir);
      expect(readdirSync(runDir)).toEqual([]);
    } finally {
      rmSync(runDir, { recursive: true, force: true });
    }
  });

  it('keeps what lies in the run folder from looking forgotten, until it ends', () => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval'] });
    try {
      const [path, old] = [join(folder, 'engine.sock'), new Date(0)];
      const age = (): void => {
        for (const one of [path, folder]) utimesSync(one, old, old);
      };
      writeFileSync(path, '');
      const end = keepTouched(folder, 1_000);
      age();
      vi.advanceTimersByTime(1_000);
      for (const one of [path, folder]) expect(statSync(one).mtimeMs).toBeGreaterThan(1e12);
      rmSync(path); // it ended: the next one is none the worse
      vi.advanceTimersByTime(1_000);
      writeFileSync(path, '');
      end();
      age();
      vi.advanceTimersByTime(10_000);
      expect(statSync(path).mtimeMs).toBe(0);
    } finally {
      vi.useRealTimers();
    }
  });

  it('is open for a group that is named, outside of the folder of the user', () => {
    const group = process.getgid!();
    const runDir = openRunDir(folder, { XDG_RUNTIME_DIR: folder }, group);
    try {
      expect(runDir).toBe(`/tmp/kvtier-${process.getuid!()}-${placeId(folder)}`);
      expect(statSync(runDir).mode & 0o777).toBe(0o750);
      expect(statSync(runDir).gid).toBe(group);
    } finally {
      rmSync(runDir, { recursive: true, force: true });
    }
  });

  it('leaves no run folder that cannot be given to the group', () => {
    expect(() => openRunDir(folder, { XDG_RUNTIME_DIR: folder }, -5)).toThrow('cannot hold our sockets');
    expect(existsSync(`/tmp/kvtier-${process.getuid!()}-${placeId(folder)}`)).toBe(false);
  });

  it.runIf(process.getuid!() === 0)('removes nothing of a run folder that is another user’s', () => {
    const path = join(folder, `kvtier-${placeId(folder)}`);
    mkdirSync(path);
    writeFileSync(join(path, 'theirs'), '');
    chownSync(path, 1, 1);
    expect(() => openRunDir(folder, { XDG_RUNTIME_DIR: folder })).toThrow(
      `${path}: cannot hold our sockets (it belongs to another user); remove it and start again`,
    );
    expect(readdirSync(path)).toEqual(['theirs']);
  });

  it('follows no link that lies in the run folder’s place', () => {
    const [path, elsewhere] = [join(folder, `kvtier-${placeId(folder)}`), join(folder, 'elsewhere')];
    mkdirSync(elsewhere);
    writeFileSync(join(elsewhere, 'kept'), '');
    symlinkSync(elsewhere, path);
    expect(() => openRunDir(folder, { XDG_RUNTIME_DIR: folder })).toThrow(
      `${path}: cannot hold our sockets (it is no folder); remove it and start again`,
    );
    expect(readdirSync(elsewhere)).toEqual(['kept']);
    expect(lstatSync(path).isSymbolicLink()).toBe(true);
  });

  it('is touched as long as it is ours, and nothing by a link in its place', () => {
    const [path, elsewhere] = [join(folder, 'run'), join(folder, 'elsewhere')];
    for (const dir of [path, elsewhere]) mkdirSync(dir);
    writeFileSync(join(elsewhere, 'theirs'), '');
    const long = new Date(0);
    for (const old of [path, join(elsewhere, 'theirs')]) utimesSync(old, long, long);
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval'] });
    const end = keepTouched(path, 1_000);
    try {
      vi.advanceTimersByTime(1_000);
      expect(statSync(path).mtimeMs).toBeGreaterThan(0);
      rmSync(path, { recursive: true });
      symlinkSync(elsewhere, path);
      vi.advanceTimersByTime(1_000);
      expect(statSync(join(elsewhere, 'theirs')).mtimeMs).toBe(0);
    } finally {
      end();
      vi.useRealTimers();
    }
  });

  it('takes XDG_RUNTIME_DIR when it is usable', () => {
    expect(openRunDir(folder, { XDG_RUNTIME_DIR: folder })).toBe(join(folder, `kvtier-${placeId(folder)}`));
  });

  it('creates the data folder privately and refuses a file in its place', () => {
    expect(openDataDir(join(folder, 'a/b'))).toMatch(/a\/b$/);
    expect(statSync(join(folder, 'a/b')).mode & 0o777).toBe(0o700);
    writeFileSync(join(folder, 'file'), '');
    expect(() => openDataDir(join(folder, 'file'))).toThrow(
      /file: cannot be used as the data folder \(EEXIST: file already exists\); name another with --data-dir$/,
    );
  });

  it('refuses a folder below one that takes none', () => {
    expect(() => openDataDir('/proc/kvtier')).toThrow(/^\/proc\/kvtier: cannot be used as the data folder \(ENOENT/);
  });
});
