/**
 * What each test file costs, for a survey: with KVTIER_TEST_COSTS=FILE one line of JSON for each is appended there. Seconds on the clock, and of
 * CPU: of the test process, and of the processes that it started and that have ended. `npm test` keeps two cores busy; what is to become
 * shorter has to need less CPU.
 */
import { appendFileSync, readFileSync } from 'node:fs';
import { relative } from 'node:path';
import { afterAll, beforeAll } from 'vitest';

const report = process.env.KVTIER_TEST_COSTS;
const root = new URL('../..', import.meta.url).pathname;
/** Of /proc: USER_HZ, which Linux fixes for all programs. */
const ticksPerS = 100;

interface Costs {
  readonly ms: number;
  readonly own: number;
  readonly children: number;
}

function costs(): Costs {
  const fields = readFileSync('/proc/self/stat', 'latin1').split(') ')[1]!.split(' ').map(Number);
  const [user, system, childrenUser, childrenSystem] = fields.slice(11, 15) as [number, number, number, number];
  return { ms: performance.now(), own: user + system, children: childrenUser + childrenSystem };
}

if (report !== undefined) {
  let from = costs();
  beforeAll(() => {
    from = costs();
  });
  // biome-ignore lint/correctness/noEmptyPattern: vitest reads from the pattern that no fixture is wanted
  afterAll(({}, suite) => {
    const to = costs();
    const row = {
      ...{ file: relative(root, suite.file.filepath), seconds: (to.ms - from.ms) / 1_000 },
      ...{ own: (to.own - from.own) / ticksPerS, children: (to.children - from.children) / ticksPerS },
    };
    appendFileSync(report, `${JSON.stringify(row)}\n`);
  });
}
