/**
 * What ptxas says of every kernel: registers that do not fit are spilled to memory, and a kernel at the memory's speed pays for each
 * byte. Needs nvcc and no GPU. For sm_90a (H100, H200) always, half a minute of a core; for sm_80, too, and for the f16 twins of
 * templates whose bf16 is compiled already, by `npm run test:gpu` and KVTIER_PTXAS=1: two minutes in all. A kernel file's answer is kept
 * in `build/ptxas` until it, or a header beside it, changes; `npm run test:long`, which compiles these files anyhow, keeps it there.
 */
import { execFile, execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { describe, expect, it } from 'vitest';

const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));
const script = new URL('../../../../scripts/lib/ptxas.mjs', import.meta.url).href;
const { kernelSources, keepPtxas, ptxasFile } = (await import(script)) as {
  kernelSources: () => string[];
  keepPtxas: (file: string, said: string) => void;
  ptxasFile: (source: string, architecture: string, nvcc: string) => string;
};
const include = ['../executor/cc', '../../base/data-plane/cc'].flatMap((path) => ['-I', join(cuda, path)]);
/** nvcc takes a core for 1 to 13 s a file; on a busy machine many times that. */
const deadlineMs = 900_000;

interface Kernel {
  readonly name: string;
  readonly spilledBytes: number;
}

/** Absent: no kernel is compiled on this machine. */
const nvcc = ((): string | undefined => {
  try {
    return execFileSync('nvcc', ['--version'], { encoding: 'utf8' });
  } catch {
    return undefined;
  }
})();

const sources = kernelSources();

async function said(source: string, architecture: string): Promise<string> {
  const file = ptxasFile(source, architecture, nvcc!);
  if (existsSync(file)) return readFileSync(file, 'utf8');
  const target = `arch=${architecture.replace('sm', 'compute')},code=${architecture}`;
  const flags = [
    '-std=c++20',
    '--expt-relaxed-constexpr',
    '-gencode',
    target,
    '-Xptxas',
    '-v',
    '-cubin',
    '-o',
    '/dev/null',
  ];
  const input = join(cuda, 'kernels', source);
  const { stderr } = await promisify(execFile)('nvcc', [...flags, ...include, input], {
    timeout: deadlineMs,
    maxBuffer: 16 << 20,
  });
  keepPtxas(file, stderr);
  return stderr;
}

/** Entry functions with what each spills; the lines of a function follow the one that names it. */
export function spills(text: string): Kernel[] {
  const kernels: Kernel[] = [];
  let name = '';
  for (const line of text.split('\n')) {
    name = /Compiling entry function '(\w+)'/.exec(line)?.[1] ?? name;
    const spilled = /(\d+) bytes spill stores, (\d+) bytes spill loads/.exec(line);
    if (!spilled || name === '') continue;
    kernels.push({ name, spilledBytes: Number(spilled[1]) + Number(spilled[2]) });
    name = '';
  }
  return kernels;
}

it('reads what ptxas says', () => {
  const lines = [
    "ptxas info    : Compiling entry function '_Z1aILi128EEvv' for 'sm_90a'",
    'ptxas info    : Function properties for _Z1aILi128EEvv',
    '    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads',
  ];
  expect(spills(lines.join('\n'))).toEqual([{ name: '_Z1aILi128EEvv', spilledBytes: 20 }]);
});

const all = process.env.KVTIER_PTXAS === '1';
const twins = sources.filter((file) => file.endsWith('_f16.cu'));
const asked = [
  ...sources.map((source) => [source, 'sm_90a'] as const),
  ...(all ? sources.map((source) => [source, 'sm_80'] as const) : []),
].filter(([source]) => all || !twins.includes(source));
if (nvcc === undefined) console.warn('SKIPPED: what ptxas spills (no nvcc)');

it('every twin that is left out has the file that it is a twin of', () => {
  for (const twin of twins) {
    const [f16, bf16] = [twin, twin.replace('_f16', '_bf16')].map((file) =>
      readFileSync(join(cuda, 'kernels', file), 'utf8'),
    );
    expect(bf16!.replaceAll('bf16', 'f16')).toBe(f16);
  }
});

describe.skipIf(nvcc === undefined)('no kernel of a head dimension up to 128 spills registers', () => {
  it.each(asked)('%s, %s', { timeout: deadlineMs }, async (source, architecture) => {
    const kernels = spills(await said(source, architecture));
    expect(kernels.length).toBeGreaterThan(0);
    // Outputs of 256 dimensions fill the registers of a thread: a few bytes are the price of the larger tile.
    const above = ({ name }: Kernel): boolean => /Li256E/.test(name) && /Attention/.test(name);
    expect(kernels.filter((kernel) => !above(kernel) && kernel.spilledBytes > 0)).toEqual([]);
    for (const { name, spilledBytes } of kernels.filter(above)) expect(spilledBytes, name).toBeLessThanOrEqual(128);
  });
});
