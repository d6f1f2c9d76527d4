/** npm run demo [-- --json]: set-up, then `kvtier demo`. */
import { script } from './lib/command.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup();
  const { main } = await importTypeScript('packages/cli/src/main.ts');
  return main(['demo', ...args]);
});
