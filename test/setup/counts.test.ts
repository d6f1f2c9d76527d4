/** What `npm test` counts and names at its end: whatever failed is found in its last lines, however long the run was. */
import { expect, it } from 'vitest';

interface Counts {
  passed: number;
  failed: number;
  skipped: string[];
  flaky: string[];
  failures: string[];
}
const library = new URL('../../scripts/lib/vitest.mjs', import.meta.url).href;
const { countInto } = (await import(library)) as { countInto: (counts: Counts, file: object) => void };

const name = new URL('../../packages/some.test.ts', import.meta.url).pathname;
const counted = (file: object): Counts => {
  const counts: Counts = { passed: 0, failed: 0, skipped: [], flaky: [], failures: [] };
  countInto(counts, { name, message: '', ...file });
  return counts;
};

it('names each test that failed with the first line of why, without colours', () => {
  const counts = counted({
    status: 'failed',
    assertionResults: [
      { status: 'passed', fullName: 'one' },
      {
        status: 'failed',
        fullName: 'two',
        failureMessages: ['\u001b[31mError: three\u001b[39m\n  at four', 'Error: five'],
      },
      { status: 'failed', fullName: 'six', failureMessages: [] },
      { status: 'pending', fullName: 'seven' },
    ],
  });
  expect(counts).toEqual({
    passed: 1,
    failed: 2,
    skipped: ['seven'],
    flaky: [],
    failures: ['packages/some.test.ts > two: Error: three', 'packages/some.test.ts > six'],
  });
});

it('a file that could not be loaded, or whose hook failed at its end, is one failure', () => {
  const notLoaded = counted({ status: 'failed', message: 'no such module', assertionResults: [] });
  expect(notLoaded).toMatchObject({ failed: 1, failures: ['packages/some.test.ts > the file itself: no such module'] });
  const hook = counted({ status: 'failed', assertionResults: [{ status: 'passed', fullName: 'one' }] });
  expect(hook).toMatchObject({ passed: 1, failed: 1, failures: ['packages/some.test.ts > the file itself'] });
});
