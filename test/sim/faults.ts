/** What the world does to a cluster: one fault at a time is drawn, most of them last a while, and several overlap. */
import type { SimNode } from './node.ts';
import type { Servers } from './platform.ts';
import type { PeerNetwork } from './virtual-peers.ts';
import type { World } from './world.ts';

export class Faults {
  readonly #world: World;
  readonly #nodes: readonly SimNode[];
  readonly #servers: Servers;
  readonly #network: PeerNetwork;
  /** How to end those that last. */
  readonly #lasting = new Set<() => void>();
  readonly counts: Record<string, number> = {};
  readonly #only: readonly string[] | undefined;
  #on = true;

  constructor(
    world: World,
    nodes: readonly SimNode[],
    servers: Servers,
    network: PeerNetwork,
    only?: readonly string[],
  ) {
    this.#only = only;
    this.#world = world;
    this.#nodes = nodes;
    this.#servers = servers;
    this.#network = network;
    this.#next();
  }

  /** The world is kind from now on. */
  stop(): void {
    this.#on = false;
    for (const end of [...this.#lasting]) end();
  }

  #next(): void {
    const world = this.#world;
    world.schedule(
      world.between(10, 250) * 1000,
      'fault',
      () => {
        if (!this.#on) return;
        this.#draw();
        this.#next();
      },
      world.servers,
    );
  }

  #lasts(fromMs: number, toMs: number, end: () => void): void {
    const once = (): void => {
      if (this.#lasting.delete(once)) end();
    };
    this.#lasting.add(once);
    this.#world.schedule(this.#world.between(fromMs, toMs) * 1000, 'fault ends', once, this.#world.servers);
  }

  #draw(): void {
    const world = this.#world;
    const { disks, redis, s3 } = this.#servers;
    const node = world.pick(this.#nodes);
    const names = node.diskNames();
    const disk = disks.of(`/kvtier-sim/${world.pick(names)}/`);
    const faults: Record<string, () => void> = {
      kill: () => this.#crash(node, names, false),
      power: () => this.#crash(node, names, true),
      'disk hangs': () => {
        disk.hangsUntilUs = world.nowUs + world.between(50, 3_000) * 1000;
      },
      // As a disk does that flushes its cache: reads go on, and it is back within the time limit, or not.
      'disk stalls': () => {
        disk.stallsUntilUs = world.nowUs + world.between(50, 1_500) * 1000;
      },
      'disk EIO': () => {
        disk.eio = world.pick([0.02, 0.3, 1]);
        this.#lasts(50, 800, () => (disk.eio = 0));
      },
      'disk full': () => {
        disk.roomBytes = disk.bytes;
        disk.refuses = world.pick([0, 0.3, 1]);
        this.#lasts(200, 1_500, () => {
          disk.roomBytes = Number.POSITIVE_INFINITY;
          disk.refuses = 0;
        });
      },
      'disk flips at rest': () => {
        for (let left = world.between(1, 20); left > 0; left--) disk.flipAtRest();
      },
      'disk flips': () => {
        disk.flips = 0.2;
        this.#lasts(50, 500, () => (disk.flips = 0));
      },
      'disk reads hang': () => {
        disk.stuck = world.pick([0.2, 0.7]);
        this.#lasts(50, 800, () => (disk.stuck = 0));
      },
      'redis down': () => {
        redis.isDown = true;
        redis.reset();
        this.#lasts(50, 1_500, () => (redis.isDown = false));
      },
      'redis resets': () => redis.reset(),
      'redis stalls': () => {
        redis.stalledUntilUs = world.nowUs + world.between(50, 1_500) * 1000;
      },
      'redis fails over': () => redis.failover(),
      'redis goes back': () => redis.failover(false),
      'redis clock': () => {
        redis.clockStepUs = world.between(-3_600, 3_600) * 1_000_000;
      },
      'redis nonsense': () => redis.scribble(),
      'redis forgets': () => redis.forget(),
      'redis refuses': () => {
        redis.refuses = world.pick([0.1, 0.5, 1]);
        this.#lasts(50, 600, () => (redis.refuses = 0));
      },
      'redis flips': () => {
        redis.flips = 0.2;
        this.#lasts(50, 500, () => (redis.flips = 0));
      },
      'redis values hang': () => {
        redis.stuck = world.pick([0.1, 0.4]);
        this.#lasts(50, 600, () => (redis.stuck = 0));
      },
      's3 500': () => {
        s3.errors = world.pick([0.1, 0.5, 1]);
        this.#lasts(100, 2_000, () => (s3.errors = 0));
      },
      's3 hangs': () => {
        s3.hangsUntilUs = world.nowUs + world.between(50, 3_000) * 1000;
      },
      's3 loses answers': () => {
        s3.lostAnswers = world.pick([0.1, 0.5]);
        this.#lasts(100, 1_500, () => (s3.lostAnswers = 0));
      },
      's3 cuts': () => {
        s3.cuts = world.pick([0.2, 0.7]);
        this.#lasts(50, 800, () => (s3.cuts = 0));
      },
      's3 credentials': () => {
        s3.credentialsHangUntilUs = world.nowUs + world.between(50, 3_000) * 1000;
      },
      'clocks are set': () => {
        world.wallStepMs = world.between(-40, 40) * 86_400_000;
        this.#lasts(50, 2_000, () => (world.wallStepMs = 0));
      },
      's3 forgets': () => s3.forget(),
      's3 rots': () => s3.rot(),
      's3 flips': () => {
        s3.flips = 0.2;
        this.#lasts(50, 500, () => (s3.flips = 0));
      },
      'peers reset': () => this.#network.reset(world.chance(0.5) ? node.plan.number : undefined),
      'peers partitioned': () => {
        const other = world.pick(this.#nodes);
        const [a, b] = [node.plan.number, other.plan.number];
        const pair = `${Math.min(a, b)}-${Math.max(a, b)}`;
        this.#network.cut.add(pair);
        this.#network.reset(a);
        this.#lasts(100, 1_500, () => this.#network.cut.delete(pair));
      },
      'peer blocks hang': () => {
        this.#network.stuck = world.pick([0.1, 0.4]);
        this.#lasts(50, 600, () => (this.#network.stuck = 0));
      },
      'peer flips': () => {
        this.#network.flips = 0.2;
        this.#lasts(50, 500, () => (this.#network.flips = 0));
      },
    };
    const name = world.pick(this.#only ?? Object.keys(faults));
    this.counts[name] = (this.counts[name] ?? 0) + 1;
    world.note(`FAULT ${name} (${node.name})`);
    faults[name]!();
  }

  #crash(node: SimNode, disks: readonly string[], power: boolean): void {
    if (node.state === 'down') return;
    const { life } = node;
    node.end();
    for (const name of disks) this.#servers.disks.of(`/kvtier-sim/${name}/`).crash(life, power);
    node.boot(this.#world.between(20, 400) * 1000);
  }
}
