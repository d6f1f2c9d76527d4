/**
 * An executor whose outputs depend on every byte of its KV cache that a real model's would depend on. A slot of the
 * cache holds a number made of its token, its position and all slots before it, read through the block table; the token
 * drawn is made of all slots of the sequence. A wrong, stale, reused or half-loaded block therefore changes the output.
 * It reads and writes when the step ends, not when it begins: blocks that are reused under a running step show, too.
 */
import type { Executor, KvLayout, ModelShape, Step, StepResult } from '@kvtier/executor';

export const vocabSize = 50;

/** What a slot holds, from the fold of all slots before it. */
const slotOf = (fold: number, token: number, position: number): number =>
  (Math.imul(fold ^ (token + 1), 0x9e3779b1) ^ Math.imul(position + 7, 0x85ebca6b)) >>> 0;

const foldOf = (fold: number, slot: number): number => Math.imul((fold ^ slot) >>> 0, 0x01000193) >>> 0;

const draw = (fold: number, temperature: number, seed: bigint): number =>
  (Math.imul(fold ^ (temperature > 0 ? Number(seed & 0xffffffffn) : 0), 0xc2b2ae35) >>> 8) % vocabSize;

/** The KV of a whole sequence, computed without blocks. */
export function slotsOf(tokens: ArrayLike<number>): Uint32Array {
  const slots = new Uint32Array(tokens.length);
  let fold = 0;
  for (let i = 0; i < tokens.length; i++) {
    slots[i] = slotOf(fold, tokens[i]!, i);
    fold = foldOf(fold, slots[i]!);
  }
  return slots;
}

/** The next token after these: the naive model, the oracle of the tests. */
export function nextToken(tokens: ArrayLike<number>, temperature = 0, seed = 0n): number {
  return draw(slotsOf(tokens).reduce(foldOf, 0), temperature, seed);
}

export interface ContentExecutorOptions {
  readonly blockTokens: number;
  readonly blockCount: number;
  readonly maxModelTokens: number;
  /** Decides when a step ends. */
  readonly later: (call: () => void) => void;
  /** Asked at the end of each step: an error fails the step, after it has scribbled over its blocks. */
  readonly failure?: () => Error | undefined;
}

export class ContentExecutor implements Executor {
  readonly backend = 'cpu';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  readonly modelDigest = new Uint8Array(32);
  /** The KV cache: one number per token slot. */
  readonly slots: Uint32Array;
  readonly steps: Step[] = [];
  readonly #options: ContentExecutorOptions;

  constructor(options: ContentExecutorOptions) {
    const { blockTokens, blockCount, maxModelTokens } = options;
    this.#options = options;
    this.blockCount = blockCount;
    this.slots = new Uint32Array(blockCount * blockTokens).fill(0xdead);
    this.model = {
      family: 'llama',
      vocabSize,
      hiddenSize: 1,
      intermediateSize: 1,
      layers: 1,
      heads: 1,
      kvHeads: 1,
      headDim: 1,
      maxModelTokens,
      parameters: 1,
    };
    const order = 'layer,kv,head,token,dim';
    this.kv = { layers: 1, kvHeads: 1, headDim: 1, dtype: 'f32', blockTokens, blockBytes: 8 * blockTokens, order };
  }

  execute(step: Step): Promise<StepResult> {
    this.steps.push(step);
    return new Promise((resolve, reject) => {
      this.#options.later(() => {
        const failure = this.#options.failure?.();
        const tokenIds = this.#compute(step, failure !== undefined);
        if (failure) reject(failure);
        else resolve({ tokenIds, logits: null, elapsedUs: 10 });
      });
    });
  }

  /** The slots of one block. */
  block(block: number): Uint32Array {
    const { blockTokens } = this.kv;
    return this.slots.subarray(block * blockTokens, (block + 1) * blockTokens);
  }

  #compute(step: Step, scribble: boolean): Int32Array {
    const { blockTokens } = this.kv;
    const { slots } = this;
    const drawn = new Int32Array(step.queryTokens.length).fill(-1);
    let at = 0;
    step.queryTokens.forEach((count, row) => {
      const slotAt = (position: number): number => {
        const block = step.blockTables[row * step.blockTableStride + Math.floor(position / blockTokens)]!;
        if (block <= 0 || block >= this.blockCount) throw new Error(`a step names block ${block}`);
        return block * blockTokens + (position % blockTokens);
      };
      let fold = 0;
      const computed = step.computedTokens[row]!;
      for (let position = 0; position < computed; position++) fold = foldOf(fold, slots[slotAt(position)]!);
      for (let position = computed; position < computed + count; position++) {
        const slot = scribble ? 0xbad : slotOf(fold, step.tokenIds[at]!, position);
        at++;
        slots[slotAt(position)] = slot;
        fold = foldOf(fold, slot);
      }
      if (step.sample[row]) drawn[row] = draw(fold, step.temperature[row]!, step.seed[row]!);
    });
    return drawn;
  }

  attachArena(): number {
    throw new Error('the scheduler copies nothing itself');
  }

  async detachArena(): Promise<void> {}

  exportBlocks(): Promise<BigUint64Array> {
    throw new Error('the scheduler copies nothing itself');
  }

  importBlocks(): Promise<Uint8Array> {
    throw new Error('the scheduler copies nothing itself');
  }

  async close(): Promise<void> {}
}
