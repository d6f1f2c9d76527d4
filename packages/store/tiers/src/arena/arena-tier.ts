/**
 * The arena as a tier: the CPU tier, and the place through which every block passes.
 *
 * A block's life here:   allocate ──▶ (someone writes the payload) ──▶ publish ──▶ evicted or removed ──▶ slot free
 *                            └──────── free (it never became a block)      │
 *                                                                 pin/unpin: stays while pinned
 *
 * Beyond `Tier` it offers what the store needs of the top tier, without copies. Invariants: a listed block's slot holds
 * its header and payload; a pinned block's bytes are neither moved nor given away, even when it was removed meanwhile;
 * at most the arena's bytes are ever held.
 */
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import type { PolicyName } from '@kvtier/eviction';
import { encodeHeader, type HashKey, headerBytes, type Namespace, slotBytesFor } from '@kvtier/identity';
import { Followers, pagesOfMap } from '../kit/followers.ts';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  Tier,
  TierChange,
  TierStats,
  WriteStatus,
} from '../kit/tier.ts';
import { type ArenaBlock, type BlockFields, nameOf } from './arena-block.ts';
import { HeldSlots } from './held-slots.ts';
import { type Ranked, SizeClass, type SizeClassOptions } from './size-class.ts';
import { SizeClasses } from './size-classes.ts';
import { SlotAllocator } from './slot-allocator.ts';
import { copyIn, copyOut } from './slot-copies.ts';
import { Victims } from './victims.ts';

interface Entry extends ArenaBlock, Ranked {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly parent: HashKey | null;
  readonly slotBytes: number;
  /** Shared by all blocks of one name, as pins are given back by name: none of them goes before the last pin. */
  readonly pins: { count: number };
  /** When it was published or touched last: compares blocks of different sizes. */
  usedUs: number;
}

export interface ArenaTierOptions {
  readonly arena: ArenaHandle;
  readonly arenaBytes: number;
  readonly nowUs: () => number;
  readonly policy?: PolicyName;
  /** `SizeClassOptions.mayPass`. */
  readonly mayPass?: number;
  readonly chunkBytes?: number;
  readonly onEvict?: (namespace: Namespace, hash: HashKey) => void;
  /** Asked by `stats`, for its `detail`: what only whoever made the arena knows. */
  readonly detail?: () => Readonly<Record<string, number>>;
}

