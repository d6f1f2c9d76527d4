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
import type { BenchContext, Figure, Suite } from '../figures.ts';
import { sizesOf, systemFigures } from '../gpu-system/figures.ts';

const kernelBench = fileURLToPath(new URL('../../build/cuda/kernel_bench', import.meta.url));
const torchAttention = fileURLToPath(new URL('../../packages/engine/cuda/checks/torch_attention.py', import.meta.url));
const promptTokens = 10_000;
const models = ['random:0.5b', 'random:8b'] as const;

const suite: Suite = {
  name: 'gpu',
  description: 'the CUDA backend: kernels, GEMM, an 8B shape, transfers; cold, warm and restart through the system',
  async run(context) {
    const missing = gpuMissing();
    if (missing !== null) throw new KvError('GPU', `bench gpu: ${missing}; run it on a machine with an NVIDIA GPU`);
    if (!existsSync(kernelBench))
      throw new KvError('SETUP', `${kernelBench} was not built; install nvcc, run: npm run build`);
    const figures = await kernelFigures(context);
    const { scratchDir } = context;
    for (const model of models) {
      try {
        await resolveModel(model, (line, share) => context.log(`${line}: ${Math.round(100 * share)} %`));
      } catch (error) {
        context.log(`SKIPPED ${model}: ${(error as Error).message}`);
        continue;
      }
      const one = { backend: 'cuda', model, ...sizesOf(model), promptTokens, maxStepTokens: null, scratchDir } as const;
      await systemFigures(one, (figure) => figures.push(figure));
    }
    return figures;
  },
};
export default suite;

/** kernel_bench prints figures in this project's form, one a line; arguments name some of its cases. A case that failed costs itself only. */
async function kernelFigures({ args, log }: BenchContext): Promise<Figure[]> {
  const child = spawn(kernelBench, [...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  const ended = new Promise<number | null>((resolve, reject) => child.once('error', reject).once('close', resolve));
  const printed = await text(child.stdout);
  const code = await ended;
  const figures = figuresOf(printed, log);
  if (figures.length === 0) throw new KvError('GPU', `kernel_bench ended with ${code}; what it said stands above`);
  return [...figures, ...torchFigures(printed, log)];
}

function figuresOf(printed: string, log: (line: string) => void): Figure[] {
  const lines = printed.split('\n').filter((line) => line.endsWith('}'));
  return lines.flatMap((line) => {
    const said = JSON.parse(line) as Figure | { readonly case: string; readonly error: string };
    if (!('error' in said)) return [said];
    log(`FAILED ${said.case}: ${said.error}`);
    return [];
  });
}

/** Prefill attention against torch's, at the shapes that kernel_bench has just measured. */
function torchFigures(printed: string, log: (line: string) => void): Figure[] {
  const python = process.env.KVTIER_TORCH_PYTHON ?? 'python3';
  const run = spawnSync(python, [torchAttention], { input: printed, encoding: 'utf8', timeout: 300_000 });
  if (run.status === 0) return figuresOf(run.stdout, log);
  const why = run.error?.message ?? run.stderr.trim().split('\n').at(-1);
  log(`SKIPPED the comparison with torch: ${why} (KVTIER_TORCH_PYTHON names a Python with torch)`);
  return [];
}
