/** npm run gpu:record -- FIGURES.JSONL...: what sessions on GPU machines measured, into bench/results (bench/session-record.ts). */
import { script } from './lib/command.mjs';
import { importTypeScript } from './lib/typescript.mjs';
import { setup } from './setup.mjs';

await script(async (args) => {
  await setup({ need: ['npm'] });
  const { main } = await importTypeScript('bench/session-record.ts');
  return main(args);
});
