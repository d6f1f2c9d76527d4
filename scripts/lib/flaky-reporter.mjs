/**
 * A vitest reporter that writes down which tests passed only at their second attempt, one name a line, into the file that
 * KVTIER_FLAKY_REPORT names: such a test is a defect that must be seen, though it does not fail the run.
 */
import { appendFileSync } from 'node:fs';

export default class FlakyReporter {
  onTestCaseResult(test) {
    if (test.diagnostic()?.flaky)
      appendFileSync(process.env.KVTIER_FLAKY_REPORT, `${test.module.relativeModuleId} > ${test.fullName}\n`);
  }
}
