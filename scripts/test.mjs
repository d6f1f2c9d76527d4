/**
 * npm test: set-up, every check, every test (quick and slow). Ends with one line: "N passed, N failed, N skipped".
 * `npm test -- PATH` runs the tests of a path only, without the checks.
 *
 * Checks, and tests that only compute, run beside the other tests and behind them: these mostly wait.
 *
 * Where there is no GPU the CUDA backend is compiled all the same, to show that it does: beside the tests, which mostly wait.
 */
import { runChecks } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { compileBeside, cudaGap, hasGpu } from './lib/native.mjs';
import { testPackages } from './lib/system.mjs';
import { closingLine, runVitest, together } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  const parts = ['npm', 'native', 'cuda-emulated'];
  await setup({ need: hasGpu() ? [...parts, 'cuda'] : parts, packages: Object.keys(testPackages) });
  if (!hasGpu() && cudaGap(['cuda'])) process.stdout.write(`skipped: ${cudaGap(['cuda'])}\n`);
  const compiled = hasGpu() || args.length > 0 ? '' : compileBeside(['cuda']);
  const [tests, failedChecks] = args.length > 0 ? [await runVitest(['quick', 'slow'], args), 0] : await everything();
  let failed = failedChecks;
  const complaint = await compiled;
  if (complaint !== '') {
    process.stdout.write(`FAILED  the CUDA backend does not compile:\n${complaint}\n`);
    failed += 1;
  }
  closingLine({ ...tests, failed: tests.failed + failed });
  return tests.code || (failed > 0 ? 1 : 0);
});

/** Every test and every check: who does not wait, beside those who do, and behind them. */
async function everything() {
  const waiting = runVitest(['quick', 'slow'], [], { lane: 'waiting' });
  const failedChecks = await runChecks({ beside: true });
  const computing = runVitest(['slow'], [], { lane: 'computing', beside: true });
  return [together(await Promise.all([waiting, computing])), failedChecks];
}
