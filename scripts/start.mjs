/** npm start [-- OPTIONS]: set-up, then `kvtier up OPTIONS` in this process, which ends with npm, however that ends. */
import { script } from './lib/command.mjs';
import { kvtier } from './lib/kvtier.mjs';
import { endWithParent } from './lib/parent.mjs';

await script((args) => {
  if (process.env.npm_lifecycle_event !== undefined) endWithParent();
  return kvtier(['up', ...args]);
});
