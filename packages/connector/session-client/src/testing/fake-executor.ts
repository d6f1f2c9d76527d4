/** An executor without a model: KV blocks are byte arrays, copies take as long as the test wants. */
import { invariant } from '@kvtier/errors';
import type { Executor, KvLayout } from '@kvtier/executor';
import { arenas, blockBytes, checksumOf } from './memory.ts';

const kv: KvLayout = {
  layers: 1,
  kvHeads: 1,
  headDim: 1,
  dtype: 'f32',
  blockTokens: 4,
  blockBytes,
  order: 'layer,kv,head,token,dim',
};

type Copies = Pick<Executor, 'kv' | 'attachArena' | 'detachArena' | 'exportBlocks' | 'importBlocks'>;

export class FakeExecutor implements Copies {
  readonly kv = kv;
  readonly blocks: Uint8Array[];
  /** Mapped arenas. */
  readonly mapped = new Map<number, Uint8Array>();
  /** What a copy waits for before its bytes move. */
  beforeCopy: () => Promise<void> = async () => {};
  copiesInFlight = 0;
  /** Blocks named by running copies: none of them may be changed by the test meanwhile. */
  readonly busy = new Set<number>();
  #next = 1;

  constructor(blockCount: number) {
    this.blocks = Array.from({ length: blockCount }, () => new Uint8Array(blockBytes));
  }

  attachArena(path: string, bytes: number, id: bigint): number {
    const arena = arenas.get(path);
    if (arena?.id !== id || arena.bytes.length !== bytes) throw new Error(`IO: ${path} is not that arena`);
    this.mapped.set(this.#next, arena.bytes);
    return this.#next++;
  }

  async detachArena(arena: number): Promise<void> {
    invariant(this.copiesInFlight === 0, 'an arena is unmapped under a copy');
    invariant(this.mapped.delete(arena), 'an arena is unmapped twice');
  }

  async exportBlocks(arena: number, blockIds: Int32Array, offsets: Float64Array): Promise<BigUint64Array> {
    return await this.#copy(arena, blockIds, (memory) =>
      BigUint64Array.from(blockIds, (id, i) => {
        memory.set(this.blocks[id]!, offsets[i]!);
        return checksumOf(this.blocks[id]!);
      }),
    );
  }

  async importBlocks(
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
    checksums: BigUint64Array,
  ): Promise<Uint8Array> {
    return await this.#copy(arena, blockIds, (memory) =>
      Uint8Array.from(blockIds, (id, i) => {
        this.blocks[id]!.set(memory.subarray(offsets[i]!, offsets[i]! + blockBytes));
        return checksumOf(this.blocks[id]!) === checksums[i]! ? 1 : 0;
      }),
    );
  }

  async #copy<T>(arena: number, blockIds: Int32Array, move: (memory: Uint8Array) => T): Promise<T> {
    const memory = this.mapped.get(arena);
    invariant(memory !== undefined, 'a copy in an arena that is not mapped');
    this.copiesInFlight++;
    for (const id of blockIds) this.busy.add(id);
    try {
      await this.beforeCopy();
      return move(memory);
    } finally {
      this.copiesInFlight--;
      for (const id of blockIds) this.busy.delete(id);
    }
  }
}
