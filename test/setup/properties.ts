/**
 * One seed for all properties of a run of a file: other cases every time; a failure names its seed, and KVTIER_SEED=n runs it again.
 * A property that has found a counterexample gets no second attempt, nor does a test that saw a law broken (`LawBroken` of
 * `@kvtier/tiers/testing`): whatever else a second attempt forgives, this is a defect, however rare.
 */
import { randomInt } from 'node:crypto';
import fc from 'fast-check';
import { beforeEach, TestRunner } from 'vitest';

interface Thrown {
  readonly name?: string;
  readonly message: string;
  readonly cause?: unknown;
}

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

/** A second attempt still has the errors of the first. */
beforeEach(({ task }) => {
  const error = counterexamples.get(task);
  if (error !== undefined) throw error;
  const broken = task.result?.errors?.map(lawBrokenIn).find((found) => found !== undefined);
  if (broken !== undefined) throw new Error(`no second attempt: ${broken.message}`);
});

/** Errors have left their classes behind where vitest keeps them. */
function lawBrokenIn(thrown: Thrown): Thrown | undefined {
  let one: Thrown | undefined = thrown;
  for (let depth = 0; one !== undefined && depth < 20; depth++) {
    if (one.name === 'LawBroken') return one;
    one = typeof one.cause === 'object' && one.cause !== null ? (one.cause as Thrown) : undefined;
  }
  return undefined;
}