export class ArenaTier implements Tier {
  readonly name = 'arena';
  readonly supports = { persistent: false, shared: false, writable: true, evicts: true };
  readonly #followers = new Followers();
  readonly #arena: ArenaHandle;
  readonly #nowUs: () => number;
  readonly #order: Pick<SizeClassOptions<Entry>, 'policy' | 'mayPass'>;
  readonly #onEvict: (namespace: Namespace, hash: HashKey) => void;
  readonly #detail: () => Readonly<Record<string, number>>;
  readonly #allocator: SlotAllocator;
  readonly #index = new Map<string, Map<HashKey, Entry>>();
  readonly #classes = new SizeClasses<Entry>((slotBytes) => this.#newClass(slotBytes));
  readonly #bySlot = new Map<number, Entry>();
  /** Removed while pinned, by namespace and hash; freed at the last unpin. */
  readonly #leaving = new Map<string, Entry[]>();
  readonly #held = new HeldSlots();
  /** Allocated and not yet published. */
  readonly #unpublished = new Set<number>();
  readonly #victims: Victims<Entry>;
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };

  constructor(options: ArenaTierOptions) {
    this.#arena = options.arena;
    this.#nowUs = options.nowUs;
    this.#order = { policy: options.policy ?? 'lru', mayPass: options.mayPass };
    this.#onEvict = options.onEvict ?? (() => {});
    this.#detail = options.detail ?? (() => ({}));
    this.#allocator = new SlotAllocator(options.arenaBytes, options.chunkBytes);
    this.#victims = new Victims({
      allocator: this.#allocator,
      classes: this.#classes,
      entryAt: (slot) => this.#bySlot.get(slot)!,
      evict: (entry) => this.#evict(entry),
    });
  }

  /** The largest payload that an empty arena could hold. */
  get maxPayloadBytes(): number {
    return this.#allocator.maxSlotBytes - headerBytes;
  }

  /**
   * A slot for header + payload, evicting unpinned blocks when none is free; undefined when all that is left is pinned
   * or unpublished. Give it back with `free`, or make it a block with `publish`.
   */
  allocate(_namespace: Namespace, payloadBytes: number): number | undefined {
    const slotBytes = slotBytesFor(payloadBytes);
    const slot = this.#allocator.allocate(slotBytes) ?? this.#victims.makeWay(slotBytes);
    if (slot === undefined) this.#counts.refused++;
    else this.#unpublished.add(slot);
    return slot;
  }

  /**
   * The same for what stays on loan, and may lie in a larger slot: of the smallest size that there is. Objects of many sizes would else
   * take a slab for each.
   */
  lend(namespace: Namespace, bytes: number): number | undefined {
    return this.allocate(namespace, (this.#allocator.sizeFor(bytes) ?? bytes) - headerBytes);
  }

  /** See `ArenaTop.hasFreeSlot` of packages/store/placement. */
  hasFreeSlot(payloadBytes: number): boolean {
    return this.#allocator.hasFree(slotBytesFor(payloadBytes));
  }

  /** See `ArenaTop.whenFull` of packages/store/placement. */
  whenFull(makeRoom: () => boolean): void {
    this.#victims.whenFull(makeRoom);
  }

  /** Bytes of an allocated slot, published or not: what a reader may write there. */
  slotBytesOf(slot: number): number {
    return this.#allocator.slotBytesOf(slot);
  }

  /** Give back a slot that was never published. */
  free(slot: number): void {
    invariant(this.#unpublished.delete(slot), () => `arena: slot ${slot} is not an unpublished one`);
    this.#freeSlot(slot);
  }

  hold(slot: number): void {
    this.#held.hold(slot);
    if (this.#bySlot.has(slot)) this.#allocator.setIdle(slot, false);
  }

  release(slot: number): void {
    const wasFreed = this.#held.release(slot);
    if (wasFreed === undefined) return;
    if (wasFreed) this.#free(slot);
    else this.#unused(this.#bySlot.get(slot));
  }

  /** Write the header in front of the payload and list the block. From now on the slot belongs to the tier. */
  publish(namespace: Namespace, block: BlockFields, slot: number): void {
    const { hash, parent, tokenCount, payloadBytes, checksum, expiresS = 0 } = block;
    invariant(this.get(namespace, hash) === undefined, 'arena: the block is listed already');
    invariant(this.#unpublished.delete(slot), () => `arena: slot ${slot} is not an unpublished one`);
    const slotBytes = this.#allocator.slotBytesOf(slot);
    invariant(slotBytes === slotBytesFor(payloadBytes), 'arena: the payload does not fit its slot');
    const header = encodeHeader({
      namespace: namespace.digest,
      hash,
      parent,
      tokenCount,
      payloadBytes,
      payloadChecksum: checksum,
      expiresS,
    });
    native.arenaWrite(this.#arena, slot, header);
    const sizeClass = this.#classes.published(slotBytes);
    const index = sizeClass.nextIndex;
    const pins = this.#leavingOf(namespace, hash)?.[0]?.pins ?? { count: 0 };
    const usedUs = this.#nowUs();
    const about = { namespace, hash, parent, slot, slotBytes, payloadBytes, checksum, expiresS };
    const entry: Entry = { ...about, index, pins, usedUs, placedAtBytes: 0, toldAtBytes: 0 };
    sizeClass.add(entry);
    this.#bySlot.set(slot, entry);
    this.#allocator.setIdle(slot, this.#isIdle(entry));
    let blocks = this.#index.get(namespace.key);
    if (blocks === undefined) {
      blocks = new Map();
      this.#index.set(namespace.key, blocks);
    }
    blocks.set(hash, entry);
    this.#followers.stored(namespace, [hash], [expiresS]);
  }

  get(namespace: Namespace, hash: HashKey): (ArenaBlock & Pick<BlockFields, 'parent'>) | undefined {
    return this.#find(namespace, hash);
  }

  /** See `ArenaTop.isDue` of packages/store/placement. */
  isDue(namespace: Namespace, hash: HashKey, roomBytes: number): boolean {
    const entry = this.#find(namespace, hash);
    return entry !== undefined && this.#classes.get(entry.slotBytes)!.isDue(entry, roomBytes);
  }

  /** See `ArenaTop.refresh` of packages/store/placement. */
  refresh(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (let at = hashes.length - 1; at >= 0; at--) {
      const entry = this.#find(namespace, hashes[at]!);
      if (entry !== undefined) this.#classes.used(entry.slotBytes).refresh(entry);
    }
  }

  /** Counted. Balanced by `unpin`. */
  pin(namespace: Namespace, hash: HashKey): void {
    const entry = this.#find(namespace, hash);
    invariant(entry !== undefined, 'arena: pin of a block that is not listed');
    if (entry.pins.count++ === 0) this.#allocator.setIdle(entry.slot, false);
  }

  unpin(namespace: Namespace, hash: HashKey): void {
    const leaving = this.#leavingOf(namespace, hash);
    const listed = this.#find(namespace, hash);
    const pins = (leaving?.[0] ?? listed)?.pins;
    invariant(pins !== undefined && pins.count > 0, 'arena: unpin of a block that is not pinned');
    pins.count--;
    if (pins.count > 0) return;
    this.#unused(listed);
    if (leaving === undefined) return;
    this.#leaving.delete(namespace.key + hash);
    for (const { slot, slotBytes } of leaving) {
      this.#freeSlot(slot);
      this.#victims.letGo(slotBytes);
    }
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const blocks = this.#index.get(namespace.key);
    let held = 0;
    while (held < hashes.length && blocks?.has(hashes[held]!)) held++;
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    const nowUs = this.#nowUs();
    for (let at = hashes.length - 1; at >= 0; at--) {
      const entry = this.#find(namespace, hashes[at]!);
      if (entry === undefined) continue;
      entry.usedUs = nowUs;
      this.#classes.used(entry.slotBytes).touch(entry);
    }
  }

  /** Copies from other slots of the same arena. (The store publishes in place instead.) */
  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const statuses: WriteStatus[] = [];
    for (const { hash, slot: source } of blocks)
      statuses.push(await copyIn(this, this.#arena, namespace, { hash, slot: source }));
    return statuses;
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    for (const [index, block] of blocks.entries()) onDone(index, await copyOut(this, this.#arena, namespace, block));
  }

  /** A pinned block is unlisted now and its slot freed at the last unpin. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    let count = 0;
    for (const hash of hashes) {
      const entry = this.#find(namespace, hash);
      if (entry === undefined) continue;
      this.#unlist(entry);
      count++;
      if (reason === 'corrupt') this.#counts.corrupt++;
      if (reason === 'evicted') this.#counts.evictions++;
      const key = namespace.key + hash;
      if (entry.pins.count === 0) this.#freeSlot(entry.slot);
      else this.#leaving.set(key, [...(this.#leaving.get(key) ?? []), entry]);
    }
    return count;
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#index.values()].map((blocks) => {
      const entries = [...blocks.values()];
      return [entries[0]!.namespace, [...blocks.keys()], entries.map(({ expiresS }) => expiresS)] as const;
    });
    return this.#followers.follow(listener, held);
  }

  followInPages(listener: (change: TierChange) => void): Following {
    const namespaceOf = (blocks: ReadonlyMap<HashKey, Entry>): Namespace => blocks.values().next().value!.namespace;
    return this.#followers.followInPages(
      listener,
      pagesOfMap(
        this.#index,
        (blocks) => blocks,
        namespaceOf,
        ({ expiresS }) => expiresS,
      ),
    );
  }

  stats(): TierStats {
    return {
      tier: this.name,
      blocks: this.#bySlot.size,
      bytes: this.#allocator.allocatedBytes,
      capacityBytes: this.#allocator.capacityBytes,
      ...this.#counts,
      inService: true,
      outOfServiceReason: '',
      detail: this.#detail(),
    };
  }

  checkIntegrity(): void {
    this.#allocator.checkIntegrity();
    let listed = 0;
    for (const [slotBytes, sizeClass] of this.#classes) {
      const live = sizeClass.checked();
      listed += live.length;
      for (const entry of live) {
        invariant(entry.slotBytes === slotBytes, 'arena: an entry is in a wrong class');
        invariant(this.#find(entry.namespace, entry.hash) === entry, 'arena: index and entries disagree');
        invariant(this.#bySlot.get(entry.slot) === entry, 'arena: slots and entries disagree');
        invariant(
          this.#allocator.isIdle(entry.slot) === this.#isIdle(entry),
          'arena: its slot does not know of its use',
        );
      }
    }
    invariant(listed === this.#bySlot.size, 'arena: a slot has no entry');
    let bytes = 0;
    for (const slot of [
      ...this.#bySlot.keys(),
      ...this.#unpublished,
      ...[...this.#leaving.values()].flat().map((e) => e.slot),
      ...this.#held.waiting,
    ]) {
      bytes += this.#allocator.slotBytesOf(slot);
      invariant(this.#bySlot.has(slot) || !this.#allocator.isIdle(slot), 'arena: a slot without a block is idle');
    }
    invariant(bytes === this.#allocator.allocatedBytes, 'arena: a slot is allocated and nobody has it');
  }

  async close(): Promise<void> {}

  #find(namespace: Namespace, hash: HashKey): Entry | undefined {
    return this.#index.get(namespace.key)?.get(hash);
  }

  /** Mostly nothing is leaving, and joining the two names costs more than all else that a pin does. */
  #leavingOf(namespace: Namespace, hash: HashKey): Entry[] | undefined {
    return this.#leaving.size === 0 ? undefined : this.#leaving.get(namespace.key + hash);
  }

  #newClass(slotBytes: number): SizeClass<Entry> {
    return new SizeClass<Entry>({
      ...this.#order,
      isIdle: (entry) => this.#isIdle(entry),
      nameOf,
      publishedBytes: () => this.#classes.publishedBytes,
      capacityBytes: this.#allocator.capacityBytes,
      parentOf: ({ namespace, parent }) => {
        const above = parent === null ? undefined : this.#find(namespace, parent);
        return above?.slotBytes === slotBytes ? above : undefined;
      },
    });
  }

  /** Somebody uses the block no more; others may. */
  #unused(entry: Entry | undefined): void {
    if (entry === undefined || !this.#isIdle(entry)) return;
    this.#allocator.setIdle(entry.slot, true);
    this.#classes.get(entry.slotBytes)!.idle(entry);
    this.#classes.loosened(entry.slotBytes);
    this.#victims.letGo(entry.slotBytes);
  }

  /** Nobody uses the block: its slot can be given away. */
  #isIdle(entry: Entry): boolean {
    return entry.pins.count === 0 && !this.#held.has(entry.slot);
  }

  #evict(entry: Entry): void {
    this.#classes.get(entry.slotBytes)!.evicted(entry);
    this.#unlist(entry);
    this.#freeSlot(entry.slot);
    this.#counts.evictions++;
    this.#onEvict(entry.namespace, entry.hash);
  }

  #freeSlot(slot: number): void {
    if (!this.#held.freed(slot)) this.#free(slot);
  }

  #free(slot: number): void {
    this.#classes.loosened(this.#allocator.slotBytesOf(slot));
    this.#allocator.free(slot);
  }

  #unlist(entry: Entry): void {
    const blocks = this.#index.get(entry.namespace.key)!;
    blocks.delete(entry.hash);
    if (blocks.size === 0) this.#index.delete(entry.namespace.key);
    this.#bySlot.delete(entry.slot);
    this.#classes.get(entry.slotBytes)!.remove(entry);
    this.#followers.removed(entry.namespace, [entry.hash]);
  }
}
