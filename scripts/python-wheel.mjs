/** npm run python:wheel: the Python package as wheel and package of sources, into build/python. */
import { join } from 'node:path';
import { command, root, script } from './lib/command.mjs';
import { step } from './lib/progress.mjs';
import { setup } from './setup.mjs';

await script(async () => {
  await setup({ need: ['npm', 'native'] });
  const backend = join(root, 'packages/connector/python/build_backend.py');
  const target = join(root, 'build/python');
  const files = await step('wheel and package of sources', () =>
    command('python3', [backend, target], { remedy: 'install Python 3.10 or newer' }),
  );
  process.stdout.write(files);
});
