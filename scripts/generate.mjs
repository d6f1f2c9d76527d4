/** npm run generate: writes packages/base/wire/src/generated anew from proto/. */
import { generate } from './lib/checks.mjs';
import { script } from './lib/command.mjs';
import { step } from './lib/progress.mjs';
import { setup } from './setup.mjs';

await script(async () => {
  await setup({ need: ['npm'] });
  await step('generate from proto/', generate);
});
