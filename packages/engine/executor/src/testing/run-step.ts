/** Test harness: sequences with contiguous block tables, stepped through an executor. Test code only. */
import type { Executor, Step, StepResult } from '../executor.ts';

export interface Piece {
  /** The sequence's blocks, in order; must cover computed + tokens. */
  readonly blocks: readonly number[];
  readonly computed: number;
  readonly tokens: readonly number[];
  readonly sample?: boolean;
  readonly temperature?: number;
  readonly topK?: number;
  readonly topP?: number;
  readonly seed?: bigint;
}

/** One step over the pieces as one batch; logits of the sampled rows come back. */
export function runStep(executor: Executor, pieces: readonly Piece[], imported?: Step['import']): Promise<StepResult> {
  const stride = Math.max(...pieces.map((piece) => piece.blocks.length));
  const { blockTokens, groups = [{ windowTokens: 0 }] } = executor.kv;
  const tables = new Int32Array(groups.length * pieces.length * stride);
  // Each group has blocks of its own; those behind its window are null, as in the engine.
  const apart = Math.floor((executor.blockCount - 1) / groups.length);
  for (const [group, { windowTokens }] of groups.entries()) {
    for (const [i, { blocks, computed }] of pieces.entries()) {
      const behind = windowTokens === 0 ? 0 : Math.floor(Math.max(0, computed - windowTokens + 1) / blockTokens);
      const table = blocks.map((block, at) => (at < behind ? 0 : block + group * apart));
      tables.set(table, (group * pieces.length + i) * stride);
    }
  }
  return executor.execute({
    tokenIds: Int32Array.from(pieces.flatMap((piece) => piece.tokens)),
    queryTokens: Int32Array.from(pieces, (piece) => piece.tokens.length),
    computedTokens: Int32Array.from(pieces, (piece) => piece.computed),
    blockTables: tables,
    blockTableStride: stride,
    sample: Uint8Array.from(pieces, (piece) => ((piece.sample ?? true) ? 1 : 0)),
    temperature: Float32Array.from(pieces, (piece) => piece.temperature ?? 0),
    topK: Int32Array.from(pieces, (piece) => piece.topK ?? 0),
    topP: Float32Array.from(pieces, (piece) => piece.topP ?? 1),
    seed: BigUint64Array.from(pieces, (piece) => piece.seed ?? 0n),
    wantLogits: true,
    import: imported,
  });
}

/** Blocks first, first + 1, … enough for `tokens` tokens. */
export function blocksFor(tokens: number, blockTokens: number, first = 1): number[] {
  return Array.from({ length: Math.ceil(tokens / blockTokens) }, (_, i) => first + i);
}

/** Prefill in chunks that end at `cuts` (ascending, the last is the prompt's length); logits at each chunk's last token. */
export async function prefill(
  executor: Executor,
  tokens: readonly number[],
  cuts: readonly number[],
  firstBlock = 1,
): Promise<Float32Array[]> {
  const blocks = blocksFor(tokens.length, executor.kv.blockTokens, firstBlock);
  const logits: Float32Array[] = [];
  let computed = 0;
  for (const cut of cuts) {
    const result = await runStep(executor, [{ blocks, computed, tokens: tokens.slice(computed, cut) }]);
    logits.push(result.logits!);
    computed = cut;
  }
  return logits;
}

/** max |a - b| ÷ max |b| */
export function relativeError(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length !== b.length) throw new Error(`lengths ${a.length} and ${b.length}`);
  let difference = 0;
  let largest = 0;
  for (let i = 0; i < b.length; i++) {
    difference = Math.max(difference, Math.abs(a[i]! - b[i]!));
    largest = Math.max(largest, Math.abs(b[i]!));
  }
  return difference / largest;
}
