/**
 * The index of one model, fed by the events of all its workers and of the cache nodes beside them.
 *
 *     engine ──events──▶ EngineListing ┐
 *     node   ──events──▶ NodeListing   ├──▶ KvIndex ◀── match: what each worker has at hand, what its node can fetch from others
 *     what was sent ──▶ History (where nothing tells) ┘
 *
 * A worker's blocks are its engine's, those of the node beside it, and of the shared tiers that this node reaches. Invariants: a worker whose events
 * cannot be relied on is credited with what it was sent, never with what they said before; how that stands is told in `state`, in
 * metrics and in one line for each change, which is a warning unless it has just been seen for the first time; no turn deals with more than a slice of events.
 */
import type { EventAccess, NodeRecord, WorkerRecord } from '@kvtier/config';
import { ChainHasher, type HashAlgorithm } from '@kvtier/identity';
import { type Keys, KvIndex, type KvIndexStats, type Match } from '../kv-index.ts';
import { type Target, Targets } from '../targets.ts';
import { EngineListing } from './engine-listing.ts';
import { FollowedStream, type Subscribe } from './followed-stream.ts';
import { History } from './history.ts';
import { type FeedLog, LieCounts, type LieKind, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NodeListing } from './node-listing.ts';
import { SharedBlocks } from './shared-blocks.ts';
import { subscribeWith } from './subscribe.ts';
import { Turns } from './turns.ts';
import { type GroupView, matchView, plainTarget, type WorkerView } from './views.ts';

export interface IndexFeedOptions {
  /** Of the index. */
  readonly maxBytes: number;
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
  /** Unix time in seconds. */
  readonly now?: () => number;
}

/** A worker of this model, and what is known of it. */
export interface FollowedWorker {
  /** As routing numbers workers. */
  readonly number: number;
  readonly record: WorkerRecord;
  /** Its record's `node`, where discovery knows it. */
  readonly node: NodeRecord | undefined;
  /** Blocks of its pool; 0 or undefined: not known. */
  readonly totalBlocks?: number;
  /** Another one than before: it holds nothing of what it said. */
  readonly bootEpoch?: string;
  /** First 16 hex digits of the namespace of each of its attention groups: the node tells blocks of all models. Undefined: not known. */
  readonly namespaces?: readonly string[];
}

export interface FeedMatch extends Match {
  /** How many blocks more its node can fetch from other nodes, and the number of that medium. */
  readonly remoteBlocks: number;
  readonly remoteMedium: number;
}

export interface FeedMember {
  readonly name: string;
  /** Why its events do not tell what it holds; undefined: they do. */
  readonly why: string | undefined;
  readonly lagS: number;
}

export interface FeedState {
  readonly index: KvIndexStats;
  readonly maxBytes: number;
  /** Of the translation of foreign hashes, beside the index. */
  readonly namesBytes: number;
  /** `why`: it is credited with what it was sent, not with what it holds. */
  readonly workers: readonly FeedMember[];
  /** `why`: it is credited with nothing. */
  readonly nodes: readonly FeedMember[];
  readonly lies: Readonly<Record<LieKind, number>>;
  readonly gaps: number;
  readonly restarts: number;
  readonly snapshots: number;
}

interface NodeEntry {
  readonly record: NodeRecord;
  readonly listing: NodeListing | undefined;
  readonly stream: FollowedStream | undefined;
  readonly teller: { resync(): void };
  why: string | undefined;
  isWarned: boolean;
}

interface WorkerEntry {
  followed: FollowedWorker;
  readonly listing: EngineListing | undefined;
  readonly stream: FollowedStream | undefined;
  node: NodeEntry | undefined;
  history: History | undefined;
  why: string | undefined;
  /** Of `why`. */
  isWarned: boolean;
  /** Requests with new blocks since its last event, and since when (Unix time in seconds). */
  owed: number;
  owedSinceS: number;
  view: WorkerView;
}

/** What one look at the index asks, for a list of workers. */
interface Asked {
  /** As they were: the caller's list may change. */
  readonly numbers: readonly number[];
  /** One for each of them, then the pools. */
  readonly targets: Targets;
  /** Of those that are not one plain target. */
  readonly views: readonly (WorkerView | undefined)[];
  /** Which target is the pool that each can fetch from; -1: none. */
  readonly pools: readonly number[];
}

