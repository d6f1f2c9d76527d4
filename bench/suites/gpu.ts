/**
 * The CUDA backend on this machine's GPU: every kernel, matrix products, whole steps of an 8B shape and transfers, each beside
 * its limit measured in the same run (`kernel_bench`, packages/engine/cuda/checks), then time to first token through the
 * whole system, for models of real shapes. Attention stands beside torch's, too, where a Python with torch is found
 * (KVTIER_TORCH_PYTHON, default python3). Says clearly when there is no GPU.
 */
import { spawn, spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { text } from 'node:stream/consumers';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { gpuMissing } from '@kvtier/executor';
import { resolveModel } from '@kvtier/model';
import { argumentsOf } from '../arguments.ts';
import { PartlyMeasured } from '../failed.ts';
import type { Figure, Suite } from '../figures.ts';
import { sizesOf, systemFigures } from '../gpu-system/figures.ts';

const kernelBench = fileURLToPath(new URL('../../build/cuda/kernel_bench', import.meta.url));
const torchAttention = fileURLToPath(new URL('../../packages/engine/cuda/checks/torch_attention.py', import.meta.url));
const promptTokens = 10_000;
const models = ['random:0.5b', 'random:8b'] as const;

const suite: Suite = {
  name: 'gpu',
  description: 'the CUDA backend: kernels, GEMM, an 8B shape, transfers; cold, warm and restart through the system',
  /** `npm run bench -- gpu [CASE...]`: these of kernel_bench's cases, by a part of their names. */
  async run(context) {
    const { words } = argumentsOf('gpu', context.args, { anyWord: 'CASE' });
    const missing = gpuMissing();
    if (missing !== null) throw new KvError('GPU', `bench gpu: ${missing}; run it on a machine with an NVIDIA GPU`);
    if (!existsSync(kernelBench))
      throw new KvError('SETUP', `${kernelBench} was not built; install nvcc, run: npm run build`);
    const { figures, failed } = await kernelFigures(words, context.log);
    const { scratchDir } = context;
    for (const model of models) {
      try {
        await resolveModel(model, (line, share) => context.log(`${line}: ${Math.round(100 * share)} %`));
      } catch (error) {
        failed.push(`SKIPPED ${model}: ${(error as Error).message}`);
        context.log(failed.at(-1)!);
        continue;
      }
      const one = { backend: 'cuda', model, ...sizesOf(model), promptTokens, maxStepTokens: null, scratchDir } as const;
      await systemFigures(one, (figure) => figures.push(figure));
    }
    if (failed.length > 0) throw new PartlyMeasured('gpu', figures, failed);
    return figures;
  },
};
export default suite;

interface Measured {
  readonly figures: Figure[];
  /** One line each, of cases that did not bring theirs. */
  readonly failed: string[];
}

/** kernel_bench prints figures in this project's form, one a line; arguments name some of its cases. A case that failed costs itself only. */
async function kernelFigures(cases: readonly string[], log: (line: string) => void): Promise<Measured> {
  const child = spawn(kernelBench, [...cases], { stdio: ['ignore', 'pipe', 'inherit'] });
  const ended = new Promise<number | null>((resolve, reject) => child.once('error', reject).once('close', resolve));
  const printed = await text(child.stdout);
  const measured = measuredOf(printed, await ended);
  if (measured.figures.length === 0)
    throw new KvError('GPU', `${measured.failed.join('; ')}; what kernel_bench said stands above`);
  const beside = torchFigures(printed, log);
  const failed = [...measured.failed, ...beside.failed];
  for (const line of failed) log(line);
  return { figures: [...measured.figures, ...beside.figures], failed };
}

/** Of what kernel_bench printed, and its exit code. */
export function measuredOf(printed: string, code: number | null): Measured {
  const figures: Figure[] = [];
  const failed: string[] = [];
  for (const line of printed.split('\n').filter((each) => each.endsWith('}'))) {
    const said = JSON.parse(line) as Figure | { readonly case: string; readonly error: string };
    if ('error' in said) failed.push(`FAILED ${said.case}: ${said.error}`);
    else figures.push(said);
  }
  if (failed.length === 0 && (code !== 0 || figures.length === 0))
    failed.push(`FAILED: kernel_bench ended with ${code}`);
  return { figures, failed };
}

/** Prefill attention against torch's, at the shapes that kernel_bench has just measured. Where there is no torch, there is no comparison. */
export function torchFigures(printed: string, log: (line: string) => void): Measured {
  const python = process.env.KVTIER_TORCH_PYTHON ?? 'python3';
  const run = spawnSync(python, [torchAttention], { input: printed, encoding: 'utf8', timeout: 300_000 });
  const measured = run.stdout?.trim() ? measuredOf(run.stdout, 0) : { figures: [], failed: [] };
  const why = run.error?.message ?? run.stderr.trim().split('\n').at(-1);
  const isNoTorch = run.status === 3 || (run.error as NodeJS.ErrnoException | undefined)?.code === 'ENOENT';
  if (run.status !== 0 && !isNoTorch) measured.failed.push(`FAILED the comparison with torch: ${why}`);
  if (measured.figures.length + measured.failed.length > 0) return measured;
  log(`SKIPPED the comparison with torch: ${why} (KVTIER_TORCH_PYTHON names a Python with torch)`);
  return { figures: [], failed: [] };
}
