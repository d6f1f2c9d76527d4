/**
 * One seed, one world: two to four cache nodes and their engines, with everything that the world does to them. Real: the store, the
 * arena tier, the disk tier, the Redis and S3 tiers but for their sockets, codecs, policies, breakers, quotas, the formats. Model: disks,
 * servers, networks, engines, the session link (its engines use `Holdings`, step by step), LZ4's threads, the connections between
 * peers, what Redis's scripts do. Steps and batches of the store are a few blocks, so that much happens between two of one call.
 *
 *     chaos: engines work, faults come and go ──▶ calm: faults end, engines finish ──▶ proof: every node stores and loads again ──▶ end
 *
 * Checked after every event: budgets, queues (law 3); often: contents of leases (1), index = contents (6); by every call: right
 * bytes (1), time limits (2), each thing ends once (5); at the end: progress (2), nothing is left (5); law 4 by counting.
 */
import { type HashKey, headerBytes } from '@kvtier/identity';
import type { Ticket } from '@kvtier/placement';
import type { TierChange } from '@kvtier/tiers';
import { loadSdk } from '@kvtier/tiers/s3/testing';
import { checkBounds, checkBudgets, checkWaits } from './budgets.ts';
import { chainOf, contentOf, shortName, spaces } from './contents.ts';
import { SimulatedEngine } from './engine.ts';
import { Faults } from './faults.ts';
import { arenaBytes, drawPlan, SimNode, s3PackBytes, s3PackCount } from './node.ts';
import { install, type Servers } from './platform.ts';
import { VirtualArenas } from './virtual-arena.ts';
import { VirtualCodec } from './virtual-codec.ts';
import { VirtualDisks } from './virtual-disk.ts';
import { PeerNetwork } from './virtual-peers.ts';
import { VirtualRedis } from './virtual-redis.ts';
import { VirtualS3 } from './virtual-s3.ts';
import { LongTurn, Violation, World } from './world.ts';

export interface SimOptions {
  readonly seed: number;
  /** Events of the chaos. */
  readonly steps?: number;
  readonly verbose?: boolean;
  /** Only these faults, by name; default: all. */
  readonly faults?: readonly string[];
  /** What every node has below its arena; default: drawn. */
  readonly tiers?: readonly string[];
}

export interface SimResult {
  readonly seed: number;
  /** Undefined: no law was broken. */
  readonly failure: string | undefined;
  /** Events until then, or in all. */
  readonly steps: number;
  /** The same for the same seed. */
  readonly digest: string;
  /** What happened how often. */
  readonly tally: Readonly<Record<string, number>>;
  /** The last lines of what happened; all of them if `verbose`. */
  readonly lines: readonly string[];
}

export const defaultSteps = 2_500;
const maxNodes = 4;
const calmUs = 40_000_000;
/** Ends are whole seconds, rounded up by the timer that removes what is over; batch by batch. */
const lateBoundMs = 2_000;
const closeLimitUs = 30_000_000;
/** What a command to Redis may have beside names of blocks: keys, numbers. Half of the smallest payload there is. */
const controlBytes = Math.min(...spaces.map(({ payloadBytes }) => payloadBytes)) / 2;

/** A long turn counts when the same world has one again: what is the product's own is there each time, what else the machine does is not. */
export async function simulate(options: SimOptions): Promise<SimResult> {
  const { result, error } = await simulateOnce(options);
  return error instanceof LongTurn ? (await simulateOnce(options)).result : result;
}

