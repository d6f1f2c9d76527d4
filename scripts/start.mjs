/** npm start [-- OPTIONS]: set-up, then `kvtier up OPTIONS` in this process, which ends with npm, however that ends. */
import { script } from './lib/command.mjs';
import { endWithParent } from './lib/parent.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  if (process.env.npm_lifecycle_event !== undefined) endWithParent();
  await setup();
  const { main } = await importTypeScript('packages/cli/src/main.ts');
  return main(['up', ...args]);
});
