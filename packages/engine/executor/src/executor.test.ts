/**
 * The CPU executor's behaviour: cached prefixes, copies through an arena, batches, sampling, refusals. Small golden models
 * serve; the logits themselves are tested in test/numerics.
 */
import { randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { open, readFile, rm } from 'node:fs/promises';
import { setImmediate as turn } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { queryObjects } from 'node:v8';
import { native } from '@kvtier/data-plane';
import { InvariantError, KvError } from '@kvtier/errors';
import { afterEach, beforeEach, describe, expect, it, onTestFinished, vi } from 'vitest';
import { binding } from './binding.ts';
import { createExecutor, type Executor } from './index.ts';
import { blocksFor, prefill, relativeError, runStep } from './testing/run-step.ts';
import { makeSparseArena } from './testing/sparse-arena.ts';

const modelDir = fileURLToPath(new URL('../../../../test/numerics/golden/llama', import.meta.url));
const tokens = Array.from({ length: 100 }, (_, i) => 3 + ((i * i * 13 + i * 5) % 150));
const options = { modelDir, blockTokens: 16, blockCount: 64, threads: 2, maxStepTokens: 256, maxStepSequences: 4 };

let executor: Executor;
beforeEach(async () => {
  executor = await createExecutor(options);
});
afterEach(() => executor.close());

describe('model and layout', () => {
  it('says what it serves', () => {
    expect(executor.model).toMatchObject({
      family: 'llama',
      vocabSize: 160,
      layers: 2,
      heads: 4,
      kvHeads: 2,
      headDim: 16,
    });
    expect(executor.kv).toEqual({
      layers: 2,
      kvHeads: 2,
      headDim: 16,
      dtype: 'f32',
      blockTokens: 16,
      blockBytes: 2 * 2 * 2 * 16 * 16 * 4,
      order: 'layer,kv,head,token,dim',
    });
    expect(executor.modelDigest).toHaveLength(32);
  });

  it('has the same digest at each opening, another for another model', async () => {
    const again = await createExecutor(options);
    const other = await createExecutor({ ...options, modelDir: modelDir.replace(/llama$/, 'qwen2') });
    expect(again.modelDigest).toEqual(executor.modelDigest);
    expect(other.modelDigest).not.toEqual(executor.modelDigest);
    await Promise.all([again.close(), other.close()]);
  });
});

describe('arena copies', () => {
  const payloadBytes = 2 * 2 * 2 * 16 * 16 * 4;
  const arenaBytes = 1 << 20;
  let path: string;
  let id: bigint;

  beforeEach(() => {
    path = `/dev/shm/kvtier-test-${process.pid}-${randomBytes(4).toString('hex')}`;
    const arena = native.arenaCreate(path, arenaBytes, 1);
    id = native.arenaId(arena);
    native.arenaClose(arena);
  });
  afterEach(() => rm(path, { force: true }));

  // Aligned to 64 or not: two paths of the copy.
  it.each([4096, 4096 + 104])(
    'a prefix that was exported and imported elsewhere continues alike (offset %i)',
    async (first) => {
      const [whole] = await prefill(executor, tokens, [100], 1);
      const arena = executor.attachArena(path, arenaBytes, id);
      const offsets = Float64Array.from({ length: 6 }, (_, i) => first + i * (payloadBytes + 192));
      const checksums = await executor.exportBlocks(arena, Int32Array.of(1, 2, 3, 4, 5, 6), offsets);

      const target = Int32Array.of(40, 33, 34, 50, 36, 37);
      expect([...(await executor.importBlocks(arena, target, offsets, checksums))]).toEqual([1, 1, 1, 1, 1, 1]);
      const result = await runStep(executor, [{ blocks: [...target, 60], computed: 96, tokens: tokens.slice(96) }]);
      expect(relativeError(result.logits!, whole!)).toBeLessThan(1e-5);
      await executor.detachArena(arena);
    },
  );

  it('gives the XXH3-64 of each payload, and the bytes are there', async () => {
    await prefill(executor, tokens, [100], 1);
    const arena = executor.attachArena(path, arenaBytes, id);
    const [checksum] = await executor.exportBlocks(arena, Int32Array.of(2), Float64Array.of(8192));
    const file = await open(path);
    const payload = Buffer.alloc(payloadBytes);
    await file.read(payload, 0, payloadBytes, 8192);
    await file.close();
    expect(native.xxh3_64(payload)).toBe(checksum);
    expect(payload.some((byte) => byte !== 0)).toBe(true);
  });

  it('answers 0 for a payload with one flipped bit, 1 for its neighbours', async () => {
    await prefill(executor, tokens, [100], 1);
    const arena = executor.attachArena(path, arenaBytes, id);
    const offsets = Float64Array.of(4096, 4096 + payloadBytes, 4096 + 2 * payloadBytes);
    const checksums = await executor.exportBlocks(arena, Int32Array.of(1, 2, 3), offsets);
    const file = await open(path, 'r+');
    const byte = Buffer.alloc(1);
    for (const at of [0, 2047, 2048, payloadBytes - 1]) {
      const position = offsets[1]! + at;
      await file.read(byte, 0, 1, position);
      await file.write(Buffer.of(byte[0]! ^ 0x10), 0, 1, position);
      const flags = await executor.importBlocks(arena, Int32Array.of(10, 11, 12), offsets, checksums);
      expect([...flags]).toEqual([1, 0, 1]);
      await file.write(byte, 0, 1, position);
    }
    await file.close();
    expect([...(await executor.importBlocks(arena, Int32Array.of(10, 11, 12), offsets, checksums))]).toEqual([1, 1, 1]);
  });

  it('runs copies beside steps, and closes only after them', async () => {
    await prefill(executor, tokens, [100], 1);
    const arena = executor.attachArena(path, arenaBytes, id);
    const copies = Array.from({ length: 50 }, () =>
      executor.exportBlocks(arena, Int32Array.of(1, 2), Float64Array.of(4096, 65_536)),
    );
    const step = runStep(executor, [{ blocks: blocksFor(100, 16, 20), computed: 0, tokens }]);
    const closing = executor.close();
    const [first, ...rest] = await Promise.all(copies);
    for (const checksums of rest) expect(checksums).toEqual(first);
    expect((await step).tokenIds[0]).toBeGreaterThanOrEqual(0);
    await closing;
  });

  it('unmaps a large arena of small pages beside the event loop', async () => {
    const large = `${path}-large`;
    const bytes = 256 << 20; // to unmap it takes 12 ms of CPU time and more
    onTestFinished(() => rm(large, { force: true }));
    makeSparseArena(large, bytes, id);
    const mapped = (): number | undefined => {
      const kib = readFileSync('/proc/self/smaps', 'latin1')
        .split(large)[1]
        ?.match(/Rss: +(\d+) kB/)?.[1];
      return kib === undefined ? undefined : Number(kib) << 10;
    };
    const arena = executor.attachArena(large, bytes, id);
    await expect.poll(mapped, { interval: 20 }).toBe(bytes);
    const beforeMs = native.threadCpuMs();
    await executor.detachArena(arena);
    expect(native.threadCpuMs() - beforeMs).toBeLessThan(4);
    await expect.poll(mapped).toBe(undefined);
  });

  it('refuses an arena of another id, size or place', () => {
    expect(() => executor.attachArena(path, arenaBytes, id + 1n)).toThrow(KvError);
    expect(() => executor.attachArena(path, arenaBytes * 2, id)).toThrow(KvError);
    expect(() => executor.attachArena(`${path}-gone`, arenaBytes, id)).toThrow(KvError);
  });

  it('throws wrong arguments, and lives on', async () => {
    const arena = executor.attachArena(path, arenaBytes, id);
    const one = Int32Array.of(1);
    const at = (offset: number) => executor.exportBlocks(arena, one, Float64Array.of(offset));
    for (const offset of [0, -1, 4095, 4096.5, arenaBytes - payloadBytes + 1, 2 ** 60, Number.NaN, Infinity]) {
      await expect(at(offset)).rejects.toThrow(InvariantError);
    }
    for (const block of [0, -1, 64, 2 ** 31 - 1]) {
      await expect(executor.exportBlocks(arena, Int32Array.of(block), Float64Array.of(4096))).rejects.toThrow(
        /block id/,
      );
    }
    const sums = BigUint64Array.of(0n, 0n);
    const two = Float64Array.of(4096, 16_384);
    await expect(executor.importBlocks(arena, Int32Array.of(7, 7), two, sums)).rejects.toThrow(/each block once/);
    await expect(executor.importBlocks(arena, one, Float64Array.of(4096), sums)).rejects.toThrow(/one checksum/);
    await expect(executor.exportBlocks(arena, one, two)).rejects.toThrow(/differ in length/);
    await expect(executor.exportBlocks(99, one, two)).rejects.toThrow(/not attached/);
    await expect(executor.exportBlocks(arena, [1] as never, two)).rejects.toThrow(/wrong type/);
    await executor.detachArena(arena);
    await expect(at(4096)).rejects.toThrow(/not attached/);
    await expect(executor.detachArena(arena)).rejects.toThrow(/not attached/);
    expect((await runStep(executor, [{ blocks: [1], computed: 0, tokens: [5] }])).tokenIds).toHaveLength(1);
  });
});

describe('an import with a step', () => {
  const arenaBytes = 1 << 20;
  let path: string;
  let arena: number;
  const offsets = Float64Array.of(4096, 40_960);
  let checksums: BigUint64Array;
  let whole: Float32Array;
  const rest = { blocks: [31, 33, 40], computed: 32, tokens: tokens.slice(32, 40) };
  const other = { blocks: [50], computed: 0, tokens: [5, 6, 7] };
  const blocks = (change: object = {}) => ({
    sequence: 1,
    arena,
    blockIds: Int32Array.of(31, 33),
    offsets,
    checksums,
    ...change,
  });

  beforeEach(async () => {
    path = `/dev/shm/kvtier-test-step-${process.pid}-${randomBytes(4).toString('hex')}`;
    const made = native.arenaCreate(path, arenaBytes, 1);
    const id = native.arenaId(made);
    native.arenaClose(made);
    arena = executor.attachArena(path, arenaBytes, id);
    whole = (await prefill(executor, tokens.slice(0, 40), [40]))[0]!;
    checksums = await executor.exportBlocks(arena, Int32Array.of(1, 2), offsets);
  });
  afterEach(() => rm(path, { force: true }));

  it('brings what the step attends to', async () => {
    const { imported, logits, tokenIds } = await runStep(executor, [other, rest], blocks());
    expect([...imported!]).toEqual([1, 1]);
    expect(relativeError(logits!.slice(logits!.length / 2), whole)).toBeLessThan(1e-4);
    expect(tokenIds[1]).toBe(whole.indexOf(Math.max(...whole)));
  });

  it('draws nothing over a block that is not good, and the others’ draws count', async () => {
    const alone = await runStep(executor, [other]);
    const nan = await open(path, 'r+');
    await nan.write(new Uint8Array(64).fill(0xff), 0, 64, offsets[1]); // f32: no number
    await nan.close();
    const { imported, tokenIds } = await runStep(executor, [other, rest], blocks());
    expect([...imported!]).toEqual([1, 0]);
    expect([...tokenIds]).toEqual([alone.tokenIds[0], -1]);
  });

  it('refuses blocks that are not the sequence’s, that the step writes to, or twice', async () => {
    const bad = (change: object) =>
      expect(runStep(executor, [other, rest], blocks(change))).rejects.toThrow(InvariantError);
    await bad({ sequence: 0 });
    await bad({ sequence: 2 });
    await bad({ blockIds: Int32Array.of(31, 40) });
    await bad({ blockIds: Int32Array.of(31, 31) });
    await bad({ blockIds: Int32Array.of(31) });
    await bad({ blockIds: [31, 33] });
    await bad({ offsets: Float64Array.of(4096, arenaBytes) });
    await bad({ arena: arena + 1 });
    await executor.detachArena(arena);
    await bad({});
  });
});

describe('steps', () => {
  it('refuses a step that could touch foreign memory, and lives on', async () => {
    const piece = { blocks: [1], computed: 0, tokens: [5] };
    const bad = (change: object) =>
      expect(runStep(executor, [{ ...piece, ...change }])).rejects.toThrow(InvariantError);
    await bad({ tokens: [160] });
    await bad({ tokens: [-1] });
    await bad({ tokens: [] });
    await bad({ blocks: [0] });
    await bad({ blocks: [64] });
    await bad({ computed: -1 });
    await bad({ computed: 16 });
    await bad({ computed: 512, blocks: blocksFor(513, 16) });
    await bad({ topP: 0 });
    await bad({ temperature: Number.NaN });
    await bad({ tokens: new Array(257).fill(5), blocks: blocksFor(257, 16) });
    await expect(runStep(executor, new Array(5).fill(piece))).rejects.toThrow(/5 sequences/);
    await expect(executor.execute({} as never)).rejects.toThrow(/typed array/);
    expect((await runStep(executor, [piece])).tokenIds).toHaveLength(1);
  });

  it('refuses a second step while one runs, and any after close', async () => {
    const step = () => runStep(executor, [{ blocks: blocksFor(100, 16), computed: 0, tokens }]);
    const running = step();
    const more = await Promise.allSettled([step(), step(), step()]);
    expect(more.some((result) => result.status === 'rejected')).toBe(true);
    await running;
    await executor.close();
    await expect(step()).rejects.toThrow(/after close/);
    await executor.close();
  });

  it('leaves nothing behind of those that it refuses', async () => {
    const step = () => runStep(executor, [{ blocks: blocksFor(100, 16), computed: 0, tokens }]);
    await step();
    const promises = () => Number(queryObjects(Promise, { format: 'count' }));
    const before = promises();
    const all = await Promise.allSettled(Array.from({ length: 500 }, step));
    const refused = all.filter(({ status }) => status === 'rejected').length;
    expect(refused).toBeGreaterThan(100);
    all.length = 0;
    await turn();
    expect(promises() - before).toBeLessThan(refused / 2);
  });
});

describe('sampling', () => {
  const blocks = blocksFor(100, 16);
  const draw = async (settings: object) => {
    const result = await runStep(executor, [{ blocks, computed: 99, tokens: tokens.slice(99), ...settings }]);
    return result.tokenIds[0]!;
  };
  let logits: Float32Array;
  beforeEach(async () => {
    [logits] = (await prefill(executor, tokens, [100])) as [Float32Array];
  });
  const ranked = () => [...logits.keys()].sort((a, b) => logits[b]! - logits[a]!);

  it('takes the best token at temperature 0 and at top-k 1', async () => {
    expect(await draw({})).toBe(ranked()[0]);
    expect(await draw({ temperature: 2, topK: 1, seed: 5n })).toBe(ranked()[0]);
    expect(await draw({ temperature: 2, topP: 1e-6, seed: 5n })).toBe(ranked()[0]);
  });

  it('repeats a draw for its seed, and draws otherwise for other seeds', async () => {
    const seeds = Array.from({ length: 40 }, (_, i) => BigInt(i) * 0x9e37_79b9_7f4an);
    const first: number[] = [];
    for (const seed of seeds) first.push(await draw({ temperature: 1.5, seed }));
    for (const [i, seed] of seeds.entries()) expect(await draw({ temperature: 1.5, seed })).toBe(first[i]);
    expect(new Set(first).size).toBeGreaterThan(5);
  });

  it('stays within top-k and within the nucleus of top-p', async () => {
    const order = ranked();
    const weights = order.map((id) => Math.exp((logits[id]! - logits[order[0]!]!) / 1.5));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    let count = 0;
    for (let sum = 0; sum < 0.5 * total; count++) sum += weights[count]!;
    const drawn = new Set<number>();
    for (let seed = 0n; seed < 100n; seed++) {
      expect(order.slice(0, 3)).toContain(await draw({ temperature: 3, topK: 3, seed }));
      drawn.add(await draw({ temperature: 1.5, topP: 0.5, seed }));
    }
    for (const id of drawn) expect(order.slice(0, count)).toContain(id);
    expect(drawn.size).toBeGreaterThan(1);
  });
});

describe('the machine’s peak of products', () => {
  it('is asked of a library that nothing else loads', async () => {
    expect(await readFile('/proc/self/maps', 'utf8')).not.toMatch(/blas/i);
  });

  it.each([
    ['/nonexistent/libblas.so', 'No such file or directory'],
    ['libm.so.6', 'it has no cblas_sgemm'],
  ])('is not known by %s, which is one line', async (library, why) => {
    const failure = (await binding('cpu')
      .sgemmRate(8, 1, 1, library)
      .catch((error: Error) => error.message)) as string;
    expect(failure.split('\n')).toHaveLength(1);
    expect(failure).toContain(`SETUP: ${library}: OpenBLAS cannot be used (`);
    expect(failure).toContain(why);
    expect(failure).toContain('; install it (Debian: libopenblas0)');
  });
});

describe('options', () => {
  it.each([
    { blockTokens: 0 },
    { blockCount: 1 },
    { blockCount: 1.5 },
    { threads: 0 },
    { maxStepTokens: -1 },
    { maxStepSequences: Number.NaN },
    { blockCount: 2 ** 31 - 1, blockTokens: 1024 },
  ])('refuses %o', async (change) => {
    await expect(createExecutor({ ...options, ...change })).rejects.toMatchObject({ code: 'CONFIG' });
  });

  it.each([
    [2.5, 'lower kvBytes (--kv-bytes) to 2.4 GiB or use a smaller model'],
    [0.06, 'use a smaller model'],
  ])('refuses more blocks than fit into %d GiB, and says what would', async (freeGib, mend) => {
    const free = vi.spyOn(process, 'availableMemory').mockReturnValue(freeGib * 2 ** 30);
    onTestFinished(() => free.mockRestore());
    const blockCount = Math.ceil((4 * 2 ** 30) / executor.kv.blockBytes);
    await expect(createExecutor({ ...options, blockCount })).rejects.toMatchObject({
      code: 'CONFIG',
      message: `executor: weights and ${blockCount} KV blocks need 4.0 GiB, ${freeGib.toFixed(1)} GiB are free; ${mend}`,
    });
  });
});
