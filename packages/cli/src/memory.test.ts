/** What of a control group's memory counts as free. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { freeMemory } from './memory.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-memory-'));
});
afterEach(() => {
  vi.restoreAllMocks();
  rmSync(folder, { recursive: true, force: true });
});

/** Of a group `/g` with 100 bytes free and 40 of cached files. */
const freeOf = (limitBytes: number): number => {
  vi.spyOn(process, 'constrainedMemory').mockReturnValue(limitBytes);
  vi.spyOn(process, 'availableMemory').mockReturnValue(100);
  mkdirSync(join(folder, 'g'), { recursive: true });
  writeFileSync(join(folder, 'group'), '1:cpu:/other\n0::/g\n');
  writeFileSync(
    join(folder, 'g/memory.stat'),
    'anon 900\nfile 50\ninactive_anon 7\ninactive_file 30\nactive_file 10\n',
  );
  return freeMemory(join(folder, 'group'), folder);
};

it("a group's cached files count as free, up to its limit", () => {
  expect([freeOf(1_000), freeOf(120)]).toEqual([140, 120]);
});

it('without a limit, and without figures, it is what Node says', () => {
  expect([freeOf(0), freeOf(2 ** 64)]).toEqual([100, 100]);
  vi.spyOn(process, 'constrainedMemory').mockReturnValue(1_000);
  expect(freeMemory(join(folder, 'none'), folder)).toBe(100);
});
