#!/usr/bin/env node
/** npx kvtier COMMAND: set-up, then the `kvtier` command in this process. */
import { script } from './lib/command.mjs';
import { kvtier } from './lib/kvtier.mjs';

await script(kvtier);
