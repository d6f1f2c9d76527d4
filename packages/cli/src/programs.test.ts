/** A program is started from its bundle exactly as long as none of its sources has changed. */
import { mkdirSync, mkdtempSync, rmSync, statSync, utimesSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { program } from './programs.ts';

let root: string;
const source = (): string => join(root, 'a.ts');
const bundled = (): boolean => {
  const args = program('cache-node', root);
  expect(args.at(-1)).toBe(
    join(
      root,
      args[0] === '--import' ? 'services/cache-node/src/main.ts' : 'build/programs/services/cache-node/main.mjs',
    ),
  );
  return args[0] !== '--import';
};
function made(of = root): void {
  const { size, mtimeMs } = statSync(source());
  writeFileSync(
    join(root, 'build/programs/inputs.json'),
    JSON.stringify({ root: of, inputs: { 'a.ts': `${size} ${mtimeMs}` } }),
  );
}

beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'kvtier-programs-'));
  mkdirSync(join(root, 'build/programs'), { recursive: true });
  writeFileSync(source(), 'export const a = 1;');
});
afterEach(() => rmSync(root, { recursive: true }));

it('without a bundle, from the source', () => expect(bundled()).toBe(false));

it('from the bundle while its sources are as they were', () => {
  made();
  expect(bundled()).toBe(true);
});

it.each([
  ['has another size', () => writeFileSync(source(), 'export const a = 10;')],
  ['has another time', () => utimesSync(source(), 1, 1)],
  ['has gone', () => rmSync(source())],
])('from the source when one %s', (_, change) => {
  made();
  change();
  expect(bundled()).toBe(false);
});

it('from the source in a copy of the checkout, whose bundle looks for its files elsewhere', () => {
  made('/elsewhere');
  expect(bundled()).toBe(false);
});

it('from the source when what was written down is damaged', () => {
  writeFileSync(join(root, 'build/programs/inputs.json'), '{"root":');
  expect(bundled()).toBe(false);
});
