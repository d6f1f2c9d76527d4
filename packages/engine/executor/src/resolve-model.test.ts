import { createHash } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { readModelConfig, resolveModel } from '@kvtier/model';
import { randomShape } from '@kvtier/model/testing';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { createExecutor } from './index.ts';

let home: string;
const before = process.env.XDG_CACHE_HOME;
beforeEach(async () => {
  home = await mkdtemp(join(tmpdir(), 'kvtier-cache-'));
  process.env.XDG_CACHE_HOME = home;
});
afterEach(async () => {
  if (before === undefined) delete process.env.XDG_CACHE_HOME;
  else process.env.XDG_CACHE_HOME = before;
  await rm(home, { recursive: true, force: true });
});

const parametersOf = (parameters: number): number => {
  const { hiddenSize: h, layers, intermediateSize } = randomShape(parameters, 1344);
  return layers * (3 * h * h + 3 * h * intermediateSize) + 2 * 1344 * h;
};

describe('random models', () => {
  it.each([7e6, 25e6, 100e6, 1e9])('have about %d parameters', (parameters) => {
    expect(Math.abs(parametersOf(parameters) / parameters - 1)).toBeLessThan(0.2);
  });

  it('have the known shape at 25m', () => {
    expect(randomShape(25e6, 1344)).toEqual({
      hiddenSize: 512,
      layers: 8,
      heads: 8,
      kvHeads: 4,
      intermediateSize: 1408,
    });
  });

  it('are ordinary model folders, made once, the same bytes each time', async () => {
    const shares: number[] = [];
    const made = await resolveModel('random:700k', (_line, share) => shares.push(share));
    expect(made).toEqual({ dir: join(home, 'kvtier/models/random-700k'), name: 'random-700k' });
    expect(shares.at(-1)).toBe(1);
    expect((await readdir(join(home, 'kvtier/models'))).sort()).toEqual(['random-700k']);
    expect(await readdir(made.dir)).toContain('tokenizer.json');
    const digest = async () =>
      createHash('sha256')
        .update(await readFile(join(made.dir, 'model.safetensors')))
        .digest('hex');
    const first = await digest();

    const options = { modelDir: made.dir, blockTokens: 16, blockCount: 4, maxStepTokens: 8, maxStepSequences: 1 };
    const executor = await createExecutor(options);
    expect(executor.model.maxModelTokens).toBeGreaterThanOrEqual(8192);
    await executor.close();

    let progressed = false;
    await resolveModel('random:700k', () => {
      progressed = true;
    });
    expect(progressed).toBe(false);
    await rm(made.dir, { recursive: true });
    await Promise.all([resolveModel('random:700k'), resolveModel('random:700k'), resolveModel('random:700k')]);
    expect((await readdir(join(home, 'kvtier/models'))).sort()).toEqual(['random-700k']);
    expect(await digest()).toBe(first);
  });
});

it.each([
  ['random:gemma3-700k', 'gemma3', [128, 128, 0]],
  ['random:ministral-1m', 'ministral', [128, 0]],
  ['random:mistral-sw-700k', 'mistral', [128]],
])('%s has layers with a window', async (spec, family, turn) => {
  const { dir } = await resolveModel(spec);
  const config = await readModelConfig(dir);
  expect(config.family).toBe(family);
  expect(config.windows).toEqual(config.windows.map((_, layer) => turn[layer % turn.length]));
  const executor = await createExecutor({
    modelDir: dir,
    blockTokens: 16,
    blockCount: 4,
    maxStepTokens: 8,
    maxStepSequences: 1,
  });
  const kinds = [...new Set(turn)].sort((a, b) => a - b);
  expect([...new Set(executor.kv.groups!.map(({ windowTokens }) => windowTokens))]).toEqual(kinds);
  await executor.close();
});

it('keeps digests of weight files, and notices another file under the same name', async () => {
  const { dir } = await resolveModel('random:700k');
  const options = { modelDir: dir, blockTokens: 16, blockCount: 4, maxStepTokens: 8, maxStepSequences: 1 };
  const digest = async () => {
    const executor = await createExecutor(options);
    await executor.close();
    return Buffer.from(executor.modelDigest).toString('hex');
  };
  const first = await digest();
  expect(await readdir(join(home, 'kvtier/digests'))).toHaveLength(1);
  expect(await digest()).toBe(first);
  const file = join(dir, 'model.safetensors');
  const bytes = await readFile(file);
  bytes[bytes.length - 1]! ^= 1;
  await writeFile(file, bytes);
  expect(await digest()).not.toBe(first);
});

it('refuses what it cannot resolve', async () => {
  await expect(resolveModel('random:huge')).rejects.toMatchObject({ code: 'CONFIG' });
  await expect(resolveModel('random:1k')).rejects.toMatchObject({ code: 'CONFIG' });
  await expect(resolveModel(join(home, 'nothing'))).rejects.toMatchObject({ code: 'MODEL' });
});