const defaultGuessMs = 600_000;
const maxSources = 512;
const tickMs = 250;
/** Blocks of a worker that does not say how many it has. */
const unknownBlocks = 65_536;
/** Events may be late by so much, and requests without any event so many for so long. */
const maxLagS = 5;
/** Connections to one that has just been seen may take so long. */
const joinS = 5;
const maxOwed = 8;
const maxOwedS = 10;
/** A prompt with so many blocks of no known order is worth learning from; so many prompts wait for that. */
const worthLearning = 32;
const maxLearning = 16;
const learnBlocks = 4_096;
const sweepRecords = 8_192;
/** A worker's pool may hold blocks of several groups, and blocks twice; it has tiers of its own, too. */
const poolSlack = 16;

export class IndexFeed {
  readonly #options: IndexFeedOptions;
  readonly #index: KvIndex;
  readonly #hasher: ChainHasher;
  readonly #subscribe: Subscribe;
  readonly #lies = new LieCounts();
  readonly #turns = new Turns();
  readonly #shared: SharedBlocks;
  readonly #workers = new Map<number, WorkerEntry>();
  readonly #nodes = new Map<string, NodeEntry>();
  readonly #timer: NodeJS.Timeout;
  readonly #learning: Keys[] = [];
  #isLearning = false;
  #isStale = false;
  /** By the caller's own list of workers, until something changes. */
  #asked = new WeakMap<readonly number[], Asked>();
  /** Namespace → all that other nodes can fetch. */
  readonly #pools = new Map<string, Target>();

  /** KvError CONFIG: `maxBytes` too small, block tokens that cannot be hashed. */
  constructor(options: IndexFeedOptions) {
    const { maxBytes, blockTokens, hashAlgorithm = 'sha256_cbor', hashSeed: rootSeed } = options;
    this.#options = options;
    this.#subscribe = options.subscribe ?? subscribeWith(options.access ?? { curve: undefined, trustedNetwork: false });
    // Only an engine's pool holds a block several times; tiers may be told of one twice, and hold it once.
    this.#index = new KvIndex({ maxBytes, maxSources, countedMedia: 1 << mediumNumbers.gpu });
    this.#hasher = new ChainHasher({ algorithm: hashAlgorithm, blockTokens, rootSeed });
    this.#shared = new SharedBlocks(this.#index, this.#mostBlocks, this.#changed);
    this.#timer = setInterval(() => this.#tick(), tickMs).unref();
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
    this.#isStale = true;
    this.#look();
  }

