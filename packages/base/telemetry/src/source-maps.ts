/**
 * Source maps of a service's files, parsed before it is ready. Node parses the map of a file when the first stack trace goes through it, all
 * in one turn: 60 ms for the largest, at the first request that fails.
 */
import { readdirSync } from 'node:fs';
import { findSourceMap } from 'node:module';
import { dirname, join } from 'node:path';

/** Of the program and of what programs share; nothing where Node was not told to use them, or where sources run as they are. */
export function readSourceMaps(): void {
  const program = process.argv[1];
  if (!process.sourceMapsEnabled || program === undefined) return;
  // This module is one of those that programs share. (`import.meta.url` says where its source lies.)
  for (const folder of new Set([dirname(program), import.meta.dirname]))
    for (const file of readdirSync(folder)) if (file.endsWith('.mjs')) findSourceMap(join(folder, file));
}
