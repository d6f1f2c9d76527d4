/** What a second attempt forgives, and what not: vitest itself, on a file of tests that fail once. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

const build = fileURLToPath(new URL('../../build/', import.meta.url));
const setup = fileURLToPath(new URL('./properties.ts', import.meta.url));
const law = fileURLToPath(new URL('../../packages/store/tiers/src/kit/testing/law.ts', import.meta.url));
const program = fileURLToPath(new URL('../../node_modules/vitest/vitest.mjs', import.meta.url));

const tests = `
import fc from 'fast-check';
import { afterEach, expect, it } from 'vitest';
import { byLaw, LawBroken } from '${law}';
let attempts = { plain: 0, property: 0, asynchronous: 0, bytes: 0, budget: 0, end: 0 };
it('plain', () => expect(++attempts.plain).toBe(2));
it('property', () => { const first = ++attempts.property === 1; fc.assert(fc.property(fc.nat(), () => !first)); });
it('asynchronous', async () => {
  const first = ++attempts.asynchronous === 1;
  await fc.assert(fc.asyncProperty(fc.nat(), async () => !first));
});
it('wrong bytes', () => {
  if (++attempts.bytes > 1) return;
  throw new Error('a load failed', { cause: new LawBroken(1, 'a wrong block was delivered as 3') });
});
it('a budget', () => byLaw(3, () => expect(++attempts.budget).toBe(2)));
afterEach(({ task }) => {
  if (task.name === 'seen at its end' && ++attempts.end === 1) throw new LawBroken(1, 'a wrong block lies on the disk');
});
it('seen at its end', () => {});
`;

it('a property that fails once fails, and so does what breaks a law once; another test may try again', () => {
  const folder = mkdtempSync(join(build, 'properties-'));
  try {
    writeFileSync(join(folder, 'once.test.ts'), tests);
    const config = { test: { retry: 1, setupFiles: [setup], include: ['once.test.ts'] } };
    writeFileSync(join(folder, 'vitest.config.mjs'), `export default ${JSON.stringify(config)};\n`);
    const args = [program, 'run', '--root', folder, '--reporter', 'json'];
    const { stdout, stderr } = spawnSync(process.execPath, args, { encoding: 'utf8', cwd: folder });
    const line = stdout.split('\n').find((text) => text.startsWith('{'));
    expect(line, stderr).toBeDefined();
    const { testResults } = JSON.parse(line!) as {
      testResults: { assertionResults: { title: string; status: string }[] }[];
    };
    const ends = Object.fromEntries(testResults[0]!.assertionResults.map(({ title, status }) => [title, status]));
    expect(ends).toEqual({
      ...{ plain: 'passed', property: 'failed', asynchronous: 'failed' },
      ...{ 'wrong bytes': 'failed', 'a budget': 'failed', 'seen at its end': 'failed' },
    });
  } finally {
    rmSync(folder, { recursive: true });
  }
});
