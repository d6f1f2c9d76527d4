/**
 * An executor whose outputs depend on every byte of its KV cache that a real model's would depend on. A slot of the
 * cache holds a number made of its token, its position and all slots before it, read through the block table; the token
 * drawn is made of all slots of the sequence. A wrong, stale, reused or half-loaded block therefore changes the output.
 * It reads and writes when the step ends, not when it begins: blocks that are reused under a running step show, too.
 */
import type { Executor, KvLayout, Step, StepImport, StepResult } from '@kvtier/executor';
import type { ModelShape } from '@kvtier/model';

export const vocabSize = 50;

/** What a slot holds, from the fold of all slots before it. */
const slotOf = (fold: number, token: number, position: number): number =>
  (Math.imul(fold ^ (token + 1), 0x9e3779b1) ^ Math.imul(position + 7, 0x85ebca6b)) >>> 0;

const foldOf = (fold: number, slot: number): number => Math.imul((fold ^ slot) >>> 0, 0x01000193) >>> 0;

const draw = (fold: number, temperature: number, seed: bigint): number =>
  (Math.imul(fold ^ (temperature > 0 ? Number(seed & 0xffffffffn) : 0), 0xc2b2ae35) >>> 8) % vocabSize;

const everything: readonly number[] = [0];

type SlotAt = (group: number, position: number) => number;

/**
 * The fold of what is seen from before `end`, group by group: slots from `end - window` on, or all. `whole`: the fold of
 * all slots of the first group before `end`, kept by the caller so that a long sequence is not folded again and again.
 */
function seen(end: number, reach: number, windows: readonly number[], slotAt: SlotAt, whole: number): number {
  let fold = windows[0] === 0 ? whole : 0;
  for (let group = windows[0] === 0 ? 1 : 0; group < windows.length; group++) {
    const window = windows[group]!;
    for (let at = window === 0 ? 0 : Math.max(0, end - window + reach); at < end; at++)
      fold = foldOf(fold, slotAt(group, at));
  }
  return fold;
}

/** A group's slot: groups keep different bytes under the same tokens. */
const ofGroup = (slot: number, group: number): number => (slot ^ Math.imul(group, 0x27d4eb2f)) >>> 0;

/** The KV of a whole sequence, computed without blocks, per group. */
export function groupSlotsOf(tokens: ArrayLike<number>, windows: readonly number[]): Uint32Array[] {
  const slots = windows.map(() => new Uint32Array(tokens.length));
  let whole = 0;
  for (let i = 0; i < tokens.length; i++) {
    const slot = slotOf(
      seen(i, 1, windows, (group, at) => slots[group]![at]!, whole),
      tokens[i]!,
      i,
    );
    for (const [group, one] of slots.entries()) one[i] = ofGroup(slot, group);
    whole = foldOf(whole, slots[0]![i]!);
  }
  return slots;
}

/** The same of a model of full attention. */
export const slotsOf = (tokens: ArrayLike<number>): Uint32Array => groupSlotsOf(tokens, everything)[0]!;

/** The next token after these: the naive model, the oracle of the tests. */
export function nextToken(tokens: ArrayLike<number>, temperature = 0, seed = 0n, windows = everything): number {
  const slots = groupSlotsOf(tokens, windows);
  const whole = slots[0]!.reduce(foldOf, 0);
  return draw(
    seen(tokens.length, 0, windows, (group, at) => slots[group]![at]!, whole),
    temperature,
    seed,
  );
}

export interface ContentExecutorOptions {
  readonly blockTokens: number;
  readonly blockCount: number;
  readonly maxModelTokens: number;
  /** Decides when a step ends. */
  readonly later: (call: () => void) => void;
  /** Attention groups by their windows in tokens, 0 = all; default: one that sees all. */
  readonly windows?: readonly number[];
  /** Asked at the end of each step: an error fails the step, after it has scribbled over its blocks. */
  readonly failure?: () => Error | undefined;
  /** Asked for each draw: it is no token. */
  readonly spoils?: (() => boolean) | undefined;
  /** Steps take imports. */
  readonly importsByLayer?: boolean | undefined;
}

export class ContentExecutor implements Executor {
  readonly backend = 'cpu';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  readonly maxStepTokens = 2 ** 20;
  readonly modelDigest = new Uint8Array(32);
  /** The KV cache: one number per token slot. */
  readonly slots: Uint32Array;
  readonly steps: Step[] = [];
  readonly importsByLayer: boolean;
  /** Brings in the blocks of a step's import, when the step ends. */
  bring: (blocks: StepImport) => Uint8Array | null = () => null;
  readonly #options: ContentExecutorOptions;

  constructor(options: ContentExecutorOptions) {
    const { blockTokens, blockCount, maxModelTokens } = options;
    this.#options = options;
    this.blockCount = blockCount;
    this.importsByLayer = options.importsByLayer ?? false;
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
    const groups = options.windows?.map((windowTokens, layer) => ({ windowTokens, layers: [layer] }));
    this.kv = {
      layers: 1,
      kvHeads: 1,
      headDim: 1,
      dtype: 'f32',
      blockTokens,
      blockBytes: 8 * blockTokens,
      order,
      ...(groups ? { groups } : {}),
    };
  }

  execute(step: Step): Promise<StepResult> {
    this.steps.push(step);
    // As the real one (step_check.cc).
    step.topP.forEach((topP, i) => {
      if (!(step.temperature[i]! >= 0 && step.topK[i]! >= 0 && topP > 0 && topP <= 1))
        throw new Error(`step: sampling of ${i}`);
    });
    return new Promise((resolve, reject) => {
      this.#options.later(() => {
        const failure = this.#options.failure?.();
        const imported = step.import ? this.bring(step.import) : null;
        const tokenIds = this.#compute(step, failure !== undefined);
        if (step.import && !imported?.every((good) => good === 1)) tokenIds[step.import.sequence] = -1;
        if (failure) reject(failure);
        else resolve({ tokenIds, logits: null, elapsedUs: 10, imported });
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
    const windows = this.#options.windows ?? everything;
    const sequences = step.queryTokens.length;
    const drawn = new Int32Array(sequences).fill(-1);
    let at = 0;
    step.queryTokens.forEach((count, row) => {
      const placeOf = (group: number, position: number): number => {
        const table = (group * sequences + row) * step.blockTableStride;
        const block = step.blockTables[table + Math.floor(position / blockTokens)]!;
        if (block <= 0 || block >= this.blockCount) throw new Error(`a step names block ${block}`);
        return block * blockTokens + (position % blockTokens);
      };
      const slotAt = (group: number, position: number): number => slots[placeOf(group, position)]!;
      const computed = step.computedTokens[row]!;
      let whole = 0;
      if (windows[0] === 0) for (let before = 0; before < computed; before++) whole = foldOf(whole, slotAt(0, before));
      for (let position = computed; position < computed + count; position++) {
        const slot = slotOf(seen(position, 1, windows, slotAt, whole), step.tokenIds[at]!, position);
        at++;
        for (const group of windows.keys()) slots[placeOf(group, position)] = scribble ? 0xbad : ofGroup(slot, group);
        whole = foldOf(whole, slotAt(0, position));
      }
      if (!step.sample[row]) return;
      const fold = seen(computed + count, 0, windows, slotAt, whole);
      if (this.#options.spoils?.()) return;
      drawn[row] = draw(fold, step.temperature[row]!, step.seed[row]!);
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
