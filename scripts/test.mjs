/**
 * npm test: set-up, every check, every test (quick and slow). Ends with one line: "N passed, N failed, N skipped".
 * `npm test -- PATH` runs the tests of a path only, without the checks.
 */
import { runChecks } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { testPackages } from './lib/system.mjs';
import { closingLine, runVitest } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup({ need: ['npm', 'native', 'cuda-emulated', 'cuda'], packages: Object.keys(testPackages) });
  const failedChecks = args.length === 0 ? await runChecks() : 0;
  const tests = await runVitest(['quick', 'slow'], args);
  closingLine({ ...tests, failed: tests.failed + failedChecks });
  return tests.code || (failedChecks > 0 ? 1 : 0);
});