  /** What each of these workers has at hand of a prompt, from its first block on. Numbers that are not followed have nothing. */
  match(keys: Keys, numbers: readonly number[]): FeedMatch[] {
    if (this.#isStale) this.#review();
    const before = this.#index.looseSteps;
    const { targets, views, pools } = this.#askedOf(numbers);
    const matches = this.#index.match(keys, targets);
    const found: FeedMatch[] = [];
    for (let i = 0; i < numbers.length; i++) {
      const view = views[i];
      const { blocks, byMedium } = view === undefined ? matches[i]! : matchView(this.#index, keys, view);
      const most = matches[pools[i]!]?.blocks ?? 0;
      const remoteBlocks = most > blocks ? most - blocks : 0;
      found.push({ blocks, byMedium, remoteBlocks, remoteMedium: mediumNumbers.peer });
    }
    if (this.#index.looseSteps - before >= worthLearning) this.#learn(keys);
    return found;
  }

  /** What some of these workers hold is guessed. */
  guesses(numbers: readonly number[]): boolean {
    for (const number of numbers) if (this.#workers.get(number)?.why !== undefined) return true;
    return false;
  }

  /** What any node can fetch of a prompt, from other nodes and from shared tiers: blocks, and the slowest medium of these. */
  elsewhere(keys: Keys): { readonly blocks: number; readonly medium: number } {
    if (this.#isStale) this.#review();
    const namespaces = new Set([...this.#pools.keys(), ...this.#shared.namespaces]);
    const targets = [...namespaces].map((namespace) => ({
      sources: [
        ...(this.#pools.get(namespace)?.sources ?? []),
        ...this.#shared.all(namespace).map(({ source }) => source),
      ],
    }));
    const nobody = { blocks: 0, byMedium: new Int32Array() };
    const most = this.#index.match(keys, targets).reduce((a, b) => (b.blocks > a.blocks ? b : a), nobody as Match);
    // What lies in another node's memory or on its disk comes from a peer.
    const slowest = most.byMedium.findLastIndex((blocks) => blocks > 0);
    return { blocks: most.blocks, medium: Math.max(slowest, mediumNumbers.peer) };
  }

  /** A request with these blocks went to this worker. */
  sent(number: number, keys: Keys): void {
    const entry = this.#workers.get(number);
    if (entry === undefined || keys.length === 0) return;
    if (entry.history !== undefined) entry.history.sent(keys, this.#nowS() * 1_000);
    else {
      if (entry.owed++ === 0) entry.owedSinceS = this.#nowS();
    }
  }

  state(): FeedState {
    const streams = [...this.#workers.values(), ...this.#nodes.values()].map(({ stream }) => stream?.stats());
    const sum = (which: 'gaps' | 'restarts' | 'snapshots'): number =>
      streams.reduce((total, stats) => total + (stats?.[which] ?? 0), 0);
    const memberOf = (name: string, { why, stream }: WorkerEntry | NodeEntry): FeedMember => ({
      ...{ name, why },
      lagS: stream?.lagS ?? 0,
    });
    return {
      index: this.#index.stats(),
      maxBytes: this.#options.maxBytes,
      namesBytes: [...this.#workers.values()].reduce((bytes, { listing }) => bytes + (listing?.bytes ?? 0), 0),
      workers: [...this.#workers.values()].map((entry) => memberOf(entry.followed.record.name, entry)),
      nodes: [...this.#nodes].map(([name, entry]) => memberOf(name, entry)),
      lies: { ...this.#lies.byKind },
      ...{ gaps: sum('gaps'), restarts: sum('restarts'), snapshots: sum('snapshots') },
    };
  }

  close(): void {
    clearInterval(this.#timer);
    for (const [number, entry] of this.#workers) this.#unfollow(number, entry);
    this.#followNodes([]);
    this.#learning.length = 0;
  }

  /** More than this of one publisher would be half of all that there is room for. */
  get #mostBlocks(): number {
    return Math.ceil(this.#options.maxBytes / 48);
  }

  #nowS(): number {
    return (this.#options.now ?? unixSeconds)();
  }

  readonly #changed = (): void => {
    this.#isStale = true;
  };

  #stream(
    events: WorkerRecord['events'],
    listing: EngineListing | NodeListing,
    tokens: boolean,
  ): FollowedStream | undefined {
    if (events === null) return undefined;
    return new FollowedStream({
      ...{ events, subscribe: this.#subscribe, listing, tokens, turns: this.#turns },
      now: () => this.#nowS(),
      onChange: this.#changed,
    });
  }

  #followWorker(followed: FollowedWorker): WorkerEntry {
    const { record, totalBlocks } = followed;
    const { blockTokens, logger } = this.#options;
    const isForeign = record.kind === 'openai';
    const lies = new Lies(`worker ${record.name}`, this.#lies, logger, () => this.#nowS() * 1_000);
    const maxBlocks = Math.min(totalBlocks ? poolSlack * totalBlocks : this.#mostBlocks, this.#mostBlocks);
    const hasher = isForeign ? this.#hasher : undefined;
    const listing = new EngineListing({ index: this.#index, blockTokens, maxBlocks, hasher, lies });
    const entry: WorkerEntry = {
      ...{ followed, listing, stream: this.#stream(record.events, listing, isForeign) },
      ...{ node: undefined, history: undefined, why: undefined, isWarned: false, owed: 0, owedSinceS: 0, view: noView },
    };
    this.#workers.set(followed.number, entry);
    return entry;
  }

  #unfollow(number: number, entry: WorkerEntry): void {
    this.#workers.delete(number);
    entry.stream?.close();
    entry.history?.close();
  }

  #followNodes(workers: readonly FollowedWorker[]): void {
    const records = new Map(workers.flatMap(({ node }) => (node ? [[node.name, node] as const] : [])));
    for (const [name, entry] of this.#nodes) {
      if (JSON.stringify(records.get(name)) === JSON.stringify(entry.record)) continue;
      this.#nodes.delete(name);
      entry.stream?.close();
    }
    for (const [name, record] of records) if (!this.#nodes.has(name)) this.#nodes.set(name, this.#followNode(record));
  }

  #followNode(record: NodeRecord): NodeEntry {
    const { blockTokens, logger } = this.#options;
    const lies = new Lies(`cache node ${record.name}`, this.#lies, logger, () => this.#nowS() * 1_000);
    let stream: FollowedStream | undefined;
    const teller = { resync: () => stream?.resync() };
    const common = { index: this.#index, blockTokens, maxBlocks: this.#mostBlocks };
    const listing = new NodeListing({ ...common, shared: this.#shared, teller, lies });
    stream = this.#stream(record.events, listing, false);
    return { record, listing, stream, teller, why: undefined, isWarned: false };
  }

  #tick(): void {
    this.#look();
    const nowMs = this.#nowS() * 1_000;
    for (const { history } of this.#workers.values()) history?.expire(nowMs);
    this.#index.sweep(sweepRecords);
  }

  /** Who can be relied on now. */
  #look(): void {
    for (const entry of this.#nodes.values()) {
      const why = entry.stream === undefined ? 'publishes no KV events' : problemOf(entry.stream);
      this.#say(`cache node ${entry.record.name}`, entry, why, 'nothing of it is counted');
    }
    for (const entry of this.#workers.values()) {
      const why = this.#whyGuessed(entry);
      this.#say(`worker ${entry.followed.record.name}`, entry, why, 'what it holds is guessed from what it was sent');
      if (why === undefined) {
        entry.history?.close();
        entry.history = undefined;
      } else if (entry.history === undefined) {
        const { totalBlocks } = entry.followed;
        const options = { maxBlocks: totalBlocks || unknownBlocks, ttlMs: this.#options.guessMs ?? defaultGuessMs };
        entry.history = new History(this.#index, options, this.#nowS() * 1_000);
      }
    }
  }

  #whyGuessed(entry: WorkerEntry): string | undefined {
    const { stream } = entry;
    if (stream === undefined) return 'publishes no KV events';
    const problem = problemOf(stream);
    if (problem !== undefined) return problem;
    if (stream.heardS >= entry.owedSinceS) entry.owed = 0;
    const isSilent = entry.owed >= maxOwed && this.#nowS() - entry.owedSinceS > maxOwedS;
    return isSilent ? `no KV event although it was sent ${maxOwed} requests` : undefined;
  }

  #say(who: string, entry: NodeEntry | WorkerEntry, why: string | undefined, so: string): void {
    const isNew = entry.why !== why;
    const joiningS = entry.stream?.joiningS ?? Number.POSITIVE_INFINITY;
    const isWarning = why !== undefined && joiningS >= joinS;
    if (!isNew && (entry.isWarned || !isWarning)) return;
    const { logger } = this.#options;
    if (why === undefined) logger.info({ who }, `${who}: its KV events tell what it holds`);
    else if (!isWarning) logger.info({ who, why }, `${who}: ${why} yet; ${so}`);
    else logger.warn({ who, why }, `${who}: ${why}${isNew ? '' : ` for ${joinS} s`}; ${so}`);
    entry.isWarned = isWarning;
    entry.why = why;
    this.#isStale ||= isNew;
  }

  /** What is asked of the index for these workers. */
  #askedOf(numbers: readonly number[]): Asked {
    const known = this.#asked.get(numbers);
    if (known?.numbers.length === numbers.length && known.numbers.every((number, i) => number === numbers[i]))
      return known;
    const namespaces = [...this.#pools.keys()];
    const entries = numbers.map((number) => this.#workers.get(number));
    const plain = entries.map((entry) => entry && plainTarget(entry.view));
    const asked: Asked = {
      numbers: [...numbers],
      targets: new Targets([...plain.map((target) => target ?? nothing), ...this.#pools.values()]),
      views: entries.map((entry, i) => (plain[i] === undefined ? entry?.view : undefined)),
      pools: entries.map((entry, i) => {
        const namespace = entry && plain[i] && this.#namespacesOf(entry)[0];
        const pool = namespace === undefined ? none : namespaces.indexOf(namespace);
        return pool === none ? none : numbers.length + pool;
      }),
    };
    this.#asked.set(numbers, asked);
    return asked;
  }

  #review(): void {
    this.#isStale = false;
    this.#asked = new WeakMap();
    for (const entry of this.#workers.values()) entry.view = this.#viewOf(entry);
    this.#pools.clear();
    for (const { record, listing, why } of this.#nodes.values()) {
      if (record.peer === null || why !== undefined) continue;
      for (const namespace of listing?.namespaces ?? []) {
        const sources = [...(this.#pools.get(namespace)?.sources ?? []), listing!.partOf(namespace)!.source];
        this.#pools.set(namespace, { sources });
      }
    }
  }

  #viewOf(entry: WorkerEntry): WorkerView {
    const { listing, history, node } = entry;
    const namespaces = this.#namespacesOf(entry);
    const beside = (group: number): readonly number[] => {
      const namespace = namespaces[group];
      if (namespace === undefined || node === undefined || node.why !== undefined) return [];
      const own = node.listing?.partOf(namespace);
      return [...(own ? [own] : []), ...this.#shared.partsOf(node.teller, namespace)].map(({ source }) => source);
    };
    const guessed = history?.sources;
    const ranks = guessed === undefined && listing !== undefined ? listing.ranks() : [];
    const groupCount = Math.max(1, namespaces.length, ...ranks.map((groups) => groups.length));
    return (ranks.length > 0 ? ranks : [[]]).map((parts) =>
      Array.from({ length: groupCount }, (_, group): GroupView => {
        const part = parts[group];
        const tokens = part?.window.tokens;
        return {
          sources: [...(guessed ?? (part ? [part.source] : [])), ...beside(group)],
          windowBlocks:
            tokens === undefined ? undefined : Math.max(1, Math.ceil((tokens - 1) / this.#options.blockTokens)),
        };
      }),
    );
  }

  /** Of its attention groups. Not known: the only one that its node has told of. */
  #namespacesOf({ followed, node }: WorkerEntry): readonly string[] {
    if (followed.namespaces !== undefined) return followed.namespaces;
    const told = new Set([...(node?.listing?.namespaces ?? []), ...(node ? this.#shared.namespaces : [])]);
    return told.size === 1 ? [...told] : [];
  }

  #learn(keys: Keys): void {
    if (this.#learning.length >= maxLearning) return;
    this.#learning.push(keys);
    if (!this.#isLearning) void this.#learnAll();
  }

  async #learnAll(): Promise<void> {
    this.#isLearning = true;
    for (let keys = this.#learning.shift(); keys; keys = this.#learning.shift()) {
      for (let at = 0; at < keys.length; at += 2 * learnBlocks) {
        await this.#turns.next();
        this.#index.learn(keys.subarray(at, at + 2 * learnBlocks), at === 0 ? 'root' : keys.subarray(at - 2, at));
      }
    }
    this.#isLearning = false;
  }
}

const nothing: Target = { sources: [] };
const none = -1;
const noView: WorkerView = [[{ sources: [], windowBlocks: undefined }]];
const unixSeconds = (): number => Date.now() / 1_000;

function problemOf(stream: FollowedStream): string | undefined {
  if (stream.problem !== undefined) return stream.problem;
  return stream.lagS > maxLagS ? `its KV events are more than ${maxLagS} s late` : undefined;
}

/** Whether what was heard of a worker still holds. */
function isSame(a: FollowedWorker, b: FollowedWorker): boolean {
  const { name, kind, events } = a.record;
  const isRecord = name === b.record.name && kind === b.record.kind;
  const isEpoch = !a.bootEpoch || !b.bootEpoch || a.bootEpoch === b.bootEpoch;
  return isRecord && isEpoch && JSON.stringify(events) === JSON.stringify(b.record.events);
}
