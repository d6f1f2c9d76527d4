/**
 * A cluster's events for as long as one likes, on a clock that is turned by hand: engines and cache nodes store, evict, reset and start
 * again, their batches get lost, come twice or late, connections end. What the index says is held against the truth:
 *
 *   - never above its bound;
 *   - never a block credited to who has dropped it for longer than its events may take (`worstStaleMs`);
 *   - at every quiet point equal to the truth, of all whose publishers tell snapshots; of others (vLLM's), no more than it, nor of a
 *     node that names blocks otherwise, whose names may be told while nobody hears.
 */
import type { KvEvent } from '@kvtier/events';
import { ChainHasher } from '@kvtier/identity';
import { EngineListing } from '../feed/engine-listing.ts';
import { ForeignNames } from '../feed/foreign-names.ts';
import { LieCounts, Lies } from '../feed/lies.ts';
import { mediumNumbers } from '../feed/media.ts';
import { NamesBudget } from '../feed/names-budget.ts';
import { NodeListing } from '../feed/node-listing.ts';
import { SharedBlocks, type Teller } from '../feed/shared-blocks.ts';
import { KvIndex } from '../kv-index.ts';
import { Held } from './held.ts';
import { randomOf, type SimCounts, SimFollower, SimPublisher, simCounts } from './sim-publisher.ts';

export interface FeedSimulationOptions {
  readonly seed: number;
  readonly minutes: number;
  readonly maxBytes?: number;
  /** The index is too small for all: then it may know less than the truth. */
  readonly isTight?: boolean;
  /** Planted: who follows does not forget where a stream does not continue. */
  readonly isDeaf?: boolean;
}

export interface FeedSimulationResult extends SimCounts {
  readonly seed: number;
  /** What went wrong first; undefined: nothing. */
  failure: string | undefined;
  resets: number;
  quietPoints: number;
  /** Blocks compared at quiet points. */
  compared: number;
  snapshots: number;
  gaps: number;
  worstStaleMs: number;
  mostBytes: number;
  droppedBlocks: number;
  /** Blocks of the node with other names at quiet points, and those of them that it is credited with. */
  renamedHeld: number;
  renamedCredited: number;
}

/** Longest: nothing is heard for `maxIdleMs` of Probing, the next step is `probeMs` later, nobody answers, and once more `unansweredMs` later. */
const mostStaleMs = 8_000;
const tickMs = 25;
const quietEveryMs = 60_000;
/** Of that, nothing changes for so long at its end. */
const quietMs = 12_000;
/** And nothing fails for so long: what was void is told anew. */
const calmMs = 4_000;
const blockTokens = 16;
const namespace = '0123456789abcdef';
const nodeTopic = `kv@${namespace}`;
const chainCount = 24;
/** Hashes of a page of a snapshot. */
const pageSize = 16;
const namesBytes = 1 << 20;
const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });

/** Who the index should credit: a source, a medium and the truth of it. */
interface Claim {
  readonly name: string;
  readonly medium: number;
  readonly held: Held;
  readonly source: () => number | undefined;
  readonly isWhole: boolean;
  /** As the index names it; undefined: as its holder does. */
  readonly nameOf?: (hash: bigint) => bigint;
}

interface Member {
  readonly publisher: SimPublisher;
  readonly follower: SimFollower;
  /** Something happens. */
  act(): void;
  restart(): void;
  reset(): void;
}

export async function simulateFeed(options: FeedSimulationOptions): Promise<FeedSimulationResult> {
  const world = new FeedWorld(options);
  await world.run();
  return world.result;
}

class FeedWorld {
  /** A whole minute. */
  nowMs = 1_200_000;
  isCalm = false;
  readonly result: FeedSimulationResult;
  readonly #options: FeedSimulationOptions;
  readonly #random: () => number;
  readonly #index: KvIndex;
  readonly #shared: SharedBlocks;
  readonly #members: Member[] = [];
  readonly #claims: Claim[] = [];
  readonly #sharedHeld = new Held(60);
  readonly #lies: LieCounts = new LieCounts();
  readonly #names = new NamesBudget(namesBytes);
  readonly #foreignNames: ForeignNames;
  /** What was in front of each block that was ever asked for, and its tokens. */
  readonly #blocks = new Map<
    bigint,
    { readonly parent: bigint | null; readonly tokens: number[]; readonly own: Buffer; readonly name: bigint }
  >();
  #isQuiet = false;
  readonly #maxBytes: number;
  readonly #scale: number;

