#!/usr/bin/env node
/** npx kvtier COMMAND: set-up, then the `kvtier` command in this process, which ends with npx, however that ends. */
import { script } from './lib/command.mjs';
import { kvtier } from './lib/kvtier.mjs';
import { endWithParent } from './lib/parent.mjs';

await script((args) => {
  if (process.env.npm_lifecycle_event !== undefined) endWithParent();
  return kvtier(args);
});
