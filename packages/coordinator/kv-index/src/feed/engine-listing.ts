/**
 * What one engine says of its blocks, applied to the index: a source for each data-parallel rank and attention group. Pure: no sockets, no
 * time; `apply` goes on a slice at a time.
 *
 * Names: an engine that hashes as we do names its blocks by our keys. Of others, the tokens are hashed again; then a block is only known
 * with all before it, back to the root, and those with an adapter or an image are left out. Of their groups one is followed, the first that
 * sees everything: groups with a window leave out blocks, so that theirs have no way back to the root. A name stays while the index credits some part
 * with its block: removals of what was stored before we listened, on another medium or by another part, must not take it.
 */
import { type PackedBatch, recordType, type StreamItem } from '@kvtier/events';
import type { ChainHasher } from '@kvtier/identity';
import { keysOfHashes } from '../keys.ts';
import type { Keys, KvIndex, Parent } from '../kv-index.ts';
import { HashNames } from './hash-names.ts';
import type { Lies } from './lies.ts';
import { isExternal, mediumNumbers, mediumOf, sharedMedia } from './media.ts';
import type { NamesBudget } from './names-budget.ts';
import { eventsIn, type PackedEvent } from './packed-events.ts';
import { Part } from './part.ts';
import { Slicer, slices, turnBlocks } from './slices.ts';
import { tellUnread } from './unread.ts';

export interface EngineListingOptions {
  readonly index: KvIndex;
  readonly blockTokens: number;
  /** More than this on one medium cannot be. */
  readonly maxBlocks: number;
  /** Set for an engine that hashes otherwise: how we do, and where the names of its blocks have their bytes from. */
  readonly renaming: { readonly hasher: ChainHasher; readonly budget: NamesBudget } | undefined;
  readonly lies: Lies;
  /** So many blocks were told of, and are not in the index for want of room. */
  readonly onLeftOut?: (blocks: number) => void;
}

interface Named {
  readonly keys: Keys;
  readonly parent: Keys | undefined;
}

/** vLLM numbers ranks over all hosts: of a wide deployment, a host tells of high ones. `maxParts` bounds how many there are. */
const maxRanks = 65_536;
const maxGroups = 16;
/** Kinds of attention that see all that came before, as vLLM calls them. */
const wholeKinds = ['full_attention', 'mla_attention', 'sink_full_attention'];
/** Events looked at for their kind before a turn may end. */
const lookedAtOnce = 512;
/** Ranks times groups. */
const maxParts = 64;

export class EngineListing {
  readonly #options: EngineListingOptions;
  readonly #slicer: Slicer;
  /** rank × maxGroups + group → its part. */
  readonly #parts = new Map<number, Part>();
  /**
   * Gone while an item is applied: they hold nothing, and are closed at its end, when it is told that the sources are others. Until then their
   * numbers are asked for, and must not be another publisher's.
   */
  readonly #gone: Part[] = [];
  readonly #names: HashNames | undefined;
  /** Names were refused since all was void last. */
  #isCut = false;
  /** Blocks with an adapter, a salt or an image were left out since, or could not be read; of those after them, only the parent, without a name, shows it. */
  #hasSkipped = false;
  /** Of a foreign engine: the group that stands for all, as it sees everything; undefined: none is known, and the first one does. */
  #wholeGroup: number | undefined;
  /** What the index had dropped then: of what this engine told before, nothing is missed. */
  #droppedBefore: number;
  /** How often a part came, another window was told of one, or all went. */
  #changes = 0;

  constructor(options: EngineListingOptions) {
    this.#options = options;
    this.#slicer = new Slicer(options.index);
    this.#droppedBefore = options.index.stats().droppedBlocks;
    const { renaming, maxBlocks } = options;
    if (renaming) this.#names = new HashNames(renaming.hasher.hashBytes, maxBlocks, renaming.budget);
  }

  /** By rank, each rank's attention groups: a part in the place of its number. */
  ranks(): (Part | undefined)[][] {
    const ranks = new Map<number, (Part | undefined)[]>();
    for (const [place, part] of this.#parts) {
      const rank = Math.floor(place / maxGroups);
      const groups = ranks.get(rank) ?? [];
      groups[place % maxGroups] = part;
      ranks.set(rank, groups);
    }
    return [...ranks.values()];
  }

