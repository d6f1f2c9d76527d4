/**
 * A Redis server in memory, behind ioredis's `callBuffer` and the tier's pool of value connections. `RedisCommands`, `Directory`,
 * `Values`, the index, recency and the tier's life with its server are the real code; the Lua scripts are modelled here, command
 * for command (the real ones run against real servers in redis-tier.slow.test.ts).
 *
 * It answers late, not at all, refuses writes, ends connections, and after a failover has forgotten its latest writes, or all.
 * Invariant: commands of one connection are done, and answered, in their order.
 */
import type { ArenaHandle, ValuesHandle } from '@kvtier/data-plane';
import {
  type MoveResult,
  type NativePool,
  type PieceJob,
  type PiecePool,
  scripts,
  type ValueEnd,
  type ValueJob,
} from '@kvtier/tiers/redis/testing';
import { spaces } from './contents.ts';
import { type Ledger, RedisKeys, type Reply, type State } from './redis-keys.ts';
import { isSound, type VirtualArenas } from './virtual-arena.ts';
import type { Entry, Life, World } from './world.ts';

/** What of ioredis's client is needed: its status, its events. */
interface Client {
  status: string;
  options: { host?: string; port?: number };
  emit(event: string, ...args: unknown[]): boolean;
}

interface Connection {
  readonly client: Client;
  readonly owner: Life;
  lastArrivalUs: number;
  lastReplyUs: number;
  isOpen: boolean;
  readonly waiting: Set<(error: Error) => void>;
  reconnect: Entry | undefined;
}

/** A value, and where its parts are. */
interface ValueParts {
  readonly kind: 'get' | 'set';
  readonly keys: string;
  readonly value: Buffer;
  readonly partBytes: number;
  readonly deadlineMs: number;
}

const text = (argument: unknown): string =>
  Buffer.isBuffer(argument) ? argument.toString('latin1') : String(argument);
const luaTexts = new Set(scripts.allScripts.map(({ lua }) => lua));
/** A block in a command: its namespace and hash, and what is said of it: where its value is, its size, its uses, its end. */
const bytesPerName = 160;
/** Blocks that a part of a command names: each with its namespace before it, or by the key of its value. */
function namesIn(word: string): number {
  let count = /^\S{1,40}:v:\S{1,40}$/.test(word) ? 1 : 0;
  for (const { namespace } of spaces)
    for (let at = word.indexOf(namespace.key); at !== -1; at = word.indexOf(namespace.key, at + 32)) count++;
  return count;
}
/** Whatever takes jobs for a server. */
type Pool = PiecePool | NativePool;

export class VirtualRedis {
  readonly #keys: RedisKeys;
  /** What a replica has: some of the latest writes are missing. */
  #replica: State;
  readonly #world: World;
  readonly #arenas: VirtualArenas;
  /** What a life's values in native code are read from and written to. */
  readonly #memories = new WeakMap<Life, Buffer>();
  readonly #connections = new Map<Client, Connection>();
  /** Jobs of each pool that have not ended, and whose they are. */
  readonly #pools = new Map<Pool, { readonly owner: Life; readonly jobs: Set<PieceJob> }>();
  isDown = false;
  stalledUntilUs = 0;
  /** How far its clock was set. */
  clockStepUs = 0;
  /** Probabilities: a write command is refused; a value arrives damaged. */
  refuses = 0;
  flips = 0;
  /** Probability that a part of a value hangs, while those beside it come. */
  stuck = 0;
  /** Of any command: the most bytes beside those that the blocks it names need. */
  mostBesideNames = 0;
  readonly counts = { commands: 0, sets: 0, gets: 0, refused: 0, resets: 0, failovers: 0, stuck: 0 };

