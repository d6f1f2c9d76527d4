/** Groups by name and number. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { expect, it } from 'vitest';
import { groupSchema, readGroup } from './group.ts';

it('is a number, or a name that the system knows', () => {
  const folder = mkdtempSync(path.join(tmpdir(), 'kvtier-group-'));
  const file = path.join(folder, 'group');
  writeFileSync(file, 'root:x:0:\nkv:x:2000:a,b\n');
  try {
    expect([null, 7, 'root', 'kv'].map((group) => readGroup(group, file))).toEqual([null, 7, 0, 2000]);
    expect(readGroup('2000', file)).toBe(2000);
    expect(() => readGroup('4294967295', file)).toThrow(/group: .* has no group "4294967295"/);
  } finally {
    rmSync(folder, { recursive: true });
  }
  for (const bad of ['', 'a:b', 'a b', -1, 1.5, 2 ** 32 - 1]) expect(groupSchema.safeParse(bad).success).toBe(false);
});
