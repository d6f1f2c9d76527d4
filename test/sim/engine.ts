/**
 * An engine of a world: attaches, looks up, loads with deadlines, waits for what others compute, computes, reserves, writes, commits, prefetches, pins, releases
 * late, and dies at any moment, its copies still under way for a while. It checks whatever it is given.
 */
import { KvError } from '@kvtier/errors';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { type Holdings, type LoadEvents, type LoadReason, type LookupResult, stepping } from '@kvtier/placement';
import { Load } from '@kvtier/placement/testing';
import type { ArenaBlock } from '@kvtier/tiers';
import { chainOf, contentOf, mustHold, shortName } from './contents.ts';
import type { EngineParts } from './engine-parts.ts';
import { EnginePins } from './engine-pins.ts';
import { EngineWrites } from './engine-writes.ts';
import { VirtualSession } from './virtual-session.ts';
import { type Life, Violation, type World } from './world.ts';

/** Timers are exact here: a load ends in the very turn of its deadline. */
const deadlineBoundMs = 1;
const deadlinesMs = [0, 3, 20, 100, 600, 3_000];
/** How long a load waits for what another engine may be computing. */
const awaitsMs = [0, 0, 0, 5, 40, 300];
const families = 12;
const longest = 9;
/** Now and then. */
const veryLong = 24;

interface View {
  readonly hashes: readonly HashKey[];
  readonly blocks: ArenaBlock[];
  /** When the last of them was told, or the load began. */
  toldMs: number;
  readonly awaitMs: number;
  reason: LoadReason | undefined;
}

export class SimulatedEngine {
  readonly parts: EngineParts;
  readonly holdings: Holdings;
  readonly #session: VirtualSession;
  readonly views = new Map<bigint, View>();
  readonly #writes: EngineWrites;
  readonly #pins: EnginePins;
  readonly #world: World;
  /** Of the node that it is attached to. */
  readonly #life: Life;
  #next = 1n;
  #last: readonly HashKey[] = [];
  #quiet = false;
  #dead = false;

