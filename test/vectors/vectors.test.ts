/** Recorded runs of vLLM's own manager, replayed op by op. See packages/prefix-cache/vectors/README.md. */
import { readdirSync } from 'node:fs';
import { expect, it } from 'vitest';
import { readRuns, replayRuns } from './kv-cache-manager.ts';

const folder = new URL('../../packages/prefix-cache/vectors/', import.meta.url);
const files = readdirSync(folder).filter((name) => name.endsWith('.json.gz'));

it.each(files)('%s', (name) => {
  const { equal, total, first } = replayRuns(readRuns(new URL(name, folder)));
  expect(first).toBeUndefined();
  expect(equal).toBe(total);
});