async function simulateOnce(options: SimOptions): Promise<{ result: SimResult; error: unknown }> {
  await loadSdk(); // by real time, so not within the world
  const world = new World(options.seed, options.verbose === true ? Number.POSITIVE_INFINITY : 30);
  const arenas = new VirtualArenas(world);
  const servers = {
    arenas,
    disks: new VirtualDisks(world, arenas),
    redis: new VirtualRedis(world, arenas),
    s3: new VirtualS3(world),
    codec: new VirtualCodec(world, arenas),
  };
  const simulation = new Simulation(world, servers, options);
  const onRejection = (error: unknown): void => simulation.report(error);
  process.on('unhandledRejection', onRejection);
  const uninstall = install(world, servers);
  let failure: string | undefined;
  let error: unknown;
  try {
    await simulation.run(options.steps ?? defaultSteps);
  } catch (thrown) {
    error = thrown;
    failure = thrown instanceof Violation ? thrown.message : String((thrown as Error).stack ?? thrown);
  } finally {
    uninstall();
    process.off('unhandledRejection', onRejection);
  }
  const result = {
    ...{ seed: options.seed, failure, steps: world.steps, digest: world.digest.toString(16).padStart(8, '0') },
    tally: simulation.tally(),
    lines: world.lines,
  };
  return { result, error };
}

class Simulation {
  readonly #world: World;
  readonly #servers: Servers;
  readonly #network: PeerNetwork;
  readonly #options: SimOptions;
  readonly #nodes: SimNode[];
  readonly #engines = new Set<SimulatedEngine>();
  readonly #committed = new Set<string>();
  readonly #ends = new Map<string, number>();
  readonly #tickets: Ticket[] = [];
  readonly #tally: Record<string, number> = {};
  #failure: unknown;
  #faults: Faults | undefined;
  #isCalm = false;

