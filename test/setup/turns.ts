/**
 * No turn of the event loop above 50 ms, in any test: what stands in the loop for longer keeps everybody else waiting, heartbeats and
 * deadlines included. Measured in the test process by its thread's CPU time, so that a busy machine makes no turn longer.
 *
 * A turn is the product's as far as product code began it: a timer, an event, a promise that goes on. What a test calls itself is the
 * test's (a property runs a thousand cases in one turn), and so is what a fake computes that the product calls. Samples of the profiler tell
 * the two apart: by the outermost frame that is ours, and the innermost one.
 * What is left, the test's own all the same, is named with its reason in own-turns.ts.
 *
 * Where a machine's memory is given to it by the page, each that is new takes ten times as long and more: that is counted as elsewhere.
 */
import { appendFileSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { dearPagesMs } from '@kvtier/data-plane/testing';
import { afterEach, beforeAll, beforeEach } from 'vitest';
import { isNamedTurn } from './own-turns.ts';
import { type ProductRun, productRuns } from './turn-profile.ts';
import { takeSamples } from './turn-samples.ts';

const limitMs = 50;
/** A file to which all long turns are appended instead of failing their tests: for a survey. */
const report = process.env.KVTIER_TURNS_REPORT;
const root = new URL('../..', import.meta.url).pathname;

/** Of before any test that exchanges it. */
const realSetImmediate = setImmediate;
beforeAll(() => {
  takeSamples(); // those of the file before
});

beforeEach(() => native.watchTurns());

afterEach(async ({ task }) => {
  // The turn in which the test has ended ends, too.
  for (let turn = 0; turn < 2; turn++) await new Promise((resolve) => realSetImmediate(resolve));
  const { rows } = native.turnsSeen();
  if (rows.length === 0) return;
  const profile = takeSamples();
  const runs: ProductRun[] = [];
  const dearPageMs = dearPagesMs(1);
  for (let row = 0; row < rows.length; row += 4) {
    const [beganMs, endedMs, tookMs, pages] = [...rows.subarray(row, row + 4)] as [number, number, number, number];
    const cpuMs = tookMs - pages * dearPageMs;
    runs.push(...productRuns(profile, root, { beganMs, endedMs, cpuMs }).filter((run) => run.cpuMs > limitMs));
  }
  const worst = runs.toSorted((a, b) => b.cpuMs - a.cpuMs)[0];
  if (worst === undefined) return;
  const file = task.file.filepath.slice(root.length);
  if (report !== undefined) {
    appendFileSync(report, `${JSON.stringify({ file, test: task.name, runs: runs.length, ...worst })}\n`);
    return;
  }
  if (isNamedTurn(file, task.name)) return;
  throw new Error(
    `a turn of the event loop above ${limitMs} ms: ${worst.cpuMs.toFixed(0)} ms of CPU time in ${worst.where.join(', ')}; ` +
      'cut it into turns, or name it in test/setup/own-turns.ts if it is the doing of the test',
  );
});