  /** Some rank holds all of these blocks: it has nothing to tell of a request with them. */
  holds(keys: Keys): boolean {
    const { index } = this.#options;
    return this.ranks().some((groups) => {
      const targets = groups
        .flatMap((part) => (part?.window.tokens === undefined ? (part ?? []) : []))
        .map(({ source }) => ({ sources: [source] }));
      return targets.length > 0 && index.match(keys, targets).every(({ blocks }) => blocks === keys.length / 2);
    });
  }

  /** One item of its stream. Goes on with each `next`, some thousand blocks at a time. True: its sources, or their windows, are others. */
  *apply(item: StreamItem<PackedBatch>): Generator<void, boolean> {
    tellUnread(item, this.#options.lies);
    if (item.kind !== 'batch') return this.forget();
    if (item.batch.unread) this.#hasSkipped = true;
    const rank = item.batch.dataParallelRank ?? 0;
    if (rank >= maxRanks) {
      this.#options.lies.tell('rank', () => `data-parallel rank ${rank}; at most ${maxRanks - 1}`);
      return false;
    }
    const before = this.#changes;
    yield* this.#slicer.inTurns(this.#events(rank, item.batch));
    this.#closeGone();
    return this.#changes !== before;
  }

  /** All that it said is void. Returns whether it had said anything. */
  forget(): boolean {
    const had = this.#void() || this.#gone.length > 0;
    this.#closeGone();
    return had;
  }

  /** The same, while an item is applied. */
  #void(): boolean {
    const had = this.#parts.size > 0;
    this.#leaveParts();
    this.#forgetNames();
    this.#wholeGroup = undefined;
    return had;
  }

  #leaveParts(): void {
    if (this.#parts.size === 0) return;
    for (const part of this.#parts.values()) {
      part.cleared();
      this.#gone.push(part);
    }
    this.#parts.clear();
    this.#changes++;
  }

  #closeGone(): void {
    for (const part of this.#gone.splice(0)) part.close();
  }

