/** npm run bench -- SUITE [--json] | --list: set-up, the suite's own needs, then the suite. */
import { script } from './lib/command.mjs';
import { ensureSystemPackages } from './lib/system.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup();
  const { main } = await importTypeScript('bench/run.ts');
  return main(args, { ensureSystemPackages });
});