  constructor(parts: EngineParts) {
    this.parts = parts;
    this.#world = parts.node.world;
    this.#life = parts.node.life;
    const { namespace, payloadBytes } = parts.space;
    this.holdings = parts.node.store.open(namespace, payloadBytes, 16, { tenant: parts.tenant, ttlS: parts.ttlS });
    const { report, tally } = parts;
    const between = (): void => this.#between();
    this.#session = new VirtualSession({
      world: this.#world,
      life: this.#life,
      holdings: this.holdings,
      report,
      tally,
      between,
    });
    const [holdings, session] = [this.holdings, this.#session];
    this.#pins = new EnginePins(parts, holdings, session);
    this.#writes = new EngineWrites({
      ...{ parts, holdings, session, isDead: () => this.#dead },
      later: (fromMs, toMs, what, fn) => this.#later(fromMs, toMs, what, fn),
    });
    this.#later(1, 30, 'engine thinks', () => this.#act());
  }

  /** It died, or its node did. */
  get isDead(): boolean {
    return this.#dead || !this.#life.alive;
  }

  /** Nothing is under way. */
  get isDone(): boolean {
    return this.views.size === 0 && this.#writes.slots.size === 0 && this.#session.isIdle;
  }

  /** Nothing new begins; what is leased and reserved comes back by itself. */
  quiet(): void {
    this.#quiet = true;
  }

  /** Leases hold what they were given for (law 1), as long as they last. */
  check(): void {
    const { node, space } = this.parts;
    if (this.#dead) return;
    for (const view of this.views.values()) {
      for (const [index, { slot }] of view.blocks.entries()) {
        mustHold(node.memory, slot, space.namespace, view.hashes[index]!, `${node.name}: a lease`);
      }
    }
    this.#writes.check();
    for (const view of this.views.values()) if (view.reason === undefined) this.#checkWait(view);
  }

  /** What a load waits for is not there, and it waits no longer than it said. */
  #checkWait({ hashes, blocks, toldMs, awaitMs }: View): void {
    const { node, space } = this.parts;
    const { awaited } = this.holdings.state;
    const isAwaited = (hash: HashKey): boolean => {
      for (let waiter = awaited.get(hash); waiter !== undefined; waiter = waiter.next) {
        if (waiter.client instanceof Load && waiter.client.hashes === hashes) return true;
      }
      return false;
    };
    for (const hash of hashes.slice(blocks.length)) {
      const block = isAwaited(hash) ? node.arena.get(space.namespace, hash) : undefined;
      if (block?.expiresS === 0) throw new Violation(`law 2: ${shortName(hash)} is awaited, and lies in the arena`);
    }
    const lateMs = this.#world.nowMs - toldMs - awaitMs;
    const next = hashes[blocks.length];
    if (next !== undefined && isAwaited(next) && lateMs > deadlineBoundMs)
      throw new Violation(`law 2: a load waits ${lateMs} ms longer than the ${awaitMs} ms that it may`);
  }

  /** SIGKILL. What it was copying goes on for a moment, until the process is gone; then its slots come back. */
  die(): void {
    if (this.#dead) return;
    this.#dead = true;
    const { node, space, tally } = this.parts;
    tally('engine.died');
    this.#world.note(`${node.name} an engine dies with ${this.#writes.slots.size} slots, ${this.views.size} leases`);
    for (const slot of this.#writes.slots.keys()) {
      const write = (): void =>
        void node.memory.fill(0x77, slot + headerBytes, slot + headerBytes + space.payloadBytes);
      this.#later(0, 40, 'a dying copy', write);
    }
    this.#session.leave();
    this.holdings.disconnect();
    if (!this.holdings.holdsSlots) this.holdings.end();
    else this.#later(41, 150, 'quarantine ends', () => this.holdings.end());
    this.#later(5, 200, 'an engine comes', () => this.parts.onDied(node));
  }

  /** Its session is amidst a call. */
  #between(): void {
    if (this.#quiet || !this.#world.chance(0.04)) return;
    if (this.#world.chance(0.7)) this.die();
    else this.#attachAgain();
  }

  /** Its connection was lost; its next session says that none of its copies goes on, and may be faster than the news of that. */
  #attachAgain(): void {
    this.#dead = true;
    const { node, tally } = this.parts;
    tally('engine.attached again');
    this.#world.note(`${node.name} an engine attaches again, with ${this.#writes.slots.size} slots`);
    this.#session.leave();
    if (this.#world.chance(0.5)) this.holdings.disconnect();
    this.holdings.end();
    this.parts.onDied(node);
  }

  #later(fromMs: number, toMs: number, what: string, fn: () => void): void {
    const guarded = (): void => {
      try {
        fn();
      } catch (error) {
        this.parts.report(error);
      }
    };
    this.#world.schedule(this.#world.between(fromMs * 1000, toMs * 1000), what, guarded, this.#life);
  }

  #act(): void {
    if (this.#dead || this.#quiet) return;
    const world = this.#world;
    const draw = world.random();
    if (draw < 0.55) this.#turn();
    else if (draw < 0.67) this.#prefetch();
    else if (draw < 0.71) this.#cancelPrefetch(this.#next - BigInt(world.between(1, 4)));
    else if (draw < 0.77) this.#pins.pin(this.#some());
    else if (draw < 0.79) this.#pins.showTicket(() => this.#chain());
    else if (draw < 0.82) this.#pins.unpin(this.#some());
    else if (draw < 0.88) this.#lookupAll();
    else if (draw < 0.89) this.die();
    else if (draw < 0.9) this.#attachAgain();
    if (!this.#dead) this.#later(1, world.chance(0.1) ? 150 : 25, 'engine thinks', () => this.#act());
  }

  #chain(): HashKey[] {
    const world = this.#world;
    const fork = world.between(0, longest);
    return chainOf(world.zipf(families), world.zipf(3), fork, world.between(1, world.chance(0.1) ? veryLong : longest));
  }

  /** A request: what is held is loaded, the rest is computed and stored. */
  #turn(): void {
    const chain = this.#chain();
    this.#last = chain;
    this.#session.ask(() => this.#lookup(chain));
  }

  #lookup(chain: readonly HashKey[]): void {
    const { node, tally } = this.parts;
    const { store } = node;
    const { held, spans } = store.lookup(this.holdings.state, chain);
    tally('lookup.blocks', held);
    if (spans.reduce((sum, { count }) => sum + count, 0) !== held)
      throw new Violation('law 6: spans do not sum to held');
    for (const hash of chain.slice(0, held)) this.#mustBeCommitted(hash);
    const awaitMs = this.#world.pick(awaitsMs);
    if (held === 0 && awaitMs === 0) this.#writes.save(chain, 0);
    else this.#session.ask(() => this.#load(chain, awaitMs));
  }

  #lookupAll(): void {
    const chain = this.#chain();
    const { store } = this.parts.node;
    this.#session.askSteps(
      () => store.lookingUpAll(this.holdings.state, chain),
      (found) => this.#found(chain, found),
    );
  }

  #found(chain: readonly HashKey[], { spans, held }: LookupResult): void {
    let at = 0;
    let sum = 0;
    for (const { tier, count } of spans) {
      if (tier !== '') for (const hash of chain.slice(at, at + count)) this.#mustBeCommitted(hash);
      if (tier !== '') sum += count;
      at += count;
    }
    if (sum !== held || at !== chain.length) throw new Violation('law 6: spans of a lookup with gaps do not add up');
  }

  #prefetch(): void {
    const id = this.#next++;
    const chain = this.#chain();
    this.#session.ask(() => {
      const { accepted } = this.holdings.prefetch(id, chain);
      this.parts.tally(accepted ? 'prefetch' : 'prefetch.refused');
    });
  }

  #cancelPrefetch(id: bigint): void {
    this.#session.ask(() => this.holdings.cancelPrefetch(id));
  }

  /** What it has asked for last is there more often than not. */
  #some(): readonly HashKey[] {
    const chain = this.#world.chance(0.3) ? this.#chain() : this.#last;
    return chain.slice(0, this.#world.pick([4, 4, veryLong]));
  }

  #load(chain: readonly HashKey[], awaitMs: number): void {
    const { node, space, tally } = this.parts;
    const world = this.#world;
    const id = this.#next++;
    const deadlineMs = world.pick(deadlinesMs);
    const startMs = world.nowMs;
    const view: View = { hashes: chain, blocks: [], toldMs: startMs, awaitMs, reason: undefined };
    // With no time at all it ends with what is there, and that is looked at over several turns.
    const looksMs = deadlineMs === 0 ? Math.ceil(chain.length / stepping.looked) : 0;
    const dueMs = startMs + deadlineMs + looksMs + deadlineBoundMs;
    const guarded = (fn: () => void): void => {
      try {
        fn();
      } catch (error) {
        this.parts.report(error);
      }
    };
    this.views.set(id, view);
    try {
      const events: LoadEvents = {
        onReady: (first, blocks) =>
          guarded(() => {
            if (this.#dead) throw new Violation('law 5: a dead engine is told of blocks');
            if (first !== view.blocks.length || view.reason !== undefined)
              throw new Violation('law 1: ready out of order');
            for (const [at, block] of blocks.entries()) {
              const hash = chain[first + at]!;
              mustHold(node.memory, block.slot, space.namespace, hash, `${node.name}: a ready block`);
              const endMs = this.parts.ends.get(space.namespace.key + hash)!;
              if (startMs > endMs && !node.isClockWrong)
                throw new Violation(`law 1: ${shortName(hash)} is served ${startMs - endMs} ms after its time to live`);
              if (block.checksum !== contentOf(space.namespace, hash).checksum)
                throw new Violation('law 1: a wrong checksum');
            }
            view.blocks.push(...blocks);
            view.toldMs = world.nowMs;
            tally('load.ready', blocks.length);
          }),
        onDone: (loaded, reason) =>
          guarded(() => {
            if (view.reason !== undefined) throw new Violation('law 2: a load ended twice');
            view.reason = reason;
            tally(`load.${reason === '' ? 'complete' : reason}`);
            world.note(`${node.name} load ended ${loaded}/${chain.length} ${reason}`);
            if (loaded === 0) this.holdings.release(id, []); // so does the server
            if (loaded !== view.blocks.length) throw new Violation('law 1: loaded is not what was ready');
            if (reason === 'awaited' && world.nowMs < view.toldMs + awaitMs - 0.001)
              throw new Violation(`law 2: a load that may wait ${awaitMs} ms ended sooner`);
            if (world.nowMs > dueMs) throw new Violation(`law 2: a load of ${deadlineMs} ms ended later`);
            this.#later(0, world.chance(0.1) ? 300 : 20, 'engine has read', () => this.#loaded(id, view));
          }),
      };
      this.holdings.load(id, chain, deadlineMs, events, awaitMs);
      if (awaitMs > 0 && world.chance(0.1))
        this.#later(0, awaitMs, 'engine ends a load', () => this.#session.ask(() => this.#endLoad(id, view)));
    } catch (error) {
      this.views.delete(id);
      if (error instanceof KvError && error.code === 'BUSY') tally('load.busy');
      else throw error;
      return;
    }
    world.schedule(
      (dueMs - startMs) * 1000,
      'a deadline is over',
      () => {
        if (view.reason === undefined && !this.#dead)
          this.parts.report(new Violation(`law 2: a load of ${deadlineMs} ms has not ended by its deadline`));
      },
      node.life,
    );
  }

  #endLoad(id: bigint, view: View): void {
    const isOpen = this.views.get(id) === view && view.reason === undefined;
    if (this.holdings.endLoad(id) !== isOpen || (isOpen && view.reason === undefined))
      throw new Violation('law 2: a load does not end when it is told to');
    this.parts.tally('load.told to end', isOpen ? 1 : 0);
  }

  #loaded(id: bigint, view: View): void {
    if (this.#dead) return;
    this.check();
    const count = view.blocks.length;
    // Now and then what it copied does not verify in the GPU: it says so.
    const wrong = count > 0 && this.#world.chance(0.03) ? [count - 1] : [];
    this.#session.ask(() => {
      this.views.delete(id);
      if (this.holdings.release(id, wrong) !== count > 0) throw new Violation('law 5: a lease is not there to end');
    });
    if (!this.#quiet) this.#writes.save(view.hashes, view.blocks.length);
  }

  #mustBeCommitted(hash: HashKey): void {
    const { committed, space, node } = this.parts;
    if (!committed.has(space.namespace.key + hash)) {
      throw new Violation(`law 6: ${node.name}: ${shortName(hash)} is held, and nobody ever committed it`);
    }
  }
}
