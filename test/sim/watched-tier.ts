/**
 * A lower tier as the store sees it, with the contract of tier.ts checked at every call: each block ends once; 'ready' is the
 * right object; a slot is the tier's alone while it reads into it; what is being written stays as it is; an answer comes in time;
 * what is told to followers is what `lookup` says.
 */
import { type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import {
  type Following,
  followInPages,
  type ReadStatus,
  type SlotBlock,
  type SlotSizes,
  type Tier,
  type TierStats,
  type WriteStatus,
} from '@kvtier/tiers';
import { mustHold, shortName } from './contents.ts';
import { Violation, type World } from './world.ts';

export interface Watch {
  readonly world: World;
  readonly node: string;
  readonly memory: Buffer;
  /** Slots that some tier reads into now. */
  readonly filling: Set<number>;
  /** The tier's own time limit, with what its timers may add. */
  readonly limitMs: number;
  readonly report: (error: unknown) => void;
}

export class WatchedTier implements Tier {
  readonly inner: Tier;
  readonly #watch: Watch;
  /** What followers were told, and when: ms of the world. */
  readonly #told = new Map<string, { namespace: Namespace; hashes: Map<HashKey, number> }>();
  readonly reads: Record<ReadStatus, number> = { ready: 0, missing: 0, corrupt: 0, failed: 0 };
  readonly writes: Record<WriteStatus, number> = { stored: 0, held: 0, refused: 0 };

  constructor(inner: Tier, watch: Watch) {
    this.inner = inner;
    this.#watch = watch;
    inner.follow((change) => {
      if (change.kind === 'cleared') {
        this.#told.clear();
        return;
      }
      const { namespace, hashes, kind } = change;
      const told = this.#told.get(namespace.key) ?? { namespace, hashes: new Map<HashKey, number>() };
      this.#told.set(namespace.key, told);
      for (const hash of hashes) {
        if (kind === 'stored') told.hashes.set(hash, watch.world.nowMs);
        else if (!told.hashes.delete(hash))
          this.#violated(6, `removed ${shortName(hash)}, which was not told as stored`);
      }
    });
  }

  get name(): string {
    return this.inner.name;
  }

  get supports() {
    return this.inner.supports;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.inner.lookup(namespace, hashes);
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.inner.touch(namespace, hashes);
  }

  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const { memory, world } = this.#watch;
    const endsUs = this.#endsUs();
    for (const { slot, hash } of blocks) mustHold(memory, slot, namespace, hash, `${this.#name} is to write`);
    const statuses = await this.inner.write(namespace, blocks);
    if (statuses.length !== blocks.length) this.#violated(5, 'a write answered for another number of blocks');
    for (const { slot, hash } of blocks) {
      this.#guarded(() => mustHold(memory, slot, namespace, hash, `${this.#name} has written`));
    }
    for (const status of statuses) this.writes[status]++;
    if (world.nowUs > endsUs)
      this.#violated(2, `a write took ${(world.nowUs - endsUs) / 1000} ms longer than its limit`);
    return statuses;
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes?: SlotSizes,
  ): Promise<void> {
    const { memory, world, filling } = this.#watch;
    const endsUs = this.#endsUs();
    const open = new Set(blocks.keys());
    for (const { slot } of blocks) {
      if (filling.has(slot)) this.#violated(1, `two reads into the slot at ${slot}`);
      filling.add(slot);
      memory.fill(0xee, slot, slot + headerBytes);
    }
    const ended = (index: number, status: ReadStatus): void => {
      if (!open.delete(index)) this.#violated(5, `block ${index} of a read ended twice`);
      const { slot, hash } = blocks[index]!;
      filling.delete(slot);
      this.reads[status]++;
      world.note(`${this.#name} read ${shortName(hash)} ${status}`);
      if (status === 'ready') this.#guarded(() => mustHold(memory, slot, namespace, hash, `${this.#name} read`));
      onDone(index, status);
    };
    await this.inner.read(namespace, blocks, ended, sizes);
    if (open.size > 0) this.#violated(5, `${open.size} blocks of a read never ended`);
    if (world.nowUs > endsUs)
      this.#violated(2, `a read took ${(world.nowUs - endsUs) / 1000} ms longer than its limit`);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'evicted' | 'asked'): number {
    return this.inner.remove(namespace, hashes, reason);
  }

  follow(listener: Parameters<Tier['follow']>[0]): () => void {
    return this.inner.follow(listener);
  }

  followInPages(listener: Parameters<Tier['follow']>[0], onMore?: () => void): Following {
    return followInPages(this.inner, listener, onMore);
  }

  stats(): TierStats {
    return this.inner.stats();
  }

  /** Since when followers know of the block, in ms of the world; undefined: they do not. A device that is back tells of its blocks anew. */
  toldSinceMs(namespace: Namespace, hash: HashKey): number | undefined {
    return this.#told.get(namespace.key)?.hashes.get(hash);
  }

  /** Law 6: what was told is what is held, block by block. `known`: names that must not be held unless they were told. */
  checkIntegrity(): void {
    this.inner.checkIntegrity();
    let count = 0;
    for (const { namespace, hashes } of this.#told.values()) {
      count += hashes.size;
      for (const hash of hashes.keys()) {
        if (this.inner.lookup(namespace, [hash]) !== 1)
          this.#violated(6, `lookup denies ${shortName(hash)}, which was told`);
      }
    }
    const { blocks } = this.inner.stats();
    if (blocks !== count) this.#violated(6, `${blocks} blocks are held and ${count} were told`);
  }

  close(): Promise<void> {
    return this.inner.close();
  }

  get #name(): string {
    return `${this.#watch.node}.${this.name}`;
  }

  #endsUs(): number {
    return this.#watch.world.nowUs + this.#watch.limitMs * 1000;
  }

  #violated(law: number, what: string): void {
    this.#watch.report(new Violation(`law ${law}: ${this.#name}: ${what}`));
  }

  #guarded(check: () => void): void {
    try {
      check();
    } catch (error) {
      this.#watch.report(error);
    }
  }
}
