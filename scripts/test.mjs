/**
 * npm test: set-up, every check, every test but the long ones (`npm run test:long`). Ends with one line: "N passed, N failed, N skipped".
 * `npm test -- PATH` runs the tests of a path only, without the checks.
 */
import { runChecks } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { hasGpu } from './lib/native.mjs';
import { testPackages } from './lib/system.mjs';
import { closingLine, runVitest } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  const parts = ['npm', 'native', 'cuda-emulated'];
  await setup({ need: hasGpu() ? [...parts, 'cuda'] : parts, packages: Object.keys(testPackages) });
  const failed = args.length === 0 ? await runChecks() : 0;
  const tests = await runVitest(['quick', 'slow'], args);
  if (args.length === 0)
    process.stdout.write('not run here: the long tests, a quarter of an hour of two cores: npm run test:long\n');
  closingLine({ ...tests, failed: tests.failed + failed });
  return tests.code || (failed > 0 ? 1 : 0);
});
