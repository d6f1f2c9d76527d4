/**
 * npm run test:long: what looks at much and takes minutes of a core each: every kernel on the emulator and each of its waits taken away,
 * the native code under sanitizers, surveys in virtual time, every moment of a start, the GPU session's own tools. `npm run test:long -- PATH`
 * runs those of a path only. Where there is an nvcc the CUDA backend is compiled, to show that it does.
 */
import { script } from './lib/command.mjs';
import { cudaGap } from './lib/native.mjs';
import { testPackages } from './lib/system.mjs';
import { closingLine, runVitest } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  const gap = cudaGap(['cuda']);
  const parts = ['npm', 'native', 'cuda-checks'];
  await setup({ need: gap ? parts : [...parts, 'cuda'], packages: Object.keys(testPackages) });
  if (gap) process.stdout.write(`skipped: ${gap}\n`);
  const tests = await runVitest(['long'], args);
  closingLine(tests);
  return tests.code;
});
