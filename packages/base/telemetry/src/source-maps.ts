/**
 * Source maps of a service's files, parsed before it is ready. Node parses the map of a file when the first stack trace goes through it, all
 * in one turn: 60 ms for the largest, at the first request that fails.
 */
import { existsSync, readdirSync } from 'node:fs';
import { findSourceMap } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** Of the program and of what programs share; nothing where Node was not told to use them, or where sources run as they are. */
export function readSourceMaps(): void {
  const program = process.argv[1];
  if (!process.sourceMapsEnabled || program === undefined) return;
  const folders = new Set([dirname(program), dirname(fileURLToPath(import.meta.url))]);
  // A packed system says the place of the source for `import.meta.url`, and has no maps there.
  for (const folder of [...folders].filter((folder) => existsSync(folder)))
    for (const file of readdirSync(folder)) if (file.endsWith('.mjs')) findSourceMap(join(folder, file));
}
