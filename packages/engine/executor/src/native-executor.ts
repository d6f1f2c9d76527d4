/** The Executor interface over a native module. Holds no bytes itself, only who waits for what. */
import { InvariantError, invariant } from '@kvtier/errors';
import type { ModelShape } from '@kvtier/model';
import { type ExecutorBinding, type ExecutorHandle, translate } from './binding.ts';
import type { ArenaPin, Executor, ExecutorOptions, KvLayout, Step, StepResult } from './executor.ts';

/** What is known once a model is open. */
export type ExecutorFacts = Pick<Executor, 'backend' | 'model' | 'kv' | 'modelDigest'> & {
  readonly onPinned: ExecutorOptions['onPinned'] | undefined;
};

export class NativeExecutor implements Executor {
  readonly backend: 'cpu' | 'cuda';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  readonly maxStepTokens: number;
  readonly modelDigest: Uint8Array;
  readonly #native: ExecutorBinding;
  readonly #handle: ExecutorHandle;
  #closed = false;
  #step: Promise<unknown> = Promise.resolve();
  /** Copies in flight per arena; an arena that is being detached takes no new ones. */
  readonly #copies = new Map<number, Set<Promise<unknown>>>();
  readonly #pins = new Map<number, ArenaPin>();
  readonly #onPinned: ExecutorOptions['onPinned'] | undefined;

  constructor(native: ExecutorBinding, handle: ExecutorHandle, facts: ExecutorFacts) {
    const { backend, model, kv, modelDigest, onPinned } = facts;
    const { blockCount, maxStepTokens } = native.bounds(handle);
    this.#native = native;
    this.#handle = handle;
    this.backend = backend;
    this.model = model;
    this.kv = kv;
    this.blockCount = blockCount;
    this.maxStepTokens = maxStepTokens;
    this.modelDigest = modelDigest;
    this.#onPinned = onPinned;
  }

  get importsByLayer(): boolean {
    return this.backend === 'cuda';
  }

  get arenaPins(): readonly ArenaPin[] {
    return [...this.#pins.values()];
  }

  async execute(step: Step): Promise<StepResult> {
    invariant(!this.#closed, 'executor: execute after close');
    const execute = (): Promise<StepResult> => this.#native.execute(this.#handle, step);
    const running = step.import ? this.#copy(step.import.arena, execute) : call(execute);
    this.#step = running.catch(() => {});
    return running;
  }

  attachArena(path: string, bytes: number, id: bigint): number {
    invariant(!this.#closed, 'executor: attachArena after close');
    invariant(Number.isSafeInteger(bytes) && bytes > 0, () => `executor: an arena of ${bytes} bytes`);
    try {
      const arena = this.#native.attachArena(this.#handle, path, bytes, id);
      this.#copies.set(arena, new Set());
      if (this.backend === 'cuda') void this.#awaitPin(arena, bytes);
      return arena;
    } catch (error) {
      throw translate(error);
    }
  }

  async detachArena(arena: number): Promise<void> {
    const copies = this.#copies.get(arena);
    if (!copies) throw new InvariantError(`executor: arena ${arena} is not attached`);
    this.#copies.delete(arena);
    this.#pins.delete(arena);
    await Promise.allSettled(copies);
    if (!this.#closed) this.#native.detachArena(this.#handle, arena);
  }

  exportBlocks(arena: number, blockIds: Int32Array, offsets: Float64Array): Promise<BigUint64Array> {
    return this.#copy(arena, () => this.#native.exportBlocks(this.#handle, arena, blockIds, offsets));
  }

  importBlocks(
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
    checksums: BigUint64Array,
  ): Promise<Uint8Array> {
    return this.#copy(arena, () => this.#native.importBlocks(this.#handle, arena, blockIds, offsets, checksums));
  }

  describe(): Readonly<Record<string, unknown>> {
    return JSON.parse(this.#native.describe(this.#handle)) as Record<string, unknown>;
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await Promise.allSettled([this.#step, ...[...this.#copies.values()].flatMap((copies) => [...copies])]);
    this.#copies.clear();
    this.#native.close(this.#handle);
  }

  /** A device that fails meanwhile is told of by what uses it. */
  async #awaitPin(arena: number, bytes: number): Promise<void> {
    const found = await this.#native.pinned(this.#handle, arena).catch(() => null);
    if (!found || !this.#copies.has(arena)) return;
    const pin = { bytes, ...found };
    this.#pins.set(arena, pin);
    this.#onPinned?.(pin);
  }

  async #copy<T>(arena: number, start: () => Promise<T>): Promise<T> {
    const copies = this.#copies.get(arena);
    if (this.#closed || !copies) throw new InvariantError(`executor: arena ${arena} is not attached`);
    const copy = call(start);
    copies.add(copy);
    try {
      return await copy;
    } finally {
      copies.delete(copy);
    }
  }
}

/** Native calls throw wrong arguments at once and reject with the world's doing later: both become one rejection. */
async function call<T>(start: () => Promise<T>): Promise<T> {
  try {
    return await start();
  } catch (error) {
    throw translate(error);
  }
}
