/**
 * What a machine with a GPU runs from the archive of `npm run gpu:bundle`: one case of figures through the whole system.
 *
 *   node PROGRAM BACKEND MODEL [PROMPT_TOKENS [MAX_STEP_TOKENS]]      default: 10,000 tokens, steps as the worker has them
 *
 * A line of JSON a figure, as it is measured; a case that fails is a line with its error, and exit code 1. KVTIER_BENCH_DIR names a
 * folder on the disk that is measured. Ended by a signal it takes with it all that it has started, and leaves its folder to who gave it.
 */
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { sizesOf, systemFigures } from './figures.ts';
import type { SystemCase } from './systems.ts';

const tell = (line: unknown): void => void process.stdout.write(`${JSON.stringify(line)}\n`);

function caseOf(args: readonly string[], scratchDir: string): SystemCase {
  const [backend = '', model = '', promptTokens = '10000', maxStepTokens] = args;
  if (backend !== 'cpu' && backend !== 'cuda') throw new Error(`"${backend}" is no backend; say cuda or cpu`);
  const tokens = Number(promptTokens);
  if (!Number.isInteger(tokens) || tokens < 64)
    throw new Error(`"${promptTokens}" is not a count of tokens from 64 on`);
  const steps = maxStepTokens === undefined ? null : Number(maxStepTokens);
  if (steps !== null && !(Number.isInteger(steps) && steps > 0))
    throw new Error(`"${maxStepTokens}" is not a count of tokens`);
  return { backend, model, ...sizesOf(model), scratchDir, promptTokens: tokens, maxStepTokens: steps };
}

// Node dies of a signal without its exit handlers, of a second one in the midst of them, too (`timeout` gives it twice); and what is launched
// here is in no process group of ours: by these it is killed (launch.ts).
for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => process.exit(143));

const scratchDir = mkdtempSync(join(process.env.KVTIER_BENCH_DIR || tmpdir(), 'kvtier-system-'));
try {
  await systemFigures(caseOf(process.argv.slice(2), scratchDir), tell);
} catch (error) {
  tell({ case: `through the system: ${process.argv.slice(2).join(' ')}`, error: (error as Error).message });
  process.exitCode = 1;
} finally {
  for (const dataDir of readdirSync(scratchDir)) removeStaleArenas(join(scratchDir, dataDir), '/dev/shm');
  rmSync(scratchDir, { recursive: true, force: true });
}
