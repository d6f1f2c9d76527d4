/** npm run sim -- --seed N [--steps M] [--verbose] | --seeds A..B: set-up, then the simulation; see test/sim/run.ts. */
import { script } from './lib/command.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup();
  const { main } = await importTypeScript('test/sim/run.ts');
  return main(args);
});