  *#events(rank: number, batch: PackedBatch): Generator<number, void> {
    yield* this.#chooseGroup(batch);
    for (const event of eventsIn(batch)) yield* this.#event(rank, event);
  }

  /** Before what a batch says of blocks: groups that stand before the one that sees everything tell of them first. */
  *#chooseGroup(batch: PackedBatch): Generator<number, void> {
    if (this.#names === undefined || this.#wholeGroup !== undefined) return;
    let looked = 0;
    for (const { type, kind, group, tokens } of eventsIn(batch)) {
      if (++looked % lookedAtOnce === 0) yield lookedAtOnce;
      if (type !== recordType.stored) continue;
      // Who does not name it where it computes blocks does so nowhere.
      if (!kind && tokens.length > 0) return;
      if (!kind || !wholeKinds.includes(kind)) continue;
      this.#wholeGroup = group;
      if (group === 0 || this.#parts.size === 0) return;
      this.#leaveParts();
      yield* this.#reviewNames();
      return;
    }
  }

  *#event(rank: number, event: PackedEvent): Generator<number, void> {
    const { lies, renaming } = this.#options;
    if (isExternal(event.medium)) return;
    const medium = event.medium === undefined ? mediumNumbers.gpu : mediumOf(event.medium);
    if (medium === undefined || sharedMedia.includes(medium)) {
      lies.tell('medium', () => `blocks on ${event.medium}, which no engine has`);
      return;
    }
    if (event.type === recordType.reused) return; // a copy more would outlive the block
    if (event.type === recordType.cleared) {
      // SGLang clears its host memory with the GPU, and does not say so.
      const which = renaming && event.medium === undefined ? undefined : medium;
      for (const [place, part] of this.#parts) if (Math.floor(place / maxGroups) === rank) part.cleared(which);
      yield 1;
      yield* this.#reviewNames();
      return;
    }
    const followed = renaming && (this.#wholeGroup ?? 0);
    if (followed !== undefined && event.isGroupSaid && event.group !== followed) {
      yield 1; // there may be thousands of them
      return;
    }
    // The one that stands for all is the only one there is, whatever its number.
    const group = followed === undefined ? event.group : 0;
    if (group >= maxGroups) {
      lies.tell('group', () => `attention group ${group}; at most ${maxGroups - 1}`);
      return;
    }
    const place = rank * maxGroups + group;
    if (event.type === recordType.removed) {
      const part = this.#parts.get(place);
      if (part === undefined) {
        yield 1;
        return;
      }
      for (const keys of slices(event.keys)) {
        const own = this.#ownKeys(keys);
        part.removed(medium, own);
        this.#dropNames(keys);
        yield keys.length / 2;
      }
      return;
    }
    if (event.keys.length === 0 || !this.#isSound(event)) return;
    const part = this.#partAt(place, event);
    if (part) yield* this.#store(part, medium, event);
  }

  #isSound(event: PackedEvent): boolean {
    const { blockTokens, lies } = this.#options;
    if (event.blockTokens === 0 || event.blockTokens === blockTokens) return true;
    lies.tell('block_size', () => `blocks of ${event.blockTokens} tokens, the index has blocks of ${blockTokens}`);
    return false;
  }

  #partAt(place: number, event: PackedEvent): Part | undefined {
    const { index, maxBlocks, lies } = this.#options;
    let part = this.#parts.get(place);
    if (part === undefined) {
      if (this.#parts.size >= maxParts) {
        lies.tell('too_many_parts', () => `more than ${maxParts} ranks and groups`);
        return undefined;
      }
      part = new Part(index, maxBlocks);
      this.#parts.set(place, part);
      this.#changes++;
    }
    // An empty kind says nothing: some snapshots name none.
    if (event.kind) this.#setWindow(part, windowOf(event));
    return part;
  }

  #setWindow(part: Part, tokens: number | undefined): void {
    if (part.window.tokens === tokens) return;
    part.window = { tokens };
    this.#changes++;
  }

  *#store(part: Part, medium: number, event: PackedEvent): Generator<number, void> {
    const { keys, tokens, blockTokens } = event;
    const isRenamed = this.#names !== undefined && tokens.length > 0;
    // Where nothing else is told of, it is no lie that some of them have no way back to the root.
    if (isRenamed && isWindowed(event)) this.#hasSkipped = true;
    if (isRenamed && !this.#canRename(event)) return;
    if (isRenamed && medium === mediumNumbers.gpu && (yield* this.#isToldAgain(part, event))) return;
    // Only hashes: nothing is said of their order. Groups other than the first leave out blocks.
    const isOrdered = (isRenamed || event.group === 0) && (event.parent !== undefined || event.blockTokens > 0);
    let before = event.parent;
    let at = 0;
    for (const slice of slices(keys)) {
      const count = slice.length / 2;
      const named = isRenamed
        ? this.#rename(slice, before, tokens.subarray(at * blockTokens, (at + count) * blockTokens))
        : { keys: this.#ownKeys(slice), parent: before };
      if (named === undefined) {
        if (this.#hasLeftOut) this.#leaveOut(keys.length / 2 - at - count); // the slices after this one
        return;
      }
      const parent: Parent = !isOrdered || (this.#names && !isRenamed) ? 'unknown' : (named.parent ?? 'root');
      if (!part.stored(medium, named.keys, parent)) {
        this.#options.lies.tell('too_many_blocks', () => `more than ${this.#options.maxBlocks} blocks`);
        yield* this.#reviewNames();
        return;
      }
      before = slice.subarray(slice.length - 2);
      at += count;
      yield count;
    }
  }

  /**
   * Whether all of these blocks, from the root on, are there on the GPU: vLLM tells hits so, without a mark, when a client asks for it, and
   * removes each block once. Of two prompts computed at once it removes each copy: with the first one they are thought to be gone.
   */
  *#isToldAgain({ source }: Part, { keys, parent }: PackedEvent): Generator<number, boolean> {
    if (parent !== undefined || this.#ownKeys(keys.subarray(keys.length - 2)).length === 0) return false;
    const own = new Int32Array(keys.length);
    let at = 0;
    for (const slice of slices(keys)) {
      const named = this.#ownKeys(slice);
      if (named.length < slice.length) return false;
      own.set(named, at);
      at += named.length;
      yield named.length / 2;
    }
    const [match] = this.#options.index.match(own, [{ sources: [source] }]);
    return match!.byMedium[mediumNumbers.gpu] === own.length / 2;
  }

  /** The engine's names as ours; those that we have none for are left out. */
  #ownKeys(keys: Keys): Keys {
    const names = this.#names;
    if (names === undefined) return keys;
    const own: number[] = [];
    for (let at = 0; at < keys.length; at += 2) {
      const hash = names.find(keys[at]!, keys[at + 1]!);
      if (hash !== undefined) own.push(...keyOf(hash));
    }
    return Int32Array.from(own);
  }

  /** Of blocks that were removed: who is still credited with one will be told of it by its name. */
  #dropNames(keys: Keys): void {
    const names = this.#names;
    if (names === undefined) return;
    const isCredited = this.#credits();
    for (let at = 0; at < keys.length; at += 2) {
      const hash = names.find(keys[at]!, keys[at + 1]!);
      if (hash !== undefined && !isCredited(hash)) names.drop(keys[at]!, keys[at + 1]!);
    }
  }

  /** Nobody says one by one that what was named is gone. */
  *#reviewNames(): Generator<number, void> {
    const names = this.#names;
    if (names === undefined) return;
    for (const _ of names.review(turnBlocks, this.#credits())) yield turnBlocks;
    if (names.count === 0) this.#forgetNames();
  }

  /** Whether the index credits some part with the block of this hash. */
  #credits(): (hash: Buffer) => boolean {
    const { index } = this.#options;
    const target = { sources: [...this.#parts.values()].map(({ source }) => source) };
    return (hash) => {
      const [low, high] = keyOf(hash);
      return index.isHeld(low, high, target);
    };
  }

  #canRename(event: PackedEvent): boolean {
    const { keys, tokens, hasExtra } = event;
    const { blockTokens, lies } = this.#options;
    // Not a lie: such prompts are not looked up by tokens alone.
    if (hasExtra) {
      this.#hasSkipped = true;
      return false;
    }
    if (tokens.length === (keys.length / 2) * blockTokens) return true;
    if (isWindowed(event)) return false;
    lies.tell('tokens', () => `${tokens.length} tokens for ${keys.length / 2} blocks of ${blockTokens}`);
    return false;
  }

  /** The same blocks by our names, from their tokens. */
  #rename(keys: Keys, parent: Keys | undefined, tokens: Int32Array): Named | undefined {
    const { lies } = this.#options;
    const { hasher, budget } = this.#options.renaming!;
    const names = this.#names!;
    const before = parent && names.find(parent[0]!, parent[1]!);
    if (parent && before === undefined) {
      if (this.#hasLeftOut) this.#leaveOut(keys.length / 2);
      else if (!this.#hasSkipped) lies.tell('parent', () => 'blocks after one that it has not told of');
      return undefined;
    }
    const { hashBytes } = hasher;
    const hashes = hasher.hashBlocks(before ? Buffer.from(before) : null, new Uint32Array(tokens));
    let block = 0;
    for (; block < keys.length / 2; block++) {
      const hash = hashes.subarray(block * hashBytes, (block + 1) * hashBytes);
      const added = names.add(keys[2 * block]!, keys[2 * block + 1]!, hash);
      if (added === 'added') continue;
      if (added === 'bytes') {
        this.#isCut = true;
        this.#leaveOut(keys.length / 2 - block);
        const spent = `${budget.maxBytes} bytes for names of blocks are taken`;
        lies.tell('no_room', () => `no room to name them, ${spent}; raise the coordinator's index.maxBytes`);
        break;
      }
      lies.tell('too_many_blocks', () => `more than ${this.#options.maxBlocks} blocks`);
      this.#void();
      return undefined;
    }
    if (block === 0) return undefined;
    const named = keysOfHashes(hashes.subarray(0, block * hashBytes), hashBytes);
    return { keys: named, parent: before && keysOfHashes(before, hashBytes) };
  }

  #forgetNames(): void {
    this.#names?.clear();
    this.#isCut = false;
    this.#hasSkipped = false;
    this.#droppedBefore = this.#options.index.stats().droppedBlocks;
  }

  /** Something may have been left out, or forgotten, for want of room since: it has no name for those after it. */
  get #hasLeftOut(): boolean {
    return this.#isCut || this.#options.index.stats().droppedBlocks > this.#droppedBefore;
  }

  #leaveOut(blocks: number): void {
    this.#options.onLeftOut?.(blocks);
  }
}

/** The key of one hash, as `keysOfHashes` makes them. */
const keyOf = (hash: Buffer): [low: number, high: number] => [
  hash.readInt32BE(hash.length - 4),
  hash.readInt32BE(hash.length - 8),
];

/** It leaves out blocks, and tells the tokens of all between the first and the last. */
const isWindowed = ({ kind }: PackedEvent): boolean => kind !== undefined && kind !== '' && !wholeKinds.includes(kind);

/** Attention that sees a part of what came before; state that stands for all of it counts as its last block. */
function windowOf({ kind, windowTokens }: PackedEvent): number | undefined {
  if (kind === 'mamba') return 1;
  return kind === 'full_attention' ? undefined : windowTokens;
}
