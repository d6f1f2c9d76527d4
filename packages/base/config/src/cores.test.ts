/** Cores by quota. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { coresOfQuota, usableCores } from './cores.ts';
import { engineWorkerSchema } from './index.ts';

const root = mkdtempSync(join(tmpdir(), 'kvtier-cores-'));
afterAll(() => rmSync(root, { recursive: true }));

it('a quota is cores, a part of one counted as one; without one all there are', () => {
  expect(['200000 100000\n', '150000 100000', '50000 100000'].map(coresOfQuota)).toEqual([2, 2, 1]);
  const none = ['max 100000\n', '', '0 100000', 'a b'].map(coresOfQuota);
  expect(none).toEqual(none.map(() => Number.POSITIVE_INFINITY));
});

it('the least of the own group and of those above it, and never more than there are', () => {
  const pod = join(root, 'pods', 'pod');
  mkdirSync(join(pod, 'engine'), { recursive: true });
  const groupFile = join(root, 'cgroup');
  const cores = (group: string, quota: string, folder: string): number => {
    writeFileSync(groupFile, `9:name=systemd:/\n${group}\n`);
    writeFileSync(join(folder, 'cpu.max'), quota);
    return usableCores(groupFile, root);
  };
  const all = availableParallelism();
  expect(cores('0::/pods/pod/engine', 'max 100000', join(pod, 'engine'))).toBe(all);
  expect(cores('0::/pods/pod/engine', '50000 100000', pod)).toBe(1);
  expect(cores('0::/pods/pod/engine', '409600000 100000', pod)).toBe(all);
  expect(cores('0::/', '50000 100000', root)).toBe(1); // as a container sees its own
  expect(cores('1:cpu:/pods', '50000 100000', root)).toBe(all); // v1
  expect(usableCores(join(root, 'none'), root)).toBe(all);
});

it('an engine worker computes with as many threads, unless it is told how many', () => {
  const worker = { modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: null };
  const threads = [{}, { threads: 7 }].map((told) => engineWorkerSchema.parse({ ...worker, ...told }).threads);
  expect(threads).toEqual([usableCores(), 7]);
});
