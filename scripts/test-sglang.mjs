/**
 * npm run test:sglang: the storage backend under SGLang's own classes. Python is `python3`, or what KVTIER_SGLANG_PYTHON
 * names (a command with its arguments); without SGLang there it says so in one line and fails.
 */
import { spawnSync } from 'node:child_process';
import { SetupError, script } from './lib/command.mjs';
import { closingLine, runVitest, within } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

const [file, ...rest] = (process.env.KVTIER_SGLANG_PYTHON ?? 'python3').split(' ');

await script(async (args) => {
  const found = spawnSync(file, [
    ...rest,
    '-c',
    'import importlib.util as u, sys; sys.exit(u.find_spec("sglang") is None)',
  ]);
  if (found.status !== 0) {
    throw new SetupError(
      `${[file, ...rest].join(' ')} has no SGLang; install it, or name a Python that has it in KVTIER_SGLANG_PYTHON`,
    );
  }
  await setup({ need: ['npm', 'native'] });
  const tests = await runVitest(['slow'], [...within('test/sglang', args), '--retry=0']);
  closingLine(tests);
  return tests.code;
});