  constructor(options: FeedSimulationOptions) {
    this.#options = options;
    this.#random = randomOf(options.seed * 7_919 + 1);
    this.#maxBytes = options.maxBytes ?? 8 << 20;
    this.#scale = options.isTight ? 60 : 1;
    this.#index = new KvIndex({ maxBytes: this.#maxBytes, maxSources: 64, countedMedia: 1 << mediumNumbers.gpu });
    this.#shared = new SharedBlocks(this.#index, 1e6, () => undefined);
    this.#foreignNames = new ForeignNames({
      ...{ hasher, blockTokens, maxBlocks: 1e6, budget: this.#names },
      isHeld: (low, high) => this.#index.isHeldByAny(low, high),
    });
    this.result = {
      ...{ ...simCounts(), seed: options.seed, failure: undefined, resets: 0, quietPoints: 0, compared: 0 },
      ...{ snapshots: 0, gaps: 0, worstStaleMs: 0, mostBytes: 0, droppedBlocks: 0, renamedHeld: 0 },
      renamedCredited: 0,
    };
    for (let i = 0; i < 6; i++) this.#addEngine(`engine ${i}`, i >= 4);
    for (let i = 0; i < 3; i++) this.#addNode(`node ${i}`);
    this.#addForeignNode('node of other names', 0);
    this.#addForeignNode('one that fetches half of what it has', 0.5);
  }

  async run(): Promise<void> {
    const endMs = this.nowMs + this.#options.minutes * 60_000;
    for (let tick = 0; this.nowMs < endMs && this.result.failure === undefined; tick++) {
      this.nowMs += tickMs;
      const inMinuteMs = this.nowMs % quietEveryMs;
      this.#isQuiet = inMinuteMs >= quietEveryMs - quietMs;
      this.isCalm = inMinuteMs >= quietEveryMs - calmMs;
      if (!this.#isQuiet) this.#happen();
      for (const { follower } of this.#members) await follower.step();
      this.#index.sweep(256);
      this.#checkBound();
      if (tick % (this.#options.isTight ? 400 : 20) === 0) this.#checkStale();
      if (inMinuteMs >= quietEveryMs - tickMs) this.#checkQuiet();
    }
    const counts = this.#members.map(({ follower }) => follower.counts);
    this.result.snapshots = counts.reduce((sum, { snapshots }) => sum + snapshots, 0);
    this.result.gaps = counts.reduce((sum, { gaps }) => sum + gaps, 0);
    this.result.droppedBlocks = this.#index.stats().droppedBlocks;
  }

  #happen(): void {
    for (const member of this.#members) {
      const at = this.#random();
      if (at < 0.03) member.act();
      else if (at < 0.0302) {
        this.result.restarts++;
        member.publisher.upAtMs = this.nowMs + 200 + this.#random() * 2_000;
        member.publisher.restart();
        member.restart();
      } else if (at < 0.0305) {
        this.result.resets++;
        member.reset();
      } else if (at < 0.0308) {
        this.result.cuts++;
        member.publisher.upAtMs = this.nowMs + this.#random() * 3_000;
        member.publisher.arrivals.length = 0;
      }
    }
  }

  /** Blocks of one prompt: some share a beginning. */
  #prompt(): bigint[] {
    const chain = Math.floor(this.#random() * chainCount * this.#scale);
    const length = 1 + Math.floor(this.#random() * (this.#options.isTight ? 48 : 12));
    const hashes = Array.from({ length }, (_, place) => hashOf(place < 4 ? chain % 5 : chain, place));
    for (const [place, hash] of hashes.entries()) {
      if (this.#blocks.has(hash)) continue;
      const parent = place === 0 ? null : hashes[place - 1]!;
      const tokens = Array.from({ length: blockTokens }, (_, i) => (place < 4 ? chain % 5 : chain) + i);
      const before = parent === null ? null : this.#blocks.get(parent)!.own;
      const own = Buffer.from(hasher.hashBlocks(before, Uint32Array.from(tokens)));
      this.#blocks.set(hash, { parent, tokens, own, name: own.readBigUInt64BE(own.length - 8) });
    }
    return hashes;
  }

  #addEngine(name: string, isForeign: boolean): void {
    const size = pageSize * this.#scale;
    const held = new Held(40 * this.#scale);
    const lies = new Lies(name, this.#lies, silent, () => this.nowMs);
    const listing = new EngineListing({ index: this.#index, blockTokens, maxBlocks: 1e6, renaming: undefined, lies });
    const told = () =>
      pages(
        [...held.copies].flatMap(([hash, copies]) => Array<bigint>(copies).fill(hash)),
        'GPU',
        'kv',
        size,
      );
    const publisher = this.#publisherOf(isForeign ? undefined : told, isForeign ? 20 : 50, () => act());
    const say = (...events: KvEvent[]): void => publisher.publish(events, 'kv', this.result);
    const act = (): void => {
      if (this.#isQuiet) return;
      const prompt = this.#prompt();
      const known = prompt.findIndex((hash) => !held.copies.has(hash));
      // Now and then a block is computed once more, by a request that ran beside the first one.
      const from = known === -1 || this.#random() < 0.1 ? Math.floor(this.#random() * prompt.length) : known;
      const events: KvEvent[] = [stored(prompt.slice(from), from === 0 ? null : prompt[from - 1]!, 'GPU', blockTokens)];
      for (const hash of prompt.slice(0, from)) if (held.copies.has(hash)) held.add(hash, 0);
      for (const hash of prompt.slice(from)) held.add(hash);
      const gone: bigint[] = [];
      for (const [hash, copies] of held.copies) {
        if (held.copies.size - gone.length <= held.most) break;
        if (copies === 1) gone.push(hash);
        else held.copies.set(hash, copies);
      }
      for (const hash of gone) held.drop(hash, this.nowMs);
      // A second copy goes by itself.
      for (const [hash, copies] of held.copies) {
        if (copies === 1 || this.#random() < 0.5) continue;
        held.copies.set(hash, copies - 1);
        gone.push(hash);
      }
      if (gone.length > 0) events.push(removed(gone, 'GPU'));
      say(...events);
    };
    const clear = (): void => held.clear(this.nowMs);
    const reset = (): void => {
      clear();
      say({ type: 'AllBlocksCleared' });
    };
    const follower = new SimFollower(this, publisher, listing, this.#options.isDeaf);
    this.#members.push({ publisher, follower, act, restart: clear, reset });
    const source = (): number | undefined => listing.ranks()[0]?.[0]?.source;
    this.#claims.push({ name, medium: mediumNumbers.gpu, held, source, isWhole: !isForeign });
  }

  #addNode(name: string): void {
    const size = pageSize * this.#scale;
    const arena = new Held(50 * this.#scale);
    const disk = new Held(90 * this.#scale);
    const lies = new Lies(name, this.#lies, silent, () => this.nowMs);
    let follower: SimFollower | undefined;
    const teller: Teller = { resync: () => follower?.resync() };
    const common = { index: this.#index, blockTokens, maxBlocks: 1e6, shared: this.#shared };
    const listing = new NodeListing({ ...common, teller, lies });
    const held = function* (this: void) {
      yield* pages(arena.copies.keys(), 'CPU', nodeTopic, size);
      yield* pages(disk.copies.keys(), 'DISK', nodeTopic, size);
      yield* pages(shared.copies.keys(), 'REDIS', nodeTopic, size);
    };
    const shared = this.#sharedHeld;
    const publisher = this.#publisherOf(held, 50, () => act());
    const say = (...events: KvEvent[]): void => publisher.publish(events, nodeTopic, this.result);
    const move = (
      held: Held,
      medium: string,
      hashes: readonly bigint[],
      tell: (...events: KvEvent[]) => void,
    ): void => {
      const fresh = hashes.filter((hash) => !held.copies.has(hash));
      for (const hash of fresh) held.add(hash);
      const gone = [...held.copies.keys()].slice(0, Math.max(0, held.copies.size - held.most));
      for (const hash of gone) held.drop(hash, this.nowMs);
      if (fresh.length > 0) tell(stored(fresh, null, medium, 0));
      if (gone.length > 0) tell(removed(gone, medium));
    };
    const act = (): void => {
      if (this.#isQuiet) return;
      const prompt = this.#prompt();
      move(arena, 'CPU', prompt, say);
      if (this.#random() < 0.7) move(disk, 'DISK', prompt, say);
      if (this.#random() < 0.3) move(shared, 'REDIS', prompt, (...events) => this.#sayShared(events));
    };
    const restart = (): void => {
      arena.clear(this.nowMs);
      for (const { events } of held()) say(...events);
    };
    const reset = (): void => {
      disk.clear(this.nowMs);
      say({ type: 'AllBlocksCleared', medium: 'DISK' });
    };
    follower = new SimFollower(this, publisher, listing, this.#options.isDeaf);
    this.#members.push({ publisher, follower, act, restart, reset });
    const source = (): number | undefined => listing.partOf(namespace)?.source;
    for (const [medium, held] of [
      [mediumNumbers.cpu, arena],
      [mediumNumbers.disk, disk],
    ] as const)
      this.#claims.push({ name, medium, held, source, isWhole: true });
    if (this.#claims.some(({ name }) => name === 'shared')) return;
    const sharedSource = (): number | undefined => {
      const parts = this.#members
        .flatMap((_, i) => this.#tellers[i] ?? [])
        .flatMap((one) => this.#shared.partsOf(one, namespace));
      return parts[0]?.source;
    };
    this.#tellers.push(teller);
    this.#claims.push({
      name: 'shared',
      medium: mediumNumbers.redis,
      held: shared,
      source: sharedSource,
      isWhole: true,
    });
  }

  /**
   * Beside an engine that hashes otherwise: what is in memory is told with its tokens, unless it was brought from elsewhere, what is on its
   * disk is not.
   */
  #addForeignNode(name: string, brought: number): void {
    const [arena, disk] = [new Held(50 * this.#scale), new Held(90 * this.#scale)];
    const lies = new Lies(name, this.#lies, silent, () => this.nowMs);
    const common = { index: this.#index, blockTokens, maxBlocks: 1e6, shared: this.#shared };
    const names = this.#foreignNames;
    const listing = new NodeListing({ ...common, teller: { resync: () => undefined }, lies, names });
    const told = (hashes: Iterable<bigint>): KvEvent[] => {
      const runs: { readonly parent: bigint | null; readonly hashes: bigint[]; readonly tokens: number[] }[] = [];
      for (const hash of hashes) {
        const { parent, tokens } = this.#blocks.get(hash)!;
        const run = runs.at(-1);
        if (run === undefined || run.hashes.at(-1) !== parent)
          runs.push({ parent, hashes: [hash], tokens: [...tokens] });
        else {
          run.hashes.push(hash);
          run.tokens.push(...tokens);
        }
      }
      return runs.map(({ parent, hashes, tokens }) => stored(hashes, parent, 'CPU', blockTokens, tokens));
    };
    const held = function* (this: void) {
      yield { events: told(arena.copies.keys()), topic: nodeTopic };
      yield* pages(disk.copies.keys(), 'DISK', nodeTopic, pageSize);
    };
    const publisher = this.#publisherOf(held, 50, () => act());
    const say = (...events: KvEvent[]): void => publisher.publish(events, nodeTopic, this.result);
    const act = (): void => {
      if (this.#isQuiet) return;
      const prompt = this.#prompt();
      for (const [held, medium] of [[arena, 'CPU'] as const, [disk, 'DISK'] as const]) {
        const fresh = prompt.filter((hash) => !held.copies.has(hash));
        for (const hash of fresh) held.add(hash);
        const gone = [...held.copies.keys()].slice(0, Math.max(0, held.copies.size - held.most));
        for (const hash of gone) held.drop(hash, this.nowMs);
        const isBare = medium === 'DISK' || (brought > 0 && this.#random() < brought);
        if (fresh.length > 0) say(...(isBare ? [stored(fresh, null, medium, 0)] : told(fresh)));
        if (gone.length > 0) say(removed(gone, medium));
      }
    };
    const restart = (): void => {
      arena.clear(this.nowMs);
      for (const { events } of held()) say(...events);
    };
    const reset = (): void => {
      arena.clear(this.nowMs);
      say({ type: 'AllBlocksCleared', medium: 'CPU' });
    };
    const follower = new SimFollower(this, publisher, listing, this.#options.isDeaf, true);
    this.#members.push({ publisher, follower, act, restart, reset });
    const source = (): number | undefined => listing.partOf(namespace)?.source;
    const nameOf = (hash: bigint): bigint => this.#blocks.get(hash)!.name;
    for (const [medium, held] of [
      [mediumNumbers.cpu, arena],
      [mediumNumbers.disk, disk],
    ] as const)
      this.#claims.push({ name, medium, held, source, isWhole: false, nameOf });
  }

  readonly #tellers: Teller[] = [];

  /** What changes in a shared tier is told by all nodes. */
  #sayShared(events: readonly KvEvent[]): void {
    for (const { publisher } of this.#members.slice(6, 9)) publisher.publish(events, nodeTopic, this.result);
  }

  #publisherOf(
    held: (() => Iterable<{ events: readonly KvEvent[]; topic: string }>) | undefined,
    bufferSteps: number,
    meanwhile: () => void,
  ): SimPublisher {
    return new SimPublisher({ clock: this, random: this.#random, bufferSteps, held, meanwhile });
  }

  #checkBound(): void {
    const { bytes } = this.#index.stats();
    this.result.mostBytes = Math.max(this.result.mostBytes, bytes);
    if (bytes > this.#maxBytes) this.#fail(`${bytes} bytes, bound ${this.#maxBytes}`);
    if (this.#names.bytes > namesBytes) this.#fail(`names take ${this.#names.bytes} bytes, bound ${namesBytes}`);
  }

  #checkStale(): void {
    for (const { name, medium, held, source, nameOf = asTold } of this.#claims) {
      const number = source();
      if (number === undefined) continue;
      for (const [hash, atMs] of held.droppedAtMs) {
        if (!this.#credits(nameOf(hash), number, medium)) continue;
        const staleMs = this.nowMs - atMs;
        this.result.worstStaleMs = Math.max(this.result.worstStaleMs, staleMs);
        if (staleMs > mostStaleMs) this.#fail(`${name} is credited with a block ${staleMs} ms after it dropped it`);
      }
    }
  }

  #checkQuiet(): void {
    this.result.quietPoints++;
    this.#index.checkIntegrity();
    for (const { name, medium, held, source, isWhole, nameOf = asTold } of this.#claims) {
      const number = source();
      for (const hash of held.copies.keys()) {
        this.result.compared++;
        const isCredited = number !== undefined && this.#credits(nameOf(hash), number, medium);
        if (nameOf !== asTold) this.result.renamedHeld++;
        if (nameOf !== asTold && isCredited) this.result.renamedCredited++;
        if (!isCredited && isWhole && !this.#options.isTight)
          this.#fail(`${name} is not credited with a block on ${medium}`);
      }
      for (const hash of held.droppedAtMs.keys()) {
        this.result.compared++;
        if (number !== undefined && this.#credits(nameOf(hash), number, medium))
          this.#fail(`${name} is credited with a block on ${medium} that it dropped`);
      }
    }
  }

  #credits(hash: bigint, source: number, medium: number): boolean {
    const [low, high] = [Number(BigInt.asIntN(32, hash)), Number(BigInt.asIntN(32, hash >> 32n))];
    return ((this.#index.holdersOf(low, high)[source]! >> medium) & 1) === 1;
  }

  #fail(what: string): void {
    this.result.failure ??= `at ${this.nowMs - 1_200_000} ms: ${what}`;
  }
}

const asTold = (hash: bigint): bigint => hash;
const silent = { info: () => undefined, warn: () => undefined };

const hashOf = (chain: number, place: number): bigint =>
  BigInt.asUintN(64, BigInt(chain * 64 + place + 1) * 0x9e37_79b9_7f4a_7c15n);

const stored = (
  blockHashes: readonly bigint[],
  parentBlockHash: bigint | null,
  medium: string,
  blockSize: number,
  tokenIds: readonly number[] = [],
): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes, parentBlockHash, tokenIds, blockSize },
  ...{ loraId: null, loraName: null, medium },
});
const removed = (blockHashes: readonly bigint[], medium: string): KvEvent => ({
  type: 'BlockRemoved',
  blockHashes,
  medium,
});

/** All of it at once, in small pages; of what changes while they are taken, what is there when each is made. */
function* pages(hashes: Iterable<bigint>, medium: string, topic: string, size: number) {
  let page: bigint[] = [];
  for (const hash of hashes) {
    if (page.push(hash) < size) continue;
    yield { events: [stored(page, null, medium, 0)], topic };
    page = [];
  }
  if (page.length > 0) yield { events: [stored(page, null, medium, 0)], topic };
}
