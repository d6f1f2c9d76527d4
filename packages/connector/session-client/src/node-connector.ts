/**
 * The connector to a cache node: the `Connector` port over a session (session-client.ts), with the executor's copies.
 *
 * Invariants (the port's): nothing throws at the scheduler, nothing waits without a deadline, each callback fires
 * exactly once and never from inside the call. Blocks in flight are bounded; what exceeds the bound is not stored. Stores
 * take turns (store-turns.ts).
 */
import { invariant } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import { LoadPlanner } from '@kvtier/load-planner';
import type { ArrivedLoad, AwaitedLoad, ByTier, Connector, LoadResult, Match, StoreOptions } from '@kvtier/scheduler';
import { maxHashesPerFrame, type StatsResult } from '@kvtier/wire';
import { AwaitedGroups } from './awaited-groups.ts';
import { type ConnectorCounters, count, newCounters } from './counters.ts';
import { columnsWithin, type GroupPart, groupWindows, partsOf } from './groups.ts';
import { type LoadJudge, type LoadOutcome, LoadRun } from './load.ts';
import { MatchTable } from './matches.ts';
import { Prefetches } from './prefetches.ts';
import { type ConnectorLogger, type Session, SessionClient } from './session-client.ts';
import { runStore, type StoreOutcome } from './store.ts';
import { StoreTurns } from './store-turns.ts';
import { realTimers, type Timers } from './timers.ts';

export interface ConnectorOptions {
  /** Unix socket of the cache node. */
  readonly socketPath: string;
  /** The node may be of another user, if its socket's folder is of this group; default: only of our own, or root. */
  readonly group?: number | null | undefined;
  /** Where this process sees the folder of the node's arena; default: where the node sees it. */
  readonly arenaDir?: string | undefined;
  readonly executor: Pick<Executor, 'kv' | 'attachArena' | 'detachArena' | 'exportBlocks' | 'importBlocks'>;
  /**
   * 32-byte namespace digest: everything that two engines must have in common to share a block. One per attention group,
   * in the order of `executor.kv.groups`; a model of full attention has one group.
   */
  readonly namespace: Uint8Array | readonly Uint8Array[];
  /** 32 for sha256*, 16 for xxhash*. */
  readonly hashBytes: number;
  /** Who pays for this engine's blocks; default: "". */
  readonly tenant?: string;
  /** Its blocks are removed so long after they were committed; default 0: never. */
  readonly ttlSeconds?: number;
  /** No load takes longer, whatever it saves. */
  readonly loadDeadlineMs: number;
  /** always: what the node holds is loaded, also where computing would be faster; default: planned. */
  readonly loads?: 'planned' | 'always' | 'halves';
  /** A lookup that takes longer counts as a miss; default: a share of the time to compute what it asks for. */
  readonly lookupDeadlineMs?: number;
  /** Blocks that may be on their way out at a time, those that wait for their turn included. */
  readonly maxStoreBlocks?: number;
  readonly logger: ConnectorLogger;
  /** A match that was pending is known. */
  readonly onWake: () => void;
  /** Blocks, by tier, that the node holds for a request and that are rather computed: to load them would have taken so long. */
  readonly onPassed?: ((byTier: ByTier, us: number) => void) | undefined;
  readonly timers?: Timers;
}

export interface NodeConnector extends Connector {
  readonly counters: Readonly<ConnectorCounters>;
  /** Attached, but the node does not answer and is left alone until it does. */
  readonly suspended: boolean;
  /** The node's own statistics; null when it is away or slow. */
  stats(deadlineMs?: number): Promise<StatsResult | null>;
}

const defaultMaxStoreBlocks = 4_096;
/** When closing, stores in flight may take this long to be confirmed. */
const drainDeadlineMs = 2_000;

export function createConnector(options: ConnectorOptions): NodeConnector {
  return new CacheNodeConnector(options);
}

class CacheNodeConnector implements NodeConnector {
  readonly counters: ConnectorCounters = newCounters();
  readonly #options: ConnectorOptions;
  readonly #timers: Timers;
  readonly #planner: LoadPlanner;
  readonly #matches: MatchTable;
  /** One per attention group. */
  readonly #clients: readonly SessionClient[];
  readonly #windows: readonly number[];
  readonly #prefetches = new Prefetches(this.counters);
  /** Loads of what other engines compute, by request. */
  readonly #awaited = new Map<string, AwaitedGroups>();
  /** All other loads, by request. */
  readonly #runs = new Map<string, LoadRun[]>();
  /** When the last copy ended. */
  #copiedAtMs = Number.NEGATIVE_INFINITY;
  readonly #stores = new StoreTurns();
  readonly #maxStoreBlocks: number;
  #storingBlocks = 0;
  #closing = false;