  constructor(world: World, arenas: VirtualArenas) {
    this.#world = world;
    this.#arenas = arenas;
    this.#keys = new RedisKeys(
      () => 5e12 + world.nowUs + this.clockStepUs,
      () => this.#isRefused(),
    );
    this.#replica = this.#keys.copy();
    const replicate = (): void => {
      this.#replica = this.#keys.copy();
      world.schedule(world.between(50_000, 400_000), 'redis replicates', replicate, world.servers);
    };
    replicate();
  }

  /** Bytes of all values. */
  get valueBytes(): number {
    let sum = 0;
    for (const value of this.#keys.values.values()) sum += value.length;
    return sum;
  }

  get ledger(): Readonly<Ledger> | undefined {
    return this.#keys.ledger;
  }

  /** Every connection ends. */
  reset(): void {
    this.counts.resets++;
    for (const connection of this.#connections.values()) this.#end(connection, true);
    for (const [pool, { owner, jobs }] of this.#pools) {
      if (!owner.alive) this.#pools.delete(pool);
      else
        for (const job of [...jobs])
          this.#world.schedule(0, 'redis value lost', () => this.#endJob(jobs, job, 'lost'), owner);
    }
  }

  /** The replica takes over: what it had not got is gone. In a Cluster not every connection ends with that. */
  failover(ends = true): void {
    this.counts.failovers++;
    this.#keys.restore(this.#replica);
    this.#replica = this.#keys.copy();
    if (ends) this.reset();
  }

  /** Somebody else writes into our keys. */
  scribble(): void {
    const world = this.#world;
    const nonsense = world.pick(['', 'x', '2000 0 x', 'NaN 512 x', '99999999999999 1 x', '2000 512 a b', '100 512 x']);
    this.#keys.scribble(
      world.pick(['entry', 'event', 'lease', 'number', 'name'] as const),
      nonsense,
      world.between(0, 9),
    );
  }

  /** It starts again, empty. */
  forget(): void {
    this.#keys.restore({ ledger: undefined, values: new Map() });
    this.#replica = this.#keys.copy();
    this.reset();
  }

  /** What replaces methods of ioredis's Redis. */
  readonly client = (() => {
    const world = (): VirtualRedis => this;
    return {
      connect(this: Client): Promise<void> {
        return world().#connect(this);
      },
      disconnect(this: Client, reconnect = false): void {
        const connection = world().#connections.get(this);
        if (connection !== undefined) world().#end(connection, reconnect);
      },
      callBuffer(this: Client, name: string, args: readonly unknown[]): Promise<Reply> {
        return world().#call(this, name, args);
      },
      call(this: Client, name: string, ...args: unknown[]): Promise<Reply> {
        return world().#call(this, name, args);
      },
    };
  })();

  /** What replaces methods of PiecePool and NativePool. */
  readonly pool = (() => {
    const world = (): VirtualRedis => this;
    return {
      submit(this: Pool, job: PieceJob | ValueJob): void {
        if ('rows' in job) world().#submitValues(this, job);
        else world().#submit(this, job);
      },
      close(this: Pool): void {
        const { jobs } = world().#jobsOf(this);
        for (const job of [...jobs]) world().#endJob(jobs, job, 'lost');
      },
    };
  })();

  /** What replaces functions of the native binding: its thread is only opened, the rest goes through the pools. */
  readonly native = {
    valuesOpen: (arena: ArenaHandle): ValuesHandle => {
      this.#memories.set(this.#world.life, this.#arenas.memories.get(arena)!);
      return {} as ValuesHandle;
    },
    valuesServer: (): number => 1,
    valuesClose: (): void => {},
  };

  #isRefused(): boolean {
    const isRefused = this.refuses > 0 && this.#world.chance(this.refuses);
    if (isRefused) this.counts.refused++;
    return isRefused;
  }

  #connect(client: Client): Promise<void> {
    const world = this.#world;
    const connection = {
      ...{ client, owner: world.life, lastArrivalUs: 0, lastReplyUs: 0, isOpen: false },
      ...{ waiting: new Set<(error: Error) => void>(), reconnect: undefined },
    };
    this.#connections.set(client, connection);
    client.status = 'connecting';
    this.#reach(connection);
    return Promise.resolve();
  }

  #reach(connection: Connection): void {
    const { client, owner } = connection;
    connection.reconnect = this.#world.schedule(
      this.#delayUs() + this.#world.between(0, 100_000),
      'redis connects',
      () => {
        if (this.isDown) {
          client.emit('error', new Error('connect ECONNREFUSED'));
          client.emit('close');
          this.#reach(connection);
          return;
        }
        connection.isOpen = true;
        client.status = 'ready';
        client.emit('ready');
      },
      owner,
    );
  }

  #end(connection: Connection, reconnect: boolean): void {
    const { client, owner } = connection;
    if (!owner.alive) {
      this.#connections.delete(client);
      return;
    }
    if (!reconnect && connection.reconnect !== undefined) this.#world.cancel(connection.reconnect);
    const wasOpen = connection.isOpen;
    connection.isOpen = false;
    client.status = reconnect ? 'reconnecting' : 'end';
    this.#world.schedule(
      0,
      'redis connection ends',
      () => {
        for (const fail of connection.waiting) fail(new Error('Connection is closed.'));
        connection.waiting.clear();
        if (wasOpen) client.emit('close');
        if (reconnect && wasOpen) this.#reach(connection);
      },
      owner,
    );
  }

  #call(client: Client, name: string, args: readonly unknown[]): Promise<Reply> {
    const connection = this.#connections.get(client);
    const world = this.#world;
    return new Promise((resolve, reject) => {
      if (connection?.isOpen !== true) {
        reject(new Error("Stream isn't writeable and enableOfflineQueue options is false"));
        return;
      }
      this.#measure(name, args);
      connection.waiting.add(reject);
      connection.lastArrivalUs = Math.max(connection.lastArrivalUs, world.nowUs + this.#delayUs());
      const arrive = (): void => {
        if (this.stalledUntilUs > world.nowUs) {
          // It stands still: what has arrived waits, in order.
          world.schedule(this.stalledUntilUs - world.nowUs, 'redis wakes up', arrive, world.servers);
          return;
        }
        if (this.isDown || !connection.isOpen) return;
        this.counts.commands++;
        const reply = this.#keys.run(name, args.map(text));
        connection.lastReplyUs = Math.max(connection.lastReplyUs, world.nowUs + this.#delayUs());
        world.schedule(
          connection.lastReplyUs - world.nowUs,
          `redis answers ${name}`,
          () => {
            if (!connection.waiting.delete(reject)) return;
            if (reply instanceof Error) reject(reply);
            else resolve(reply);
          },
          connection.owner,
        );
      };
      world.schedule(connection.lastArrivalUs - world.nowUs, `redis ${name}`, arrive, world.servers);
    });
  }

  #measure(name: string, args: readonly unknown[]): void {
    const words = args.map(text).filter((word) => !luaTexts.has(word));
    const bytes = words.reduce((sum, word) => sum + word.length, name.length);
    const names = words.reduce((sum, word) => sum + namesIn(word), 0);
    this.mostBesideNames = Math.max(this.mostBesideNames, bytes - names * bytesPerName);
  }

  /** Whole values: their parts one after another, and each object looked at when all of its have arrived. */
  #submitValues(pool: Pool, { kind, base, ids, rows, identities, deadlineMs, onDone }: ValueJob): void {
    const memory = this.#memories.get(this.#world.life)!;
    const names = ids.split(' ');
    const ends: ValueEnd[] = [];
    let open = names.length;
    for (const [index, id] of names.entries()) {
      const [slot, bytes, partBytes] = rows.subarray(3 * index) as unknown as [number, number, number];
      const value = memory.subarray(slot, slot + bytes);
      const identity = identities === null ? null : Buffer.from(identities.subarray(64 * index, 64 * (index + 1)));
      this.#submitParts(pool, { kind, keys: `${base}${id}:`, value, partBytes, deadlineMs }, (worst) => {
        ends[index] = worst === 'ok' && identity !== null && !isSound(value, identity, true) ? 'fault' : worst;
        if (--open > 0) return;
        onDone(ends);
      });
    }
  }

  #submitParts(
    pool: Pool,
    { kind, keys, value, partBytes, deadlineMs }: ValueParts,
    onEnd: (worst: MoveResult) => void,
  ): void {
    const count = Math.max(1, Math.ceil(value.length / partBytes));
    let open = count;
    let worst: MoveResult = 'ok';
    const end = (result: MoveResult): void => {
      if (worst === 'ok') worst = result;
      if (--open === 0) onEnd(worst);
    };
    for (let part = 0; part < count; part++) {
      const view = value.subarray(part * partBytes, (part + 1) * partBytes);
      const piece = { kind, key: `${keys}${part}`, view, start: 0, toEnd: true, deadlineMs, asking: false };
      this.#submit(pool, { ...piece, onDone: end });
    }
  }

  #submit(pool: Pool, job: PieceJob): void {
    const world = this.#world;
    const { life } = world;
    const open = this.#jobsOf(pool).jobs;
    open.add(job);
    // The pool's sweep: a connection that fell silent is destroyed, and then the job ends.
    const limit = world.schedule(
      Math.max(1000, (job.deadlineMs - world.nowMs) * 1000) + world.between(0, 50_000),
      'redis value given up',
      () => this.#endJob(open, job, 'lost'),
    );
    const end = (result: MoveResult): void => {
      world.cancel(limit);
      this.#endJob(open, job, result);
    };
    const isOpen = (): boolean => open.has(job) && life.alive;
    const early = job.kind === 'set' ? Buffer.from(job.view) : undefined;
    const hasLeft = world.chance(0.5);
    const arrive = (): void => {
      if (this.stalledUntilUs > world.nowUs) {
        world.schedule(this.stalledUntilUs - world.nowUs, 'redis wakes up', arrive, world.servers);
        return;
      }
      if (this.isDown) {
        if (isOpen()) world.schedule(this.#delayUs(), 'redis value lost', () => end('lost'), life);
        return;
      }
      const result = this.#move(job, isOpen() ? Buffer.from(job.view) : hasLeft ? early : undefined);
      if (!isOpen()) return;
      world.schedule(
        this.#delayUs(),
        `redis answers value ${job.kind}`,
        () => {
          if (!open.has(job)) return;
          if (Buffer.isBuffer(result)) {
            result.copy(job.view);
            if (this.flips > 0 && job.view.length > 0 && world.chance(this.flips)) {
              job.view[world.between(0, job.view.length - 1)]! ^= 2;
            }
            end('ok');
          } else end(result);
        },
        life,
      );
    };
    const isStuck = this.stuck > 0 && world.chance(this.stuck);
    if (isStuck) this.counts.stuck++;
    const delayUs = isStuck ? world.between(50, 1_000) * 1000 : this.#delayUs();
    world.schedule(delayUs, `redis value ${job.kind}`, arrive, world.servers);
  }

  #jobsOf(pool: Pool): { readonly owner: Life; readonly jobs: Set<PieceJob> } {
    let entry = this.#pools.get(pool);
    if (entry === undefined) {
      entry = { owner: this.#world.life, jobs: new Set() };
      this.#pools.set(pool, entry);
    }
    return entry;
  }

  #endJob(jobs: Set<PieceJob>, job: PieceJob, result: MoveResult): void {
    if (jobs.delete(job)) job.onDone(result);
  }

  /** SET XX, GETRANGE. `sent`: undefined when not all of it has left. */
  #move({ kind, key, view, start, toEnd }: PieceJob, sent: Buffer | undefined): MoveResult | Buffer {
    const { values } = this.#keys;
    const held = values.get(key);
    if (kind === 'get') {
      this.counts.gets++;
      const piece = held?.subarray(start, toEnd ? held.length : start + view.length) ?? Buffer.alloc(0);
      if (piece.length === 0) return 'none'; // GETRANGE knows no difference
      return piece.length === view.length ? Buffer.from(piece) : 'length';
    }
    this.counts.sets++;
    if (sent === undefined) return 'lost';
    if (this.#isRefused()) return { error: 'OOM command not allowed' };
    if (held === undefined) return 'none';
    values.set(key, Buffer.from(sent));
    return 'ok';
  }

  #delayUs(): number {
    const world = this.#world;
    return world.between(50, 800) + (world.chance(0.03) ? world.between(5_000, 300_000) : 0);
  }
}
