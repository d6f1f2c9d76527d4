/**
 * The executor against Hugging Face transformers, run live on the demo model over a long prompt: what the golden files
 * cannot hold. Needs a Python with torch and transformers (KVTIER_TORCH_PYTHON, or .cache/torch-venv made by
 * `python3 -m venv .cache/torch-venv && .cache/torch-venv/bin/pip install torch transformers`).
 */
import { spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { createExecutor, type Executor } from '@kvtier/executor';
import { prefill, relativeError } from '@kvtier/executor/testing';
import { afterEach, describe, expect, it } from 'vitest';

const here = fileURLToPath(new URL('./', import.meta.url));
const root = fileURLToPath(new URL('../..', import.meta.url));
const python = process.env.KVTIER_TORCH_PYTHON ?? `${root}.cache/torch-venv/bin/python`;
const live = existsSync(python) && spawnSync(python, ['-c', 'import torch, transformers']).status === 0;
if (!live)
  console.warn(`SKIPPED: transformers run live, ${python} has no torch and transformers (the golden files ran)`);

let executor: Executor | undefined;
afterEach(async () => {
  await executor?.close();
});

describe.skipIf(!live)('transformers, run live', () => {
  it('agrees on the demo model over a long prompt', { timeout: 120_000 }, async () => {
    const dir = `${root}models/demo/model`;
    executor = await createExecutor({
      modelDir: dir,
      blockTokens: 16,
      blockCount: 128,
      threads: 2,
      maxStepTokens: 1024,
      maxStepSequences: 1,
    });
    const tokens = Array.from({ length: 1000 }, (_, i) => (i * i * 31 + i * 7) % 1330);
    const positions = [499, 997, 999];
    const asked = JSON.stringify({ tokens, positions });
    const answer = spawnSync(python, [`${here}make_golden.py`, '--logits', dir], { input: asked, encoding: 'utf8' });
    expect(answer.status, answer.stderr).toBe(0);
    const expected = JSON.parse(answer.stdout.trim().split('\n').at(-1)!) as number[][];
    const rows = await prefill(
      executor,
      tokens,
      positions.map((position) => position + 1),
    );
    for (const [i, row] of rows.entries()) expect(relativeError(row, expected[i]!)).toBeLessThan(1e-3);
  });
});
