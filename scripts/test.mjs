/**
 * npm test: set-up, every check, every test (quick and slow). Ends with one line: "N passed, N failed, N skipped".
 * `npm test -- PATH` runs the tests of a path only, without the checks.
 *
 * Where there is no GPU the CUDA backend is compiled all the same, to show that it does. This, and then the tests that only compute, run beside
 * all others: these wait for servers, deaths and starts, and leave a third of each core free.
 */
import { runChecks } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { compileBeside, cudaGap, hasGpu } from './lib/native.mjs';
import { testPackages } from './lib/system.mjs';
import { closingLine, runVitest, runVitestBeside, together } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

/**
 * Slow tests that only compute: at the lowest priority each may take many times as long as alone, and nothing in it has a limit that it then
 * would not keep. The simulations have a time of their own.
 */
const computing = [
  'test/sim/',
  'packages/engine/executor/src/cuda-kernels.slow.test.ts',
  'packages/engine/executor/src/gpu-figures.slow.test.ts',
  'packages/engine/executor/src/replaced-model.slow.test.ts',
  'packages/base/data-plane/src/identity.slow.test.ts',
  'test/e2e/python-sanitized.slow.test.ts',
];

await script(async (args) => {
  const parts = ['npm', 'native', 'cuda-emulated'];
  await setup({ need: hasGpu() ? [...parts, 'cuda'] : parts, packages: Object.keys(testPackages) });
  if (!hasGpu() && cudaGap(['cuda'])) process.stdout.write(`skipped: ${cudaGap(['cuda'])}\n`);
  const compiled = hasGpu() || args.length > 0 ? '' : compileBeside(['cuda']);
  let failed = args.length === 0 ? await runChecks() : 0;
  const tests = await (args.length > 0 ? runVitest(['quick', 'slow'], args) : everything(compiled));
  const complaint = await compiled;
  if (complaint !== '') {
    process.stdout.write(`FAILED  the CUDA backend does not compile:\n${complaint}\n`);
    failed += 1;
  }
  closingLine({ ...tests, failed: tests.failed + failed });
  return tests.code || (failed > 0 ? 1 : 0);
});

/** @param {Promise<string> | ''} compiled what wants the same idle time; it comes first, since a slow test reads what it keeps */
async function everything(compiled) {
  const computed = Promise.resolve(compiled).then(() =>
    runVitestBeside(['slow'], [...computing, '--testTimeout=900000']),
  );
  computed.catch(() => {}); // told where it is awaited
  const quick = await runVitest(['quick'], []);
  const slow = await runVitest(['slow'], [], { without: computing });
  return [quick, slow, await computed].reduce(together);
}
