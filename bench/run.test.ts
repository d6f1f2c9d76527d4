/** A run of a suite ends with 0 when all of it was measured, and else says what was not. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, vi } from 'vitest';
import { PartlyMeasured } from './failed.ts';
import { type Figure, rate } from './figures.ts';
import { runSuite } from './run.ts';
import { measuredOf, torchFigures } from './suites/gpu.ts';

const figure = rate('copy', 1, 'GB/s', 2, 'memcpy');

/** Exit code and the last line of stdout. */
async function ran(run: () => Promise<Figure[]>): Promise<{ code: number; said: unknown }> {
  const out = vi.spyOn(process.stdout, 'write').mockReturnValue(true);
  const errors = vi.spyOn(process.stderr, 'write').mockReturnValue(true);
  try {
    const suite = { name: 'run-test', description: '', run };
    const code = await runSuite(suite, [], { json: true, record: false }, { ensureSystemPackages: async () => {} });
    return { code, said: JSON.parse(String(out.mock.lastCall![0])) };
  } finally {
    out.mockRestore();
    errors.mockRestore();
  }
}

it('says the figures', async () => {
  expect(await ran(async () => [figure])).toEqual({ code: 0, said: { suite: 'run-test', figures: [figure] } });
});

it('a suite that measured a part says its figures, names what failed, and ends with 1', async () => {
  const part = async (): Promise<Figure[]> => {
    throw new PartlyMeasured('run-test', [figure], ['FAILED GEMM: too slow']);
  };
  const said = { suite: 'run-test', figures: [figure], failed: ['FAILED GEMM: too slow'] };
  expect(await ran(part)).toEqual({ code: 1, said });
});

it('a suite that measured nothing is an error', async () => {
  await expect(ran(async () => [])).rejects.toMatchObject({ code: 'CONFIG' });
});

it.each([
  ['a case that failed', [figure, { case: 'GEMM', error: 'too slow' }], 1, ['FAILED GEMM: too slow']],
  ['a death between figures', [figure], 139, ['FAILED: kernel_bench ended with 139']],
  ['no figure at all', [], 0, ['FAILED: kernel_bench ended with 0']],
  ['nothing', [figure], 0, []],
])('of kernel_bench, %s is told as failed', (_, lines, code, failed) => {
  const printed = ['noise', ...lines.map((line) => JSON.stringify(line))].join('\n');
  expect(measuredOf(printed, code)).toEqual({ figures: lines.filter((line) => 'name' in line), failed });
});

it.each([
  ['all shapes failed', 'echo \'{"case":"a","error":"no memory"}\'; exit 3', [], ['FAILED a: no memory']],
  [
    'it broke off behind a figure',
    `echo '${JSON.stringify(figure)}'; echo gone >&2; exit 1`,
    [figure],
    ['FAILED the comparison with torch: gone'],
  ],
  ['there is no torch', 'echo "no torch" >&2; exit 3', [], []],
])('beside torch: %s', (_, script, figures, failed) => {
  const dir = mkdtempSync(join(tmpdir(), 'kvtier-torch-'));
  try {
    writeFileSync(join(dir, 'python'), `#!/bin/sh\ncat > /dev/null\n${script}\n`, { mode: 0o755 });
    vi.stubEnv('KVTIER_TORCH_PYTHON', join(dir, 'python'));
    expect(torchFigures('', () => {})).toEqual({ figures, failed });
  } finally {
    vi.unstubAllEnvs();
    rmSync(dir, { recursive: true });
  }
});
