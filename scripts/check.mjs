/** npm run check: lint, protocol, types, the import-direction and style tests, and all quick tests. */
import { runChecks } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { closingLine, runVitest } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup({ need: ['npm', 'native', 'cuda-emulated'] });
  const failedChecks = await runChecks();
  const tests = await runVitest(['quick'], args);
  closingLine({ ...tests, failed: tests.failed + failedChecks });
  return tests.code || (failedChecks > 0 ? 1 : 0);
});
