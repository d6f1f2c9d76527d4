/**
 * The index of one model, fed by the events of all its workers and of the cache nodes beside them.
 *
 *     engine ──events──▶ EngineListing ┐
 *     node   ──events──▶ NodeListing   ├──▶ KvIndex ◀── match: what each worker has at hand, what its node can fetch from others
 *     what was sent ──▶ History (where nothing tells: reliance.ts) ┘              (questions.ts)
 *
 * A worker's blocks are its engine's, those of the node beside it, and of the shared tiers that this node reaches. Invariants: a worker whose events
 * cannot be relied on is credited with what it was sent, never with what they said before; how that stands is told in `state`, in
 * metrics and in one line for each change, which is a warning unless it has just been seen for the first time; no turn deals with more than a slice of events.
 */
import type { EventAccess, EventSource, NodeRecord } from '@kvtier/config';
import { ChainHasher, type HashAlgorithm } from '@kvtier/identity';
import { type Keys, KvIndex, type KvIndexStats, type Match } from '../kv-index.ts';
import { EngineListing } from './engine-listing.ts';
import { EngineStreams } from './engine-streams.ts';
import { type FollowedWorker, type NodeEntry, ranksOf, sourcesOf, type WorkerEntry } from './followed.ts';
import { FollowedStream, type Subscribe } from './followed-stream.ts';
import { ForeignNames } from './foreign-names.ts';
import { Learning } from './learning.ts';
import { type FeedLog, LieCounts, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';
import { NodeListing } from './node-listing.ts';
import { Questions } from './questions.ts';
import { Reliance } from './reliance.ts';
import { SharedBlocks } from './shared-blocks.ts';
import { subscribeWith } from './subscribe.ts';
import { addBreaks, type FeedTotals, noBreaks } from './totals.ts';
import { Turns } from './turns.ts';
import { matchView, WindowLooks, type WorkerView } from './views.ts';

export interface IndexFeedOptions {
  /** Of the index, and of the names of blocks beside it. */
  readonly maxBytes: number;
  /** Some engines hash otherwise than we do: a part of the bytes is for the names of their blocks. Default: true. */
  readonly isTranslating?: boolean;
  readonly blockTokens: number;
  /** How prompts are hashed, for engines that hash otherwise. Default: vLLM's default, sha256_cbor with its default seed. */
  readonly hashAlgorithm?: HashAlgorithm;
  readonly hashSeed?: string | undefined;
  readonly logger: FeedLog;
  /** How long what was sent stands for what is held, where nothing tells. */
  readonly guessMs?: number;
  /** How publishers on other hosts may be read; default: not at all. */
  readonly access?: EventAccess | undefined;
  readonly subscribe?: Subscribe;
  /** Seconds, in place of both clocks: the one that is never set, and Unix time. */
  readonly now?: () => number;
}

export interface FeedMatch extends Match {
  /** How many blocks more its node can fetch from other nodes, and the number of that medium. */
  readonly remoteBlocks: number;
  readonly remoteMedium: number;
}

export interface FeedMember {
  readonly name: string;
  /** Why its events do not tell what it holds, and what to do; undefined: they do. */
  readonly why: string | undefined;
  readonly lagS: number;
}

export interface FeedState {
  readonly index: KvIndexStats;
  /** Of the index and the names. */
  readonly maxBytes: number;
  /** Of the translation of foreign hashes, beside the index. */
  readonly namesBytes: number;
  /** `why`: it is credited with what it was sent, not with what it holds. */
  readonly workers: readonly FeedMember[];
  /** Those that are said to publish. `why`: it is credited with nothing. */
  readonly nodes: readonly FeedMember[];
  /** Since the feed was made, of publishers that it follows no more, too. */
  readonly totals: FeedTotals;
}

/** Of the bytes where blocks are translated: a name takes 50 to 60, and the index 32 for each block that several workers may hold. */
const namesShare = 5 / 8;
const tickMs = 250;
const sweepRecords = 8_192;
/** A worker's pool may hold blocks of several groups, and blocks twice; it has tiers of its own, too. */
const poolSlack = 16;

export class IndexFeed {
  readonly #options: IndexFeedOptions;
  #maxBytes: number;
  readonly #index: KvIndex;
  readonly #names: NamesBudget;
  /** Left out as there was no room for their names. */
  #leftOutBlocks = 0;
  /** Left out as nobody knows their tokens. */
  #unnamedBlocks = 0;
  /** Of publishers that are followed no more. */
  readonly #pastBreaks = noBreaks();
  readonly #hasher: ChainHasher;
  readonly #foreign: ForeignNames;
  readonly #subscribe: Subscribe;
  readonly #lies = new LieCounts();
  readonly #turns = new Turns();
  readonly #shared: SharedBlocks;
  readonly #workers = new Map<number, WorkerEntry>();
  readonly #nodes = new Map<string, NodeEntry>();
  readonly #timer: NodeJS.Timeout;
  readonly #learning: Learning;
  readonly #reliance: Reliance;
  readonly #questions: Questions;

  /** KvError CONFIG: `maxBytes` too small, block tokens that cannot be hashed. */
  constructor(options: IndexFeedOptions) {
    const { blockTokens, hashAlgorithm = 'sha256_cbor', hashSeed: rootSeed } = options;
    this.#options = options;
    this.#maxBytes = options.maxBytes;
    const { names, index: maxBytes } = this.#sharesOf(options.maxBytes);
    this.#names = new NamesBudget(names);
    this.#subscribe = options.subscribe ?? subscribeWith(options.access ?? { curve: undefined, trustedNetwork: false });
    // Only an engine's pool holds a block several times; tiers may be told of one twice, and hold it once.
    this.#index = new KvIndex({ maxBytes, countedMedia: 1 << mediumNumbers.gpu });
    this.#hasher = new ChainHasher({ algorithm: hashAlgorithm, blockTokens, rootSeed });
    this.#foreign = new ForeignNames({
      ...{ hasher: this.#hasher, blockTokens, maxBlocks: this.#mostBlocks, budget: this.#names },
      isHeld: (low, high) => this.#index.isHeldByAny(low, high),
    });
    this.#shared = new SharedBlocks(this.#index, this.#mostBlocks, this.#changed);
    this.#questions = new Questions(this.#workers, this.#nodes, this.#shared, blockTokens);
    this.#learning = new Learning(this.#index, this.#turns);
    this.#reliance = new Reliance({
      ...{ index: this.#index, shared: this.#shared, logger: options.logger, guessMs: options.guessMs },
      ...{ nowS: () => this.#nowS(), onChange: this.#changed },
    });
    this.#timer = setInterval(() => this.#tick(), tickMs).unref();
  }

  /** Another bound from now on. False: more than that is taken, and the feed has to be made anew. */
  resize(maxBytes: number): boolean {
    const { names, index } = this.#sharesOf(maxBytes);
    const before = this.#names.maxBytes;
    if (!this.#names.resize(names)) return false;
    if (!this.#index.resize(index)) {
      this.#names.resize(before);
      return false;
    }
    this.#maxBytes = maxBytes;
    this.#foreign.resize(this.#mostBlocks);
    return true;
  }

  /** All workers of the model, now. What is not among them is forgotten. */
  follow(workers: readonly FollowedWorker[]): void {
    this.#followNodes(workers);
    const numbers = new Set(workers.map(({ number }) => number));
    for (const [number, entry] of this.#workers) if (!numbers.has(number)) this.#unfollow(number, entry);
    for (const worker of workers) {
      const known = this.#workers.get(worker.number);
      if (known !== undefined && !isSame(known.followed, worker)) this.#unfollow(worker.number, known);
      const entry = this.#workers.get(worker.number) ?? this.#followWorker(worker);
      entry.followed = worker;
      entry.node = worker.node && this.#nodes.get(worker.node.name);
    }
    this.#questions.changed();
    this.#look();
  }

  /** What each of these workers has at hand of a prompt, from its first block on. Numbers that are not followed have nothing. */
  match(keys: Keys, numbers: readonly number[]): FeedMatch[] {
    const before = this.#index.looseSteps;
    const { targets, views, pools } = this.#questions.of(numbers);
    const matches = this.#index.match(keys, targets);
    const looks = new WindowLooks(this.#index, keys, views.filter((view) => view !== undefined).length);
    const found: FeedMatch[] = [];
    for (let i = 0; i < numbers.length; i++) {
      const view = views[i];
      const { blocks, byMedium } = view === undefined ? matches[i]! : matchView(this.#index, keys, view, looks);
      let most = pools[i]!.length === 0 ? 0 : keys.length / 2;
      for (const pool of pools[i]!) most = Math.min(most, matches[pool]!.blocks);
      const remoteBlocks = most > blocks ? most - blocks : 0;
      found.push({ blocks, byMedium, remoteBlocks, remoteMedium: mediumNumbers.peer });
    }
    this.#learning.met(keys, this.#index.looseSteps - before);
    return found;
  }

  /** What some of these workers hold is guessed. */
  guesses(numbers: readonly number[]): boolean {
    for (const number of numbers) if (this.#workers.get(number)?.why !== undefined) return true;
    return false;
  }

  /** What any node can fetch of a prompt, from other nodes and from shared tiers: blocks, and the slowest medium of these. */
  elsewhere(keys: Keys): { readonly blocks: number; readonly medium: number } {
    const nobody = { blocks: 0, byMedium: new Int32Array() };
    const most = this.#index
      .match(keys, this.#questions.anywhere())
      .reduce((a, b) => (b.blocks > a.blocks ? b : a), nobody as Match);
    // What lies in another node's memory or on its disk comes from a peer.
    const slowest = most.byMedium.findLastIndex((blocks) => blocks > 0);
    return { blocks: most.blocks, medium: Math.max(slowest, mediumNumbers.peer) };
  }

  /** A request with these blocks went to this worker. */
  sent(number: number, keys: Keys): void {
    const entry = this.#workers.get(number);
    if (entry === undefined || keys.length === 0) return;
    if (entry.history !== undefined) entry.history.sent(keys, this.#nowS() * 1_000);
    else this.#reliance.sent(entry, keys);
  }

  state(): FeedState {
    const index = this.#index.stats();
    const breaks = { ...this.#pastBreaks };
    for (const { stream } of [...this.#workers.values(), ...this.#nodes.values()])
      if (stream !== undefined) addBreaks(breaks, stream.breaks);
    const droppedBlocks = index.droppedBlocks + this.#leftOutBlocks;
    const memberOf = (name: string, { why, stream }: WorkerEntry | NodeEntry): FeedMember => ({
      ...{ name, why: why && (why.remedy === undefined ? why.what : `${why.what}: ${why.remedy}`) },
      lagS: stream?.lagS ?? 0,
    });
    return {
      index,
      maxBytes: this.#maxBytes,
      namesBytes: this.#names.bytes,
      workers: [...this.#workers.values()].map((entry) => memberOf(entry.followed.record.name, entry)),
      nodes: [...this.#nodes]
        .filter(([, { stream }]) => stream !== undefined)
        .map(([name, entry]) => memberOf(name, entry)),
      totals: { droppedBlocks, unnamedBlocks: this.#unnamedBlocks, lies: { ...this.#lies.byKind }, breaks },
    };
  }

  close(): void {
    clearInterval(this.#timer);
    for (const [number, entry] of this.#workers) this.#unfollow(number, entry);
    this.#followNodes([]);
    this.#learning.close();
  }

  /** More than this of one publisher would be half of all that there is room for. */
  get #mostBlocks(): number {
    return Math.ceil(this.#maxBytes / 48);
  }

  #sharesOf(maxBytes: number): { readonly names: number; readonly index: number } {
    const names = this.#options.isTranslating === false ? 0 : Math.floor(maxBytes * namesShare);
    return { names, index: maxBytes - names };
  }

  #nowS(): number {
    return (this.#options.now ?? steadySeconds)();
  }

  readonly #changed = (): void => this.#questions.changed();

  /** `isPod`: an engine publishes there that is none of ours. `tokens`: its blocks are named anew. */
  #stream(events: EventSource, listing: EngineListing | NodeListing, isPod: boolean, tokens: boolean): FollowedStream {
    return new FollowedStream({
      ...{ events, subscribe: (its) => this.#subscribe(its, isPod), listing, tokens, turns: this.#turns },
      now: () => this.#nowS(),
      wallS: this.#options.now ?? unixSeconds,
      onChange: this.#changed,
    });
  }

  #followWorker(followed: FollowedWorker): WorkerEntry {
    const { record, totalBlocks } = followed;
    const { blockTokens, logger } = this.#options;
    const isForeign = record.kind === 'openai';
    const lies = new Lies(`worker ${record.name}`, this.#lies, logger, () => this.#nowS() * 1_000);
    const maxBlocks = Math.min(totalBlocks ? poolSlack * totalBlocks : this.#mostBlocks, this.#mostBlocks);
    const renaming = isForeign ? { hasher: this.#hasher, budget: this.#names } : undefined;
    const common = { index: this.#index, blockTokens, maxBlocks, renaming, lies, onLeftOut: this.#onLeftOut };
    const listings: EngineListing[] = [];
    const streams = sourcesOf(followed).map((events, i) => {
      listings[i] = new EngineListing(common);
      return this.#stream(events, listings[i], isForeign, isForeign);
    });
    const [first, ...others] = streams;
    const entry: WorkerEntry = {
      ...{ followed, listings, stream: first && new EngineStreams([first, ...others]) },
      ...{ node: undefined, history: undefined, why: undefined, isWarned: false, owed: 0, owedSinceS: 0, view: noView },
    };
    this.#workers.set(followed.number, entry);
    return entry;
  }

  #unfollow(number: number, entry: WorkerEntry): void {
    this.#workers.delete(number);
    this.#leave(entry);
    entry.history?.close();
  }

  #leave({ stream }: WorkerEntry | NodeEntry): void {
    stream?.close();
    if (stream !== undefined) addBreaks(this.#pastBreaks, stream.breaks);
  }

  #followNodes(workers: readonly FollowedWorker[]): void {
    const records = new Map<string, NodeRecord>();
    // One of ours beside a node names its blocks as we do.
    const own = new Set<string>();
    for (const { node, record } of workers) {
      if (node === undefined) continue;
      records.set(node.name, node);
      if (record.kind !== 'openai') own.add(node.name);
    }
    for (const [name, entry] of this.#nodes) {
      const record = records.get(name);
      // All else of it may change while it tells on: whom it fetches from does with each node that comes or goes.
      const isHeard = record !== undefined && JSON.stringify(record.events) === JSON.stringify(entry.record.events);
      if (isHeard && own.has(name) !== (entry.listing?.isRenamed ?? false)) {
        entry.record = record;
        continue;
      }
      this.#nodes.delete(name);
      this.#leave(entry);
    }
    for (const [name, record] of records)
      if (!this.#nodes.has(name)) this.#nodes.set(name, this.#followNode(record, !own.has(name)));
  }

  #followNode(record: NodeRecord, isForeign: boolean): NodeEntry {
    const { blockTokens, logger } = this.#options;
    const lies = new Lies(`cache node ${record.name}`, this.#lies, logger, () => this.#nowS() * 1_000);
    let stream: FollowedStream | undefined;
    const teller = { resync: () => stream?.resync() };
    const listing = new NodeListing({
      ...{ index: this.#index, blockTokens, maxBlocks: this.#mostBlocks, shared: this.#shared, teller, lies },
      ...{ names: isForeign ? this.#foreign : undefined, onChange: this.#changed },
      ...{ onLeftOut: this.#onLeftOut, onUnnamed: this.#onUnnamed },
    });
    stream = record.events === null ? undefined : this.#stream(record.events, listing, false, isForeign);
    return { record, listing, stream, teller, why: undefined, isWarned: false };
  }

  readonly #onLeftOut = (blocks: number): void => {
    this.#leftOutBlocks += blocks;
  };

  readonly #onUnnamed = (blocks: number): void => {
    this.#unnamedBlocks += blocks;
  };

  #look(): void {
    this.#reliance.look(this.#nodes.values(), this.#workers.values());
  }

  #tick(): void {
    this.#look();
    const nowMs = this.#nowS() * 1_000;
    for (const { history } of this.#workers.values()) history?.expire(nowMs);
    this.#index.sweep(sweepRecords);
  }
}

const noView: WorkerView = [[{ sources: [], windowBlocks: undefined }]];
const unixSeconds = (): number => Date.now() / 1_000;
const steadySeconds = (): number => performance.now() / 1_000;

/** Whether what was heard of a worker still holds. */
function isSame(a: FollowedWorker, b: FollowedWorker): boolean {
  const { name, kind, events } = a.record;
  const isRecord = name === b.record.name && kind === b.record.kind;
  const isEpoch = !a.bootEpoch || !b.bootEpoch || a.bootEpoch === b.bootEpoch;
  const isRead = (a.unread === undefined) === (b.unread === undefined);
  return (
    isRecord &&
    isEpoch &&
    isRead &&
    ranksOf(a) === ranksOf(b) &&
    JSON.stringify(events) === JSON.stringify(b.record.events)
  );
}
