/**
 * The world of the store's simulation: a clock that stands until it is told to go, an arena whose "bytes" are names, and
 * a lower tier whose every answer the test gives. They enforce their contracts: misuse is an InvariantError.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type { ArenaBlock, BlockFields } from '@kvtier/tiers';
import {
  Followers,
  type ReadStatus,
  roomAsks,
  type SlotBlock,
  type Tier,
  type TierChange,
  type TierStats,
  type WriteStatus,
} from '@kvtier/tiers';
import type { ArenaTop } from '../ports.ts';

export const silent: Log = { info: () => {}, warn: () => {}, error: () => {} };

export class ManualClock implements Clock {
  #nowMs = 0;
  /** What the wall clock says more than the one that only goes forward. */
  wallAheadMs = 0;
  readonly #timers = new Set<{ readonly atMs: number; readonly fn: () => void }>();

  nowUs(): number {
    return this.#nowMs * 1000;
  }

  wallMs(): number {
    return this.#nowMs + this.wallAheadMs;
  }

  after(ms: number, fn: () => void): () => void {
    const timer = { atMs: this.#nowMs + ms, fn };
    this.#timers.add(timer);
    return () => this.#timers.delete(timer);
  }

  get pending(): number {
    return this.#timers.size;
  }

  advance(ms: number): void {
    this.#nowMs += ms;
    for (const timer of [...this.#timers].sort((a, b) => a.atMs - b.atMs)) {
      if (timer.atMs <= this.#nowMs && this.#timers.delete(timer)) timer.fn();
    }
  }
}

interface Listed extends BlockFields {
  readonly expiresS: number;
  readonly namespace: Namespace;
  readonly slot: number;
  pins: number;
  /** Of blocks that were published by then. */
  toldAt: number;
}

const zeroStats = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0, inService: true, outOfServiceReason: '' };

/** `slotCount` slots; slot numbers start at 1. `content` is what lies in each: the name of a payload. */
export class ModelArena implements ArenaTop {
  readonly name = 'arena';
  readonly supports = { persistent: false, shared: false, writable: true, evicts: true };
  readonly #followers = new Followers();
  readonly content = new Map<number, string>();
  /** The header in each slot, published or put there by a read. */
  readonly headers = new Map<number, BlockFields>();
  readonly #free: number[] = [];
  readonly #allocated = new Set<number>();
  /** Listed blocks, least recently used first. */
  readonly #listed = new Map<string, Listed>();
  /** Removed while pinned. */
  readonly #zombies = new Map<string, Listed[]>();
  readonly #slotCount: number;
  evictions = 0;
  #published = 0;
  #makeRoom = (): boolean => false;

  constructor(slotCount: number) {
    this.#slotCount = slotCount;
    for (let slot = slotCount; slot > 0; slot--) this.#free.push(slot);
  }

  allocate(_namespace: Namespace, _payloadBytes: number): number | undefined {
    if (this.#free.length === 0) {
      let victim = this.#victim();
      for (let asked = 0; victim === undefined && asked < roomAsks && this.#makeRoom(); asked++)
        victim = this.#victim();
      if (victim === undefined) return undefined;
      this.#listed.delete(victim[0]);
      this.#followers.removed(victim[1].namespace, [victim[1].hash]);
      this.#release(victim[1].slot);
      this.evictions++;
    }
    const slot = this.#free.pop()!;
    this.#allocated.add(slot);
    return slot;
  }

  hasFreeSlot(_payloadBytes: number): boolean {
    return this.#free.length > 0;
  }

  whenFull(makeRoom: () => boolean): void {
    this.#makeRoom = makeRoom;
  }

  free(slot: number): void {
    invariant(this.#allocated.delete(slot), `slot ${slot} is not allocated`);
    this.#release(slot);
  }

  publish(namespace: Namespace, block: BlockFields, slot: number): void {
    invariant(this.#allocated.delete(slot), `slot ${slot} is not allocated`);
    const key = namespace.key + block.hash;
    invariant(!this.#listed.has(key), 'published twice');
    this.headers.set(slot, block);
    const above = block.parent === null ? undefined : this.#listed.get(namespace.key + block.parent);
    const toldAt = above?.toldAt ?? this.#published;
    this.#published++;
    this.#listed.set(key, { expiresS: 0, ...block, namespace, slot, pins: 0, toldAt });
    this.#followers.stored(namespace, [block.hash], [block.expiresS ?? 0]);
  }

  get(namespace: Namespace, hash: HashKey): (ArenaBlock & Pick<BlockFields, 'parent'>) | undefined {
    return this.#listed.get(namespace.key + hash);
  }

  isDue(namespace: Namespace, hash: HashKey, roomBytes: number): boolean {
    const block = this.#listed.get(namespace.key + hash);
    return block !== undefined && this.#published - block.toldAt >= Math.min(roomBytes, this.#slotCount) / 4;
  }

  refresh(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.touch(namespace, hashes);
  }

  pin(namespace: Namespace, hash: HashKey): void {
    const block = this.#listed.get(namespace.key + hash);
    invariant(block !== undefined, 'pin of an unlisted block');
    block.pins++;
  }

  unpin(namespace: Namespace, hash: HashKey): void {
    const key = namespace.key + hash;
    const zombies = this.#zombies.get(key);
    if (zombies !== undefined) {
      // The model cannot tell which of them is meant, so a store that mixes them up would be caught by its contents.
      const zombie = zombies[0]!;
      if (--zombie.pins === 0) {
        zombies.shift();
        this.#release(zombie.slot);
        if (zombies.length === 0) this.#zombies.delete(key);
      }
      return;
    }
    const block = this.#listed.get(key);
    invariant(block !== undefined && block.pins > 0, 'unpin of what is not pinned');
    block.pins--;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const missing = hashes.findIndex((hash) => !this.#listed.has(namespace.key + hash));
    return missing === -1 ? hashes.length : missing;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (const hash of [...hashes].reverse()) {
      const block = this.#listed.get(namespace.key + hash);
      if (block === undefined) continue;
      this.#listed.delete(namespace.key + hash);
      this.#listed.set(namespace.key + hash, block);
      block.toldAt = this.#published;
    }
  }

  remove(namespace: Namespace, hashes: readonly HashKey[]): number {
    let count = 0;
    for (const hash of hashes) {
      const key = namespace.key + hash;
      const block = this.#listed.get(key);
      if (block === undefined) continue;
      this.#listed.delete(key);
      this.#followers.removed(namespace, [hash]);
      count++;
      if (block.pins === 0) this.#release(block.slot);
      else this.#zombies.set(key, [...(this.#zombies.get(key) ?? []), block]);
    }
    return count;
  }

  write(): Promise<WriteStatus[]> {
    throw new Error('the store never writes to its top tier');
  }

  read(): Promise<void> {
    throw new Error('the store never reads from its top tier');
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#listed.values()].map(({ namespace, hash }) => [namespace, [hash]] as const);
    return this.#followers.follow(listener, held);
  }

  stats(): TierStats {
    const blocks = this.#listed.size;
    return {
      tier: this.name,
      blocks,
      bytes: this.#slotCount - this.#free.length,
      capacityBytes: this.#slotCount,
      ...zeroStats,
    };
  }

  /** Slots in use for anything but listed, unpinned blocks. */
  get busySlots(): number {
    return this.#slotCount - this.#free.length - [...this.#listed.values()].filter((block) => block.pins === 0).length;
  }

  checkIntegrity(): void {
    const zombies = [...this.#zombies.values()].flat().length;
    invariant(this.#free.length + this.#allocated.size + this.#listed.size + zombies === this.#slotCount, 'slots lost');
  }

  async close(): Promise<void> {}

  #victim(): [string, Listed] | undefined {
    for (const one of this.#listed) if (one[1].pins === 0) return one;
    return undefined;
  }

  #release(slot: number): void {
    this.content.delete(slot);
    this.headers.delete(slot);
    this.#free.push(slot);
  }
}

/** One read of one block, or one write of a batch, that waits for the test to answer. */
export interface Job {
  readonly kind: 'read' | 'write';
  readonly hashes: readonly HashKey[];
  readonly finish: (answer: ReadStatus | WriteStatus) => void;
}

/** A lower tier that does nothing until the test answers a job. */
export class SteppedTier implements Tier {
  readonly supports;
  readonly #followers = new Followers();
  readonly name: string;
  readonly jobs: Job[] = [];
  /** Reads that are asked for now fail before `read` returns, as a peer's do that nobody is connected to. */
  failsAtOnce = false;
  readonly #arena: ModelArena;
  readonly #held = new Map<
    string,
    { readonly namespace: Namespace; readonly content: string; readonly fields: BlockFields }
  >();

  constructor(name: string, arena: ModelArena) {
    this.name = name;
    this.supports = { persistent: true, shared: name !== 'disk', writable: true, evicts: false };
    this.#arena = arena;
  }

  /** It holds these now, without having been asked to: what another process or an earlier life wrote. */
  put(namespace: Namespace, hashes: readonly HashKey[], payloadBytes = 1, expiresS = 0): void {
    for (const hash of hashes) {
      const fields = { hash, parent: null, tokenCount: 16, payloadBytes, checksum: 0n, expiresS };
      this.#held.set(namespace.key + hash, { namespace, content: namespace.key + hash, fields });
      this.#tell(namespace, fields);
    }
  }

  /** As the disk does: with the end of the object; a shared tier does not know it before it is read. */
  #tell(namespace: Namespace, { hash, expiresS = 0 }: BlockFields): void {
    if (this.supports.shared) this.#followers.stored(namespace, [hash]);
    else this.#followers.stored(namespace, [hash], [expiresS]);
  }

  /** The end of the object that it holds under this name; undefined: it holds none. */
  endOf(namespace: Namespace, hash: HashKey): number | undefined {
    const fields = this.#held.get(namespace.key + hash)?.fields;
    return fields === undefined ? undefined : (fields.expiresS ?? 0);
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const missing = hashes.findIndex((hash) => !this.#held.has(namespace.key + hash));
    return missing === -1 ? hashes.length : missing;
  }

  touch(): void {}

  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    return new Promise((resolve) => {
      const finish = (answer: ReadStatus | WriteStatus): void => {
        for (const { hash, slot } of blocks) {
          const content = this.#arena.content.get(slot)!;
          if (answer !== 'stored') continue;
          const fields = this.#arena.headers.get(slot)!;
          this.#held.set(namespace.key + hash, { namespace, content, fields });
          this.#tell(namespace, fields);
        }
        resolve(blocks.map(() => answer as WriteStatus));
      };
      this.jobs.push({ kind: 'write', hashes: blocks.map(({ hash }) => hash), finish });
    });
  }

  read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    let open = blocks.length;
    if (this.failsAtOnce) {
      for (const index of blocks.keys()) onDone(index, 'failed');
      return Promise.resolve();
    }
    return new Promise((resolve) => {
      for (const [index, { hash, slot }] of blocks.entries()) {
        const finish = (wish: ReadStatus | WriteStatus): void => {
          const found = this.#held.get(namespace.key + hash);
          const answer = found === undefined ? 'missing' : (wish as ReadStatus);
          if (answer === 'ready') {
            this.#arena.content.set(slot, found!.content);
            this.#arena.headers.set(slot, found!.fields);
          } else if (answer === 'corrupt') this.remove(namespace, [hash]);
          onDone(index, answer);
          if (--open === 0) resolve();
        };
        this.jobs.push({ kind: 'read', hashes: [hash], finish });
      }
    });
  }

  remove(namespace: Namespace, hashes: readonly HashKey[]): number {
    const removed = hashes.filter((hash) => this.#held.delete(namespace.key + hash));
    this.#followers.removed(namespace, removed);
    return removed.length;
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#held.values()].map(
      ({ namespace, fields }) =>
        [namespace, [fields.hash], this.supports.shared ? [] : [fields.expiresS ?? 0]] as const,
    );
    return this.#followers.follow(listener, held);
  }

  stats(): TierStats {
    return { tier: this.name, blocks: this.#held.size, bytes: this.#held.size, capacityBytes: 1e9, ...zeroStats };
  }

  checkIntegrity(): void {}

  async close(): Promise<void> {}
}

/** Lets promises and microtasks run until nothing is left of them. */
export const settled = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