  constructor(options: ConnectorOptions) {
    const { kv } = options.executor;
    this.#options = options;
    this.#timers = options.timers ?? realTimers;
    this.#maxStoreBlocks = options.maxStoreBlocks ?? defaultMaxStoreBlocks;
    this.#planner = new LoadPlanner(kv.blockTokens, options.loadDeadlineMs, options.loads);
    this.#windows = groupWindows(kv);
    const namespaces = options.namespace instanceof Uint8Array ? [options.namespace] : options.namespace;
    invariant(this.#windows.length === namespaces.length, 'connector: one namespace per attention group');
    this.#matches = new MatchTable({
      windows: this.#windows,
      hashBytes: options.hashBytes,
      lookupDeadlineMs: options.lookupDeadlineMs,
      planner: this.#planner,
      timers: this.#timers,
      counters: this.counters,
      onWake: options.onWake,
      onPassed: options.onPassed,
    });
    this.#clients = namespaces.map(
      (namespace, group) =>
        new SessionClient({
          ...options,
          namespace,
          payloadBytes: kv.blockBytes,
          blockTokens: kv.blockTokens,
          timers: this.#timers,
          counters: group === 0 ? this.counters : newCounters(), // all go to one node: it is counted once
        }),
    );
  }

  get attached(): boolean {
    return this.#sessions !== null;
  }

  get epoch(): bigint | undefined {
    return this.#clients[0]!.session?.link.epoch;
  }

  get suspended(): boolean {
    return this.#clients.some(({ suspended }) => suspended);
  }

  get storingBlocks(): number {
    return this.#storingBlocks;
  }

  get storeRoom(): number {
    return this.#maxStoreBlocks - this.#storingBlocks;
  }

  match(requestId: string, hashes: Buffer, localBlocks: number, isIdle = false): Match {
    return this.#matches.match(this.#sessions, requestId, hashes, localBlocks, isIdle);
  }

  renew(requestId: string, hashes: Buffer): void {
    this.#matches.renew(this.#sessions, requestId, hashes);
  }

  load(
    requestId: string,
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onDone: (result: LoadResult) => void,
    onArrived?: (load: ArrivedLoad) => boolean,
    awaited?: AwaitedLoad,
    hasHead?: () => boolean,
  ): void {
    const { executor, hashBytes } = this.#options;
    const blocks = blockIds.length / this.#windows.length;
    invariant((firstBlock + blocks) * hashBytes <= hashes.length, 'load: more blocks than hashes');
    const startedAtMs = this.#timers.nowMs();
    const sessions = this.#sessions;
    const parts = partsOf(blockIds, this.#windows.length);
    if (sessions === null || parts.length === 0) {
      if (blocks > 0 && sessions === null) count(this.counters, 'load', 'no session');
      const loaded = sessions === null ? 0 : blocks;
      this.#matches.settle(
        requestId,
        this.#windows.map(() => firstBlock + loaded),
        loaded === blocks,
      );
      const reason = loaded < blocks ? 'no session' : '';
      queueMicrotask(() => onDone({ loaded, byTier: {}, elapsedUs: 0, ...(awaited && { reason }) }));
      return;
    }
    this.counters.loads++;
    this.#prefetches.superseded(requestId);
    const plan = this.#matches.planned(requestId, firstBlock, blocks);
    const head = plan?.head ?? 0;
    const deadlineMs = awaited?.deadlineMs ?? this.#planner.deadlineMs(head + blocks, firstBlock - head);
    const groups = awaited && new AwaitedGroups(this.#windows, blocks);
    const runs: LoadRun[] = [];
    if (groups) this.#awaited.set(requestId, groups);
    else this.#runs.set(requestId, runs);
    const outcomes = new Map<GroupPart, LoadOutcome>();
    const ended = (): void => {
      const elapsedUs = Math.round((this.#timers.nowMs() - startedAtMs) * 1_000);
      const { loaded, byTier, ends } = together(outcomes, blocks);
      let withStep = false;
      let isGivenUp = false;
      for (const outcome of outcomes.values()) {
        isGivenUp ||= outcome.isGivenUp;
        withStep ||= outcome.withStep;
        this.counters.loadedBlocks += outcome.loaded;
        this.counters.loadedBytes += outcome.loaded * executor.kv.blockBytes;
      }
      this.counters.loadUs += elapsedUs;
      // A load that failed early says nothing about speed, nor does one that a step was part of; one that was given up as too slow does.
      const saysSpeed = loaded === blocks || isGivenUp || elapsedUs > (plan?.loadUs ?? 0);
      if (plan !== undefined && !withStep && saysSpeed) {
        this.#planner.observeLoad(plan, loaded, elapsedUs, this.#timers.nowMs());
      }
      const chainEnds = this.#windows.map((_, group) => {
        const end = ends.get(group);
        return end === undefined ? undefined : firstBlock + end;
      });
      this.#matches.settle(requestId, chainEnds, loaded === blocks);
      if (groups && this.#awaited.get(requestId) === groups) this.#awaited.delete(requestId);
      if (this.#runs.get(requestId) === runs) this.#runs.delete(requestId);
      onDone({ loaded, byTier, elapsedUs, ...(groups && { reason: loaded < blocks ? groups.reason : '' }) });
    };
    const judge: LoadJudge | undefined =
      plan === undefined || awaited || this.#windows.length > 1
        ? undefined
        : {
            afterMs: this.#planner.judgeAfterMs(blocks, firstBlock),
            goOn: (ready, elapsedMs) =>
              hasHead?.() || this.#planner.isWorthWaiting(ready, blocks, firstBlock, elapsedMs, this.#timers.nowMs()),
            began: (elapsedMs) => {
              if (plan.away.blocks === blocks) this.#planner.observeStart(elapsedMs * 1_000);
            },
          };
    for (const part of parts) {
      const context = {
        judge,
        session: sessions[part.group]!,
        executor,
        timers: this.#timers,
        counters: this.counters,
        onCopied: (copied: number, startedAtMs: number) => this.#copied(copied, startedAtMs),
        onArrived: this.#windows.length === 1 ? onArrived : undefined,
        awaited: awaited && groups?.patienceOf(part, awaited),
      };
      const wanted = hashes.subarray((firstBlock + part.from) * hashBytes, (firstBlock + blocks) * hashBytes);
      const run = new LoadRun(context, wanted, part.blockIds, deadlineMs, (outcome) => {
        outcomes.set(part, outcome);
        groups?.ended(part, outcome);
        if (outcomes.size === parts.length) ended();
      });
      groups?.add(part, run);
      runs.push(run);
    }
  }

  /** Copies of several loads run one after the other: what one waits for those before it says nothing of how fast they are. */
  #copied(blocks: number, startedAtMs: number): void {
    const nowMs = this.#timers.nowMs();
    const ranMs = nowMs - Math.max(startedAtMs, this.#copiedAtMs);
    this.#copiedAtMs = nowMs;
    this.#planner.observeCopy(blocks, ranMs * 1_000, nowMs);
  }

  endLoad(requestId: string, blocks: number): void {
    this.#awaited.get(requestId)?.limit(blocks);
    if (blocks === 0) for (const run of this.#runs.get(requestId) ?? []) run.stop();
  }

  store(
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onReleased: () => void,
    { onSettled, tokens }: StoreOptions = {},
  ): void {
    const { hashBytes } = this.#options;
    const groups = this.#windows.length;
    const columns = blockIds.length / groups;
    invariant((firstBlock + columns) * hashBytes <= hashes.length, 'store: more blocks than hashes');
    const sessions = this.#sessions;
    // The first blocks of a chain are worth most: take as many as fit.
    const taken = sessions === null || this.#closing ? 0 : columnsWithin(blockIds, groups, this.storeRoom);
    const parts = partsOf(blockIds, groups, taken);
    const blocks = parts.reduce((sum, part) => sum + part.blockIds.length, 0);
    const left = blockIds.reduce((sum, id) => sum + (id === 0 ? 0 : 1), 0) - blocks;
    if (left > 0) count(this.counters, 'store', sessions === null ? 'no session' : 'too many in flight', left);
    if (sessions === null || blocks === 0) {
      queueMicrotask(() => {
        onReleased();
        onSettled?.(0, sessions !== null && !this.#closing, false);
      });
      return;
    }
    this.counters.stores++;
    this.#storingBlocks += blocks;
    const told = parts.map(({ group, from, blockIds: { length } }) => {
      const isWanted = sessions[group]!.wantsTokenIds && this.#windows[group] === Number.POSITIVE_INFINITY;
      return isWanted ? tokens?.(firstBlock + from, firstBlock + from + length) : undefined;
    });
    this.#stores.add(async () => {
      const all = await this.#runStores(hashes, firstBlock, parts, told, taken, onReleased);
      this.#storingBlocks -= blocks;
      // What was too much at once may be offered again.
      onSettled?.(all.held, all.isBusy || all.isLost || (all.held === taken && taken < columns), all.isLost);
    });
  }

  /** Its turn has come: over the sessions that there are now. `onReleased` is never called from inside. */
  async #runStores(
    hashes: Buffer,
    firstBlock: number,
    parts: readonly GroupPart[],
    told: readonly (Int32Array | undefined)[],
    taken: number,
    onReleased: () => void,
  ): Promise<StoreOutcome> {
    const { executor, hashBytes } = this.#options;
    const sessions = this.#sessions;
    if (sessions === null) {
      await Promise.resolve();
      for (const { blockIds } of parts) count(this.counters, 'store', 'no session', blockIds.length);
      onReleased();
      return { held: 0, isBusy: false, isLost: false };
    }
    let unreleased = parts.length;
    const released = (): void => {
      if (--unreleased === 0) onReleased();
    };
    const stores = parts.map((part, i) => {
      const session = sessions[part.group]!;
      const context = { session, executor, counters: this.counters, blockBytes: executor.kv.blockBytes };
      const at = (firstBlock + part.from) * hashBytes;
      // Behind a window there is nothing in the tier: such a piece begins a chain of its own.
      const isWindow = this.#windows[part.group] !== Number.POSITIVE_INFINITY;
      const parent = isWindow ? hashes.subarray(0, 0) : hashes.subarray(Math.max(0, at - hashBytes), at);
      const wanted = hashes.subarray(at, at + part.blockIds.length * hashBytes);
      return runStore(context, parent, wanted, part.blockIds, released, session.wantsTokenIds ? told[i] : undefined);
    });
    return heldInAll(parts, await Promise.all(stores), taken);
  }

  prefetch(requestId: string, hashes: Buffer, firstBlock: number): void {
    const { hashBytes } = this.#options;
    const wanted = hashes.subarray(firstBlock * hashBytes, (firstBlock + maxHashesPerFrame) * hashBytes);
    if (this.#closing || wanted.length === 0) return;
    for (const [group, session] of (this.#sessions ?? []).entries()) {
      if (this.#windows[group] === Number.POSITIVE_INFINITY) this.#prefetches.begin(requestId, session.link, wanted);
    }
  }

  forget(requestId: string): void {
    this.#matches.forget(requestId);
    this.#prefetches.cancel(requestId);
  }

  observePrefill(tokens: number, positions: number, elapsedUs: number, ofHead = false): void {
    if (ofHead) this.#planner.observeHead(tokens, positions, elapsedUs, this.#timers.nowMs());
    else this.#planner.observePrefill(tokens, positions, elapsedUs);
  }

  async stats(deadlineMs = 200): Promise<StatsResult | null> {
    const call = this.#clients[0]!.session?.link.call({ $case: 'stats', value: {} }, 'stats', deadlineMs);
    return (await call?.catch(() => null)) ?? null;
  }

  async close(): Promise<void> {
    this.#closing = true;
    let cancel = (): void => {};
    const patience = new Promise<void>((resolve) => {
      cancel = this.#timers.after(drainDeadlineMs, resolve);
    });
    await Promise.race([this.#stores.done(), patience]);
    cancel();
    await Promise.all(this.#clients.map((client) => client.close()));
    await this.#stores.done(); // without a session none takes any time
  }

  /** One per group, or null while any is missing: a prefix needs them all. */
  get #sessions(): readonly Session[] | null {
    const sessions = this.#clients.flatMap(({ session }) => session ?? []);
    return sessions.length === this.#clients.length ? sessions : null;
  }
}

/** Blocks, from the first on, of a store of `blocks` blocks that all groups hold which offered them. */
function heldInAll(parts: readonly GroupPart[], outcomes: readonly StoreOutcome[], blocks: number): StoreOutcome {
  let all: StoreOutcome = { held: blocks, isBusy: false, isLost: false };
  for (const [i, { from, blockIds }] of parts.entries()) {
    const { held, isBusy, isLost } = outcomes[i]!;
    if (held < blockIds.length && from + held < all.held) all = { held: from + held, isBusy, isLost };
  }
  return all;
}

interface Together {
  readonly loaded: number;
  readonly byTier: Record<string, number>;
  /** Per group of the load, the block of the row where what came ends. */
  readonly ends: ReadonlyMap<number, number>;
}

/** What several groups' outcomes make of a load of `blocks` blocks: the prefix that all of them have. */
function together(outcomes: ReadonlyMap<GroupPart, LoadOutcome>, blocks: number): Together {
  const ends = new Map<number, number>();
  let loaded = blocks;
  let widest: GroupPart | undefined;
  for (const [part, outcome] of outcomes) {
    const end = part.from + outcome.loaded;
    if (end < blocks) ends.set(part.group, end);
    loaded = Math.min(loaded, end);
    if (widest === undefined || part.from < widest.from) widest = part;
  }
  // By the group that loads most; what no group had to load counts to where its first block came from.
  const byTier: Record<string, number> = {};
  const { tiers } = outcomes.get(widest!)!;
  for (let i = 0; i < loaded && tiers.length > 0; i++) {
    const tier = tiers[Math.max(0, i - widest!.from)]!;
    byTier[tier] = (byTier[tier] ?? 0) + 1;
  }
  return { loaded, byTier, ends };
}
