/**
 * How our programs are started: from the bundle that the set-up makes of each (scripts/lib/programs.mjs), which starts in a
 * fifth of the time, while no source has changed since; else from the sources themselves, through tsx.
 */
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { bundleOf, checkout } from '@kvtier/telemetry';

const programs = {
  kvtier: { bundle: 'cli/kvtier.mjs', source: 'packages/cli/src/kvtier.ts' },
  coordinator: { bundle: 'services/coordinator/main.mjs', source: 'services/coordinator/src/main.ts' },
  'engine-worker': { bundle: 'services/engine-worker/main.mjs', source: 'services/engine-worker/src/main.ts' },
  'cache-node': { bundle: 'services/cache-node/main.mjs', source: 'services/cache-node/src/main.ts' },
} as const;
export type Program = keyof typeof programs;

/**
 * MiB of V8's young generation, of those that have many requests at a time. With its default every hundredth step of an engine with 256
 * requests waits 2 ms for a collection; a collection costs what has survived it, and so a larger one costs no more, only less often.
 */
const youngGeneration = ['--min-semi-space-size=32', '--max-semi-space-size=32'];

/** Node's own flags, and then as `program`: how `kvtier up` starts it. */
export const started = (name: Program): string[] => [
  ...(name === 'coordinator' || name === 'engine-worker' ? youngGeneration : []),
  ...program(name),
];

/** What comes after `node` and its own flags, and before the program's arguments. `root`: the checkout. */
export function program(name: Program, root = checkout): string[] {
  const { bundle, source } = programs[name];
  const made = bundleOf(bundle, root);
  return made !== undefined
    ? [made]
    : ['--import', pathToFileURL(createRequire(import.meta.url).resolve('tsx')).href, join(root, source)];
}
