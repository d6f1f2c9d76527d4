/**
 * A model that is replaced while it is loaded, at a chosen moment: every call to the file system and to native code is two of
 * them, right before it and while it runs. The mocks belong to the test file (vi.mock); this is what they count by. Test code only.
 */
import { createHash } from 'node:crypto';
import { cpSync, mkdtempSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type BackendName, createExecutor } from '../index.ts';
import { goldenDir, readGolden } from './golden.ts';
import { blocksFor, runStep } from './run-step.ts';

export type Way = 'rename' | 'rewrite';
export type Part = 'shards' | 'config' | 'all';

const family = 'qwen2'; // of four shards
const isShard = (name: string): boolean => name.endsWith('.safetensors');
const belongsTo = (name: string, part: Part): boolean =>
  isShard(name) ? part !== 'config' : name.endsWith('.json') && name !== 'golden.json' && part !== 'shards';

/** What stops at the moments: `replace` is called at the one that is asked for. */
export class Moments {
  #at = 0;
  #wanted = Infinity;
  #replace: () => void = () => {};
  #counting = false;
  /** What each of them was, in their order. */
  names: string[] = [];

  start(wanted: number, replace: () => void): void {
    this.#at = 0;
    this.#wanted = wanted;
    this.#replace = replace;
    this.#counting = true;
    this.names = [];
  }

  end(): void {
    this.#counting = false;
  }

  /** Two moments: before the call, and when it has been made. */
  around<T>(name: string, call: () => T): T {
    this.#reached(`before ${name}`);
    const result = call();
    this.#reached(`during ${name}`);
    return result;
  }

  #reached(name: string): void {
    if (!this.#counting) return;
    this.names.push(name);
    if (this.#at++ === this.#wanted) {
      this.#counting = false; // what the replacing does is none
      this.#replace();
      this.#counting = true;
    }
  }
}

/** A model folder of its own, with the model that it holds at first, and the one that takes its place. */
export class ReplacedModel {
  readonly dir: string;
  readonly #backend: BackendName;

  constructor(backend: BackendName) {
    this.#backend = backend;
    this.dir = mkdtempSync(join(tmpdir(), 'kvtier-replaced-'));
    cpSync(goldenDir(family), this.dir, { recursive: true });
  }

  replace(way: Way, part: Part): void {
    for (const name of readdirSync(this.dir)) {
      if (!belongsTo(name, part)) continue;
      const path = join(this.dir, name);
      const fresh = isShard(name) ? otherWeights(readFileSync(path)) : otherConfig(name, readFileSync(path, 'utf8'));
      const target = way === 'rename' ? `${path}.tmp` : path;
      writeFileSync(target, fresh);
      if (way === 'rename') renameSync(target, path);
    }
  }

  /** The name that the model's blocks would get and what it computes, in one word; or how it was refused. */
  async load(): Promise<string> {
    const prompt = readGolden(family).tokens.slice(0, 24);
    try {
      const executor = await createExecutor({
        modelDir: this.dir,
        backend: this.#backend,
        ...{ blockTokens: 16, blockCount: 8, threads: 1, maxStepTokens: 64, maxStepSequences: 1 },
        gpu: { computeDtype: 'f32' },
      });
      const { logits } = await runStep(executor, [{ blocks: blocksFor(24, 16), computed: 0, tokens: prompt }]);
      const computed = createHash('sha256').update(new Uint8Array(logits!.buffer)).digest('hex');
      await executor.close();
      return `served ${Buffer.from(executor.modelDigest).toString('hex')} computes ${computed}`;
    } catch (error) {
      return `${(error as { code?: string }).code}: ${(error as Error).message}`;
    }
  }

  remove(): void {
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** The same shapes, other numbers: some signs are turned. */
function otherWeights(file: Buffer): Buffer {
  const other = Buffer.from(file);
  for (let i = 8 + Number(file.readBigUInt64LE()); i < file.length; i++) if (i % 8 === 7) other[i]! ^= 0x80;
  return other;
}

function otherConfig(name: string, text: string): string {
  if (name !== 'config.json') return `${text}\n`;
  return JSON.stringify({ ...(JSON.parse(text) as object), rms_norm_eps: 0.01 });
}
