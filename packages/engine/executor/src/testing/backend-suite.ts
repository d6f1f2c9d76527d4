/**
 * What every backend of a GPU must show, whether its kernels run on one or on the emulator: the logits of transformers, the
 * same tokens with and without cached prefixes, blocks that travel through an arena, also between backends. Test code only.
 */
import { randomBytes } from 'node:crypto';
import { cp, mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { afterEach, describe, expect, it, vi } from 'vitest';
import {
  type ArenaPin,
  type BackendName,
  createExecutor,
  type Executor,
  type ExecutorOptions,
  type GpuSettings,
  type StepResult,
} from '../index.ts';
import { goldenDir, goldenFamilies, readGolden } from './golden.ts';
import { blocksFor, prefill, relativeError, runStep } from './run-step.ts';
import { expectOnlyItsOwnHarm, spoilToken } from './spoiled-token.ts';

export interface SuiteSize {
  /** Prompts with random cached prefixes. */
  readonly prompts: number;
  /** Families of the bf16 logits: all on a GPU, a few on the emulator. */
  readonly bf16Families: number;
}

const blockTokens = 16;
const blockCount = 64;

function optionsOf(backend: BackendName, family: string, gpu: GpuSettings): ExecutorOptions {
  const modelDir = goldenDir(family);
  return { modelDir, blockTokens, blockCount, threads: 1, maxStepTokens: 256, maxStepSequences: 4, backend, gpu };
}

const opened: Executor[] = [];
/** Closed when its test ends. */
export async function open(
  backend: BackendName,
  family: string,
  gpu: GpuSettings = {},
  onPinned?: ExecutorOptions['onPinned'],
): Promise<Executor> {
  const executor = await createExecutor({ ...optionsOf(backend, family, gpu), ...(onPinned && { onPinned }) });
  opened.push(executor);
  return executor;
}

export function describeGpuBackend(backend: 'cuda' | 'cuda-emulated', size: SuiteSize): void {
  afterEach(async () => {
    for (const executor of opened.splice(0)) await executor.close();
  });

  describe('logits of transformers', () => {
    it.each(goldenFamilies)('%s, f32, within 1e-3', { timeout: 120_000 }, async (family) => {
      const executor = await open(backend, family, { computeDtype: 'f32' });
      expect(executor.backend).toBe('cuda');
      await expectGolden(executor, family, 1e-3);
    });

    it.each(goldenFamilies.slice(0, size.bf16Families))(
      '%s, bf16, within 2e-2',
      { timeout: 120_000 },
      async (family) => {
        const executor = await open(backend, family, { computeDtype: 'bf16' });
        expect(executor.kv.dtype).toBe('bf16');
        await expectGolden(executor, family, 2e-2);
      },
    );
  });

  describe('cached prefixes', () => {
    it('change no greedy token, at every block boundary', { timeout: 240_000 }, async () => {
      const executor = await open(backend, 'llama', { computeDtype: 'f32' });
      const tokens = promptOf(1, 4 * blockTokens + 7);
      const expected = await greedy(executor, tokens, blocksFor(tokens.length + 8, blockTokens, 1), 0);
      for (let cached = 0; cached <= 4; cached++) {
        const blocks = [...blocksFor(cached * blockTokens, blockTokens, 1), ...blocksFor(96, blockTokens, 20)];
        expect(await greedy(executor, tokens, blocks, cached * blockTokens), `${cached} blocks`).toEqual(expected);
      }
    });

    it(`change no greedy token: ${size.prompts} random prompts`, { timeout: 600_000 }, async () => {
      const executor = await open(backend, 'llama', { computeDtype: 'f32' });
      for (let seed = 0; seed < size.prompts; seed++) {
        const tokens = promptOf(seed, 18 + ((seed * 37) % 90));
        const fullBlocks = Math.floor((tokens.length - 1) / blockTokens);
        const cached = 1 + (seed % fullBlocks);
        const expected = await greedy(executor, tokens, blocksFor(tokens.length + 8, blockTokens, 1), 0);
        const blocks = [...blocksFor(cached * blockTokens, blockTokens, 1), ...blocksFor(112, blockTokens, 20)];
        expect(await greedy(executor, tokens, blocks, cached * blockTokens), `prompt ${seed}`).toEqual(expected);
      }
    });
  });

  it('a token that makes no numbers spoils its own sequence alone', { timeout: 120_000 }, async () => {
    const modelDir = await mkdtemp(join(tmpdir(), 'kvtier-spoiled-'));
    try {
      await cp(goldenDir('llama'), modelDir, { recursive: true });
      await spoilToken(modelDir, 7);
      for (const computeDtype of ['f32', 'f16', 'bf16'] as const) {
        const executor = await createExecutor({ ...optionsOf(backend, 'llama', { computeDtype }), modelDir });
        opened.push(executor);
        await expectOnlyItsOwnHarm(executor, 7);
      }
    } finally {
      await rm(modelDir, { recursive: true });
    }
  });

  it('says why cuBLASLt is missing, whatever its path is called', { timeout: 60_000 }, async () => {
    const cublaslt = '/no "such\\folder"/libcublasLt.so';
    const without = await open(backend, 'llama', { computeDtype: 'f32', cublaslt });
    expect(without.describe!()).toMatchObject({ gemm: expect.stringContaining(cublaslt) });
  });

  it('captures all graphs at start and leaves cuBLASLt alone, when told', { timeout: 60_000 }, async () => {
    const later = await open(backend, 'llama', { computeDtype: 'f32' });
    const eager = await open(backend, 'llama', { computeDtype: 'f32', captureAtStart: true, cublaslt: 'off' });
    expect(later.describe!()).toMatchObject({ graphsUs: 0 });
    expect(eager.describe!()).toMatchObject({ gemm: expect.stringContaining('switched off') });
    expect(eager.describe!().graphsUs).toBeGreaterThan(0);
    const tokens = promptOf(9, 20);
    const blocks = blocksFor(32, blockTokens, 1);
    expect(await greedy(eager, tokens, blocks, 0)).toEqual(await greedy(later, tokens, blocks, 0));
  });

  it('the size of a step is measured where none is given, and chosen by what was kept from then on', {
    timeout: 120_000,
  }, async () => {
    const choicesFolder = await mkdtemp(join(tmpdir(), 'kvtier-step-sizes-'));
    const gpu: GpuSettings = { computeDtype: 'f32', stepSizes: [32, 64, 128], choicesFolder, longestStepMs: 60_000 };
    const start = async (maxStepTokens: number | 'measured'): Promise<Executor> => {
      const blockCount = { kvBytes: undefined, gpuMemoryUtilization: 0.05 };
      const executor = await createExecutor({ ...optionsOf(backend, 'llama', gpu), maxStepTokens, blockCount });
      opened.push(executor);
      return executor;
    };
    try {
      const first = await start('measured');
      expect(first.describe!()).toMatchObject({ stepSizeBy: 'measurement', stepPromptTokens: 128 });
      expect([32, 64, 128]).toContain(first.maxStepTokens);
      const tokens = promptOf(3, 30);
      const expected = await greedy(first, tokens, blocksFor(40, blockTokens, 1), 0);
      await first.close();

      const names = (await readdir(choicesFolder)).filter((name) => name.endsWith('.txt'));
      expect(names).toEqual([expect.stringMatching(/^steps-.*-driver-\d+-kernels-3-[0-9a-f]{16}\.txt$/)]);
      const file = join(choicesFolder, names[0]!);
      const [heading] = (await readFile(file, 'utf8')).split('\n');
      // 10, 9.375 and 9.375 microseconds a token: the last gains nothing.
      const rows = ['128 32 300 340', '128 64 600 600', '128 128 1200 1200'];
      await writeFile(file, [heading, ...rows, 'end', ''].join('\n'));
      const again = await start('measured');
      expect(again.describe!()).toMatchObject({
        stepTokens: 64,
        stepSizeBy: 'kept measurement',
        stepTimes: [
          { tokens: 32, usPerToken: 10, longestUs: 340 },
          { tokens: 64, usPerToken: 9.375, longestUs: 600 },
          { tokens: 128, usPerToken: 9.375, longestUs: 1200 },
        ],
      });
      expect(await greedy(again, tokens, blocksFor(40, blockTokens, 1), 0)).toEqual(expected);
      const { maxStepTokens, blockCount } = again;
      expect(maxStepTokens).toBe(64);
      await again.close();

      const given = await start(64);
      expect(given.describe!()).toMatchObject({ stepTokens: 64, stepSizeBy: 'setting' });
      expect([given.maxStepTokens, given.blockCount]).toEqual([64, blockCount]);
    } finally {
      await rm(choicesFolder, { recursive: true });
    }
  });

  describe('arena copies', () => {
    const arenaBytes = 1 << 20;

    async function withArena(run: (path: string, id: bigint) => Promise<void>): Promise<void> {
      const path = `/dev/shm/kvtier-test-cuda-${process.pid}-${randomBytes(4).toString('hex')}`;
      const arena = native.arenaCreate(path, arenaBytes, 1);
      const id = native.arenaId(arena);
      native.arenaClose(arena);
      try {
        await run(path, id);
      } finally {
        await rm(path, { force: true });
      }
    }

    it('what the CPU computed is the prefix of what the GPU computes, and the other way', {
      timeout: 120_000,
    }, async () => {
      await withArena(async (path, id) => {
        const cpu = await open('cpu', 'llama');
        const gpu = await open(backend, 'llama', { computeDtype: 'f32' });
        expect(gpu.kv).toEqual(cpu.kv);
        expect(gpu.modelDigest).toEqual(cpu.modelDigest);
        const tokens = promptOf(5, 3 * blockTokens + 5);
        const offsets = Float64Array.from([4096, 4096 + 65536, 4096 + 2 * 65536]);
        for (const [from, to] of [
          [cpu, gpu],
          [gpu, cpu],
        ] as const) {
          const whole = (await prefill(from, tokens, [tokens.length]))[0]!;
          const source = from.attachArena(path, arenaBytes, id);
          const target = to.attachArena(path, arenaBytes, id);
          const sums = await from.exportBlocks(source, Int32Array.of(1, 2, 3), offsets);
          expect([...(await to.importBlocks(target, Int32Array.of(31, 33, 35), offsets, sums))]).toEqual([1, 1, 1]);
          const rest = tokens.slice(3 * blockTokens);
          const { logits } = await runStep(to, [{ blocks: [31, 33, 35, 40], computed: 48, tokens: rest }]);
          expect(relativeError(logits!, whole)).toBeLessThan(1e-4);
          await from.detachArena(source);
          await to.detachArena(target);
        }
      });
    });

    it('come in with a step, layer by layer: the same tokens at every block boundary, none over a bad block', {
      timeout: 120_000,
    }, async () => {
      await withArena(async (path, id) => {
        const gpu = await open(backend, 'llama', { computeDtype: 'f32' });
        expect(gpu.importsByLayer).toBe(true);
        const tokens = promptOf(8, 4 * blockTokens + 3);
        const whole = (await prefill(gpu, tokens, [tokens.length]))[0]!;
        const arena = gpu.attachArena(path, arenaBytes, id);
        const offsets = Float64Array.from([4096, 4096 + 65536, 4096 + 2 * 65536, 4096 + 3 * 65536]);
        const sums = await gpu.exportBlocks(arena, Int32Array.of(1, 2, 3, 4), offsets);
        const withStep = (count: number, checksums: BigUint64Array): Promise<StepResult> => {
          const blocks = [41 + count, 31, 51, 21, 40].map((block, i) => (i < count ? block : 10 + i));
          const source = { arena, offsets: offsets.slice(0, count), checksums: checksums.slice(0, count) };
          const piece = { blocks, computed: count * blockTokens, tokens: tokens.slice(count * blockTokens) };
          return runStep(gpu, [piece], { sequence: 0, blockIds: Int32Array.from(blocks.slice(0, count)), ...source });
        };
        // The first one may come before the arena is pinned: then nothing is imported, and nothing drawn.
        const first = await withStep(4, sums);
        if (first.imported === null) expect([...first.tokenIds]).toEqual([-1]);
        await gpu.importBlocks(arena, Int32Array.of(60), offsets.slice(0, 1), sums.slice(0, 1));
        for (let count = 1; count <= 4; count++) {
          const { imported, logits } = await withStep(count, sums);
          expect([...imported!]).toEqual(new Array(count).fill(1));
          expect(relativeError(logits!, whole)).toBeLessThan(1e-4);
        }
        const wrong = sums.slice();
        wrong[2]! ^= 1n;
        const { imported, tokenIds } = await withStep(4, wrong);
        expect([[...imported!], [...tokenIds]]).toEqual([[1, 1, 0, 1], [-1]]);
        await gpu.detachArena(arena);
      });
    });

    it('says of each arena whether it is pinned, and what that took', { timeout: 60_000 }, async () => {
      await withArena(async (path, id) => {
        const told: ArenaPin[] = [];
        const gpu = await open(backend, 'llama', {}, (pin) => told.push(pin));
        const arena = gpu.attachArena(path, arenaBytes, id);
        await vi.waitUntil(() => told.length > 0, { timeout: 20_000 });
        expect(told).toEqual([{ bytes: arenaBytes, pinned: true, seconds: expect.any(Number), refusal: '' }]);
        expect(gpu.arenaPins).toEqual(told);
        await gpu.detachArena(arena);
        expect(gpu.arenaPins).toEqual([]);
      });
    });

    it('an arena that was left is unmapped, each of a row of them', { timeout: 60_000 }, async () => {
      const gpu = await open(backend, 'llama');
      for (let life = 0; life < 3; life++) {
        await withArena(async (path, id) => {
          const arena = gpu.attachArena(path, arenaBytes, id);
          expect(await isMapped(path)).toBe(true);
          await gpu.exportBlocks(arena, Int32Array.of(1), Float64Array.of(4096));
          await gpu.detachArena(arena);
          await vi.waitUntil(async () => !(await isMapped(path)), { timeout: 20_000 });
        });
      }
    });

    it('a payload that was changed is found, the others arrive', { timeout: 60_000 }, async () => {
      await withArena(async (path, id) => {
        const gpu = await open(backend, 'llama', { computeDtype: 'bf16' });
        await prefill(gpu, promptOf(6, 40), [40]);
        const arena = gpu.attachArena(path, arenaBytes, id);
        const offsets = Float64Array.from([8192, 3 * 8192 + 64]);
        const sums = await gpu.exportBlocks(arena, Int32Array.of(1, 2), offsets);
        sums[0]! ^= 1n;
        expect([...(await gpu.importBlocks(arena, Int32Array.of(9, 10), offsets, sums))]).toEqual([0, 1]);
        const again = await gpu.exportBlocks(arena, Int32Array.of(10), Float64Array.of(16 * 8192));
        expect(again[0]).toBe(sums[1]);
        await gpu.detachArena(arena);
      });
    });

    it('copies and steps run beside each other and change nothing', { timeout: 120_000 }, async () => {
      await withArena(async (path, id) => {
        const gpu = await open(backend, 'llama', { computeDtype: 'f32' });
        const tokens = promptOf(7, 45);
        const expected = await greedy(gpu, tokens, blocksFor(60, blockTokens, 1), 0);
        const arena = gpu.attachArena(path, arenaBytes, id);
        const offsets = Float64Array.from([4096, 4096 + 65536]);
        const sums = await gpu.exportBlocks(arena, Int32Array.of(1, 2), offsets);
        const copies = Array.from({ length: 8 }, (_, i) =>
          gpu.importBlocks(arena, Int32Array.of(40 + 2 * i, 41 + 2 * i), offsets, sums),
        );
        expect(await greedy(gpu, tokens, blocksFor(60, blockTokens, 8), 0)).toEqual(expected);
        for (const flags of await Promise.all(copies)) expect([...flags]).toEqual([1, 1]);
        expect(await greedy(gpu, tokens, [54, 55, 20, 21], 32)).toEqual(expected);
        await gpu.detachArena(arena);
      });
    });
  });
}

/** In this process. */
export const isMapped = async (path: string): Promise<boolean> =>
  (await readFile('/proc/self/maps', 'utf8')).includes(path);

async function expectGolden(executor: Executor, family: string, tolerance: number): Promise<void> {
  const { tokens, positions, logits } = readGolden(family);
  const rows = await prefill(
    executor,
    tokens,
    positions.map((position) => position + 1),
  );
  for (const [i, row] of rows.entries())
    expect(relativeError(row, logits[i]!), `at ${positions[i]}`).toBeLessThan(tolerance);
}

const promptOf = (seed: number, length: number): number[] =>
  Array.from({ length }, (_, i) => 3 + ((i * i * 13 + i * 5 + seed * 29 + ((seed * i) % 7)) % 150));

/** The first four tokens after the prompt, of whose first `computed` tokens the blocks hold KV. */
async function greedy(
  executor: Executor,
  prompt: readonly number[],
  blocks: readonly number[],
  computed: number,
): Promise<number[]> {
  const tokens = [...prompt];
  let done = computed;
  for (let i = 0; i < 4; i++) {
    const { tokenIds } = await runStep(executor, [{ blocks, computed: done, tokens: tokens.slice(done) }]);
    done = tokens.length;
    tokens.push(tokenIds[0]!);
  }
  return tokens.slice(prompt.length);
}
