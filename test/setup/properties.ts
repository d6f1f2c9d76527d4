/**
 * One seed for all properties of a run of a file: other cases every time; a failure names its seed, and KVTIER_SEED=n runs it again.
 * A property that has found a counterexample gets no second attempt: whatever else a test's second attempt forgives, this is a
 * defect, however rare.
 */
import { randomInt } from 'node:crypto';
import fc from 'fast-check';
import { beforeEach, TestRunner } from 'vitest';

const counterexamples = new WeakMap<object, Error>();

fc.configureGlobal({
  ...fc.readConfigureGlobal(),
  // Shrinking goes on for hours now and then: what was found until then is told.
  interruptAfterTimeLimit: 120_000,
  markInterruptAsFailure: true,
  seed: Number(process.env.KVTIER_SEED ?? randomInt(2 ** 31)),
  reporter: (run) => {
    if (!run.failed) return;
    const cause = run.errorInstance;
    const error = new Error(fc.defaultReportMessage(run), cause === null ? {} : { cause });
    const test = TestRunner.getCurrentTest();
    if (test !== undefined) counterexamples.set(test, error);
    throw error;
  },
});

beforeEach(({ task }) => {
  const error = counterexamples.get(task);
  if (error !== undefined) throw error;
});
