/** npm run vectors -- DIR: set-up, then replay recorded runs; see test/vectors/run.ts. */
import { script } from './lib/command.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup();
  const { main } = await importTypeScript('test/vectors/run.ts');
  return main(args);
});