  constructor(world: World, servers: Servers, options: SimOptions) {
    this.#options = options;
    this.#world = world;
    this.#servers = servers;
    this.#network = new PeerNetwork(world);
    const report = (error: unknown): void => this.report(error);
    servers.s3.report = report;
    this.#nodes = Array.from({ length: world.between(2, maxNodes) }, (_, number) => {
      const node = new SimNode(
        world,
        drawPlan(world, number, options.tiers),
        servers.arenas.create(arenaBytes),
        this.#network,
        report,
      );
      node.onUp = () => {
        for (let count = world.between(1, 3); count > 0; count--) this.#engineComes(node);
      };
      return node;
    });
  }

  /** The first one counts. */
  report(error: unknown): void {
    this.#failure ??= error;
  }

  tally(): Readonly<Record<string, number>> {
    const { redis, s3, disks, codec } = this.#servers;
    const out: Record<string, number> = { ...this.#tally };
    const add = (prefix: string, counts: Readonly<Record<string, number>>): void => {
      for (const [name, count] of Object.entries(counts)) out[prefix + name] = (out[prefix + name] ?? 0) + count;
    };
    for (const node of this.#nodes) {
      add('tier.', node.counts());
      out.boots = (out.boots ?? 0) + node.boots;
    }
    add('fault.', this.#faults?.counts ?? {});
    add('redis.', redis.counts);
    add('s3.', s3.counts);
    add('codec.', codec.counts);
    add('peer.', this.#network.counts);
    for (const disk of disks.disks.values()) add('disk.', disk.counts);
    return out;
  }

  async run(steps: number): Promise<void> {
    const world = this.#world;
    for (const node of this.#nodes) node.boot(world.between(1, 50) * 1000);
    this.#faults = new Faults(world, this.#nodes, this.#servers, this.#network, this.#options.faults);
    while (world.steps < steps) await this.#step();
    await this.#calm();
    await this.#prove();
    await this.#close();
  }

  #engineComes(node: SimNode): void {
    if (this.#isCalm || node.state !== 'up') return;
    const world = this.#world;
    const engine = new SimulatedEngine({
      ...{ node, space: world.pick(spaces), committed: this.#committed, ends: this.#ends, tickets: this.#tickets },
      ...{ tenant: world.pick(['', '', 'small']), ttlS: world.chance(0.15) ? world.between(1, 2) : 0 },
      report: (error) => this.report(error),
      onDied: (where) => this.#engineComes(where),
      tally: (what, count = 1) => {
        this.#tally[what] = (this.#tally[what] ?? 0) + count;
      },
    });
    this.#engines.add(engine);
  }

  async #step(): Promise<boolean> {
    const world = this.#world;
    const went = await world.step();
    if (this.#failure !== undefined) throw this.#failure;
    checkBudgets(this.#nodes, this.#servers);
    if (world.steps % 8 === 0) checkBounds(this.#up(), this.#live());
    if (world.steps % 16 === 0) for (const engine of this.#live()) engine.check();
    if (world.steps % 64 === 0) this.#checkIndexes();
    return went;
  }

  /** Until the condition holds; law 2 if it does not within the time. */
  async #until(what: string, limitUs: number, holds: () => boolean): Promise<void> {
    const world = this.#world;
    const endUs = world.nowUs + limitUs;
    while (!holds()) {
      if (world.nowUs > endUs) throw new Violation(`law 2: ${what}, still not after ${limitUs / 1e6} s`);
      if (!(await this.#step())) throw new Violation(`law 2: ${what}, and nothing will happen any more`);
    }
  }

  #live(): SimulatedEngine[] {
    for (const engine of this.#engines) if (engine.isDead) this.#engines.delete(engine);
    return [...this.#engines];
  }

  #up(): SimNode[] {
    return this.#nodes.filter(({ state }) => state === 'up');
  }

  /** Law 6: the index is what the tiers hold, block by block, and what they told; what waits to end is what is held (law 3). */
  #checkIndexes(): void {
    for (const { store } of this.#up()) store.checkIntegrity();
    this.#checkEnds();
    checkWaits(this.#up(), this.#live());
  }

  /** What is over has left the tiers that are a node's own. */
  #checkEnds(): void {
    for (const { name, arena, lower, isClockWrong, upSinceMs } of this.#up()) {
      if (isClockWrong) continue;
      const disk = lower.find((each) => each.name === 'disk');
      for (const tier of disk === undefined ? [arena] : [arena, disk]) {
        const end = tier.follow(({ namespace, hashes }) => {
          for (const hash of hashes) {
            // What ended while the node was down, or the disk's device out of service, goes when it is back.
            const backMs = (tier === disk ? disk.toldSinceMs(namespace!, hash) : undefined) ?? 0;
            const endMs = this.#ends.get(namespace!.key + hash) ?? Number.POSITIVE_INFINITY;
            const lateMs = this.#world.nowMs - Math.max(endMs, upSinceMs, backMs);
            if (lateMs > lateBoundMs)
              throw new Violation(`law 1: ${name}: the ${tier.name} holds a block ${lateMs} ms after its time to live`);
          }
        });
        end();
      }
    }
  }

  /** Faults end, engines finish what they have begun: everything comes back (law 5), tiers come back (law 2). */
  async #calm(): Promise<void> {
    const world = this.#world;
    world.note('CALM');
    this.#faults!.stop();
    this.#isCalm = true;
    for (const engine of this.#live()) engine.quiet();
    await this.#until('nodes do not come back', calmUs, () => this.#up().length === this.#nodes.length);
    await this.#until('engines do not finish', calmUs, () => this.#live().every(({ isDone }) => isDone));
    for (const engine of this.#live()) engine.holdings.end();
    this.#engines.clear();
    const isWell = (): boolean =>
      this.#up().every(({ store }) =>
        store.stats().tiers.every(({ inService, breaker }) => inService && breaker !== 'open'),
      );
    await this.#until('tiers do not come back', calmUs, isWell);
    const gauges = [
      ...['fetch.inflight_bytes', 'namespaces.open', 'arena.pinned_blocks', 'touch.pending_blocks', 'await.blocks'],
      ...['disk', 'redis', 's3', 'peer'].map((tier) => `writedown.${tier}.pending_bytes`),
    ];
    const left = (): string[] =>
      this.#up().flatMap(({ store, name }) => {
        const { counters } = store.stats();
        return gauges
          .filter((gauge) => (counters[gauge] ?? 0) !== 0)
          .map((gauge) => `${name} ${gauge} ${counters[gauge]}`);
      });
    await this.#until('leases, pins or slots are left', calmUs, () => left().length === 0).catch((error: unknown) => {
      if (error instanceof Violation && left().length > 0)
        throw new Violation(`law 5: left behind: ${left().join(', ')}`);
      throw error;
    });
    this.#checkIndexes();
    await this.#checkPeers();
  }

  /** Nothing changes any more: every node comes to know what its peers hold (law 6). */
  async #checkPeers(): Promise<void> {
    let why = '';
    const agree = (): boolean => {
      why = '';
      for (const { name, peers } of this.#up()) {
        const said = peers?.disagreement() ?? '';
        if (said !== '') why = `${name}: ${said}`;
      }
      return why === '';
    };
    await this.#until('peers are not seen as they are', calmUs, agree).catch((error: unknown) => {
      throw why === '' ? error : new Violation(`law 6: peers are not seen as they are: ${why}`);
    });
  }

  /** Law 2: once the world is kind, every node stores, and loads what it has stored, from its tiers; soon, if not at once. */
  async #prove(): Promise<void> {
    this.#world.note('PROOF');
    for (const node of this.#up()) {
      let why = '';
      for (let attempt = 0; attempt < 40; attempt++) {
        why = await this.#proveOnce(node, attempt);
        if (why === '') break;
        this.#world.note(`${node.name} not yet: ${why}`);
        await this.#pass(1_000_000);
      }
      if (why !== '') throw new Violation(`law 2: ${node.name}: ${why}`);
      // Every slot comes back: what is left are blocks, and these can go.
      const bytes = (): number => {
        this.#empty(node);
        return node.arena.stats().bytes;
      };
      await this.#until(`${node.name}: bytes of the arena belong to nobody`, calmUs, () => bytes() === 0);
      this.#checkIndexes();
    }
    this.#checkControl();
    await this.#checkBucket();
    await this.#checkDirectory();
  }

  /** Nothing is written any more: every node comes to know the bucket as it is (law 6), and what is not ours is still there. */
  async #checkBucket(): Promise<void> {
    const { s3 } = this.#servers;
    const nodes = this.#up().filter(({ plan }) => plan.tiers.includes('s3'));
    const isKnown = (): boolean =>
      nodes.every(({ lower }) => {
        const { bytes, detail } = lower.find(({ name }) => name === 's3')!.stats();
        return detail?.packs === s3.packCount && bytes === s3.takenSlots(s3PackCount) * s3PackBytes;
      });
    await this.#until('the bucket is not seen as it is', calmUs, isKnown);
    s3.checkForeign();
    const corrupt = nodes.reduce((sum, node) => sum + (node.counts()['s3.corrupt'] ?? 0), 0);
    if (corrupt > s3.counts.flips)
      throw new Violation(`law 1: s3: ${corrupt} blocks were corrupt, with ${s3.counts.flips} damaged bytes`);
  }

  /** Law 6: every node lists what the directory has, whatever past the server had. */
  async #checkDirectory(): Promise<void> {
    const nodes = this.#up().filter(({ plan }) => plan.tiers.includes('redis'));
    const listed = (): number[] => nodes.map(({ lower }) => lower.find(({ name }) => name === 'redis')!.stats().blocks);
    const isKnown = (): boolean => listed().every((count) => count === (this.#servers.redis.ledger?.count ?? 0));
    await this.#until('the directory in redis is not seen as it is', calmUs, isKnown).catch((error: unknown) => {
      const blocks = this.#servers.redis.ledger?.blocks ?? new Map<string, string>();
      const differences = nodes.map((node) => {
        const names = new Set<string>();
        const add = ({ namespace, hashes }: TierChange): void => {
          for (const hash of hashes) names.add(namespace!.key + hash);
        };
        node.lower.find(({ name }) => name === 'redis')!.follow(add)();
        const lacks = [...blocks].flatMap(([name, entry]) => (names.has(name) ? [] : [entry]));
        const invents = [...names]
          .filter((name) => !blocks.has(name))
          .map((name) => shortName(name.slice(32) as HashKey));
        return `${node.name} lacks [${lacks}] and lists besides [${invents}]`;
      });
      throw new Violation(`${(error as Error).message}: ${differences.join('; ')}`);
    });
  }

  /** One chain there and back. Returns what did not work, '' if all did. */
  async #proveOnce(node: SimNode, attempt: number): Promise<string> {
    const world = this.#world;
    const { namespace, payloadBytes } = spaces[0]!;
    const { store, arena, plan } = node;
    const holdings = store.open(namespace, payloadBytes, 16);
    const chain = chainOf(100 + plan.number * 100 + attempt, 0, 0, 5);
    let loaded: number | undefined;
    let why = '';
    await world.runAs(node.life, () => {
      const answers = holdings.reserve(null, chain);
      const slots = answers.flatMap(({ slot }) => slot ?? []);
      if (slots.length < chain.length) why = `nothing can be stored: ${answers.map(({ reason }) => reason).join(' ')}`;
      for (const [at, slot] of slots.entries()) {
        contentOf(namespace, chain[at]!).payload.copy(node.memory, slot + headerBytes);
        this.#committed.add(namespace.key + chain[at]!);
      }
      holdings.commit(
        slots,
        slots.map((_, at) => contentOf(namespace, chain[at]!).checksum),
      );
    });
    const isWriting = (): boolean =>
      Object.entries(store.stats().counters).some(([name, count]) => name.endsWith('.pending_bytes') && count > 0);
    await this.#until(`${node.name} does not write down`, calmUs, () => !isWriting());
    for (const { name, inner } of node.lower) {
      const held = inner.lookup(namespace, chain);
      const mustHold = plan.plans[name]?.write === 'through' && plan.plans[name].ttlSeconds === undefined;
      if (name !== 'peer' && mustHold && held < chain.length) why ||= `${name} took ${held} of ${chain.length} blocks`;
    }
    arena.remove(namespace, chain, 'evicted');
    const { held } = store.lookup(holdings.state, chain);
    await world.runAs(node.life, () =>
      holdings.load(1n, chain, 10_000, {
        onReady: () => {},
        onDone: (count, reason) => {
          loaded = count;
          if (count < held) why ||= `${count} of ${held} blocks came back: ${reason}`;
        },
      }),
    );
    await this.#until(`${node.name}: a load does not end`, calmUs, () => loaded !== undefined);
    this.#tally['proof.blocks'] = (this.#tally['proof.blocks'] ?? 0) + loaded!;
    await world.runAs(node.life, () => holdings.end());
    return why;
  }

  async #pass(us: number): Promise<void> {
    const endUs = this.#world.nowUs + us;
    await this.#until('time stands still', 2 * us, () => this.#world.nowUs >= endUs);
  }

  #empty({ arena }: SimNode): void {
    const held: TierChange[] = [];
    arena.follow((change) => held.push(change))();
    for (const change of held) if (change.kind === 'stored') arena.remove(change.namespace, change.hashes, 'evicted');
  }

  /** Law 4: what travels as commands are names, and what is said of them; beside these there is no room for a payload. */
  #checkControl(): void {
    const { mostBesideNames } = this.#servers.redis;
    if (mostBesideNames > controlBytes)
      throw new Violation(`law 4: a command to redis has ${mostBesideNames} bytes beside the names in it`);
  }

  /** Nodes close within their time and leave nothing: no timer, no file lock. */
  async #close(): Promise<void> {
    const world = this.#world;
    world.note('CLOSE');
    for (const node of this.#up()) {
      let closed = false;
      await world.runAs(node.life, () => {
        node.store.close().then(
          () => {
            closed = true;
          },
          (error: unknown) => this.report(error),
        );
      });
      node.state = 'down';
      await this.#until(`${node.name} does not close`, closeLimitUs, () => closed);
      // Time limits of what has ended run out by themselves.
      await this.#until(
        `${node.name} leaves timers behind`,
        2 * closeLimitUs,
        () => world.pending(node.life).length === 0,
      );
      this.#network.hosts.delete(node.plan.number);
      node.end();
    }
    const locks = [...this.#servers.disks.disks.values()].reduce((sum, disk) => sum + disk.locks.size, 0);
    if (locks > 0) throw new Violation(`law 5: ${locks} folders are still locked`);
  }
}
