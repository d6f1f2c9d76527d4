/**
 * A vitest reporter that writes down which tests passed only at their second attempt, one name a line, into the file that
 * KVTIER_FLAKY_REPORT names: such a test is a defect that must be seen, though it does not fail the run. What the first attempt
 * failed with is printed, for the cause.
 */
import { appendFileSync } from 'node:fs';

/** Characters of what failed that are printed: a child's whole output can be in it. */
const longest = 8_000;

export default class FlakyReporter {
  onTestCaseResult(test) {
    if (!test.diagnostic()?.flaky) return;
    const name = `${test.module.relativeModuleId} > ${test.fullName}`;
    appendFileSync(process.env.KVTIER_FLAKY_REPORT, `${name}\n`);
    for (const { message, diff, stack } of test.result().errors ?? []) {
      const said = [message, diff, stack].filter(Boolean).join('\n');
      process.stdout.write(`first attempt of ${name}:\n${said}`.slice(0, longest).concat('\n'));
    }
  }
}
