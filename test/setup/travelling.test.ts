/** That the archive for a GPU machine still fits there beside this checkout (scripts/lib/travelling.mjs). */
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';

const script = new URL('../../scripts/lib/travelling.mjs', import.meta.url).href;
const { archiveBytesBeside, checkoutBytes, misfit, travellingBytes } = (await import(script)) as {
  archiveBytesBeside: (bytes: number) => number;
  checkoutBytes: (folder?: string) => number;
  misfit: (archive: string, archiveBytes: number, bytesOfCheckout: number) => string;
  travellingBytes: number;
};

const MiB = 1024 * 1024;

it('this checkout and the archive that may lie beside it travel together, and leave the archive what it needs', () => {
  const bytes = checkoutBytes();
  expect(bytes).toBeGreaterThan(MiB);
  expect(bytes + archiveBytesBeside(bytes)).toBeLessThanOrEqual(travellingBytes);
  expect(archiveBytesBeside(bytes), 'large files in the checkout leave no room for the archive').toBeGreaterThan(
    40 * MiB,
  );
});

it('a checkout that grows leaves less for the archive, and the line says both', () => {
  expect(archiveBytesBeside(MiB)).toBe(45 * MiB);
  expect(misfit('a.tar.xz', 45 * MiB, 18 * MiB)).toBe('');
  expect(misfit('a.tar.xz', 45 * MiB, 20.25 * MiB)).toBe(
    'a.tar.xz: 45.00 MiB; at most 42.75 MiB beside a checkout of 20.25 MiB fit onto a GPU machine; pack less, or keep large files out of the checkout',
  );
});

it('what git ignores does not travel, and what it does not know yet does', () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-travelling-'));
  try {
    execFileSync('git', ['init', '-q'], { cwd: folder });
    writeFileSync(join(folder, '.gitignore'), '*.log\n');
    writeFileSync(join(folder, 'a.log'), 'x'.repeat(1000));
    writeFileSync(join(folder, 'new.bin'), 'x'.repeat(100));
    expect(checkoutBytes(folder)).toBe(6 + 100);
  } finally {
    rmSync(folder, { recursive: true });
  }
});
