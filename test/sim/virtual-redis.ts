/**
 * A Redis server in memory, behind ioredis's `callBuffer` and the tier's pool of value connections. `RedisLink`, `Directory`,
 * `Values`, the index, recency and the tier's life with its server are the real code; the Lua scripts are modelled here, command
 * for command (the real ones run against real servers in redis-tier.slow.test.ts).
 *
 * It answers late, not at all, refuses writes, ends connections, and after a failover has forgotten its latest writes, or all.
 * Invariant: commands of one connection are done, and answered, in their order.
 */
import type { BulkJob, BulkResult } from '../../packages/tiers/src/redis/bulk-connection.ts';
import type { BulkPool } from '../../packages/tiers/src/redis/bulk-pool.ts';
import * as scripts from '../../packages/tiers/src/redis/scripts.ts';
import { chargeOf, maxEvents } from '../../packages/tiers/src/redis/scripts.ts';
import type { Entry, Life, World } from './world.ts';

type Reply = Buffer | number | null | readonly Reply[];
interface Event {
  readonly number: number;
  readonly fields: readonly string[];
}

/** What one partition's keys hold. */
class Ledger {
  partitions = '';
  cap = 0;
  epoch = '';
  used = 0;
  count = 0;
  eventCount = 0;
  blocks = new Map<string, string>();
  recency = new Map<string, number>();
  leases = new Map<string, number>();
  expiry = new Map<string, number>();
  events: Event[] = [];
}

interface State {
  ledger: Ledger | undefined;
  values: Map<string, Buffer>;
}

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

const text = (argument: unknown): string =>
  Buffer.isBuffer(argument) ? argument.toString('latin1') : String(argument);
const bytes = (value: string): Buffer => Buffer.from(value, 'latin1');
const partsOf = (length: number, part: number): number => Math.ceil(length / part);

export class VirtualRedis {
  #state: State = { ledger: undefined, values: new Map() };
  /** What a replica has: some of the latest writes are missing. */
  #replica: State = { ledger: undefined, values: new Map() };
  readonly #world: World;
  readonly #connections = new Map<Client, Connection>();
  /** Jobs of each pool that have not ended, and whose they are. */
  readonly #pools = new Map<BulkPool, { readonly owner: Life; readonly jobs: Set<BulkJob> }>();
  isDown = false;
  stalledUntilUs = 0;
  /** Probabilities: a write command is refused; a value arrives damaged. */
  refuses = 0;
  flips = 0;
  /** Bytes that travelled as commands and replies. */
  controlBytes = 0;
  largestCommandBytes = 0;
  readonly counts = { commands: 0, sets: 0, gets: 0, refused: 0, resets: 0, failovers: 0 };

  constructor(world: World) {
    this.#world = world;
    const replicate = (): void => {
      this.#replica = this.#copy();
      world.schedule(world.between(50_000, 400_000), 'redis replicates', replicate, world.servers);
    };
    replicate();
  }

  /** Bytes of all values. */
  get valueBytes(): number {
    let sum = 0;
    for (const value of this.#state.values.values()) sum += value.length;
    return sum;
  }

  get ledger(): Readonly<Ledger> | undefined {
    return this.#state.ledger;
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

  /** The replica takes over: what it had not got is gone. */
  failover(): void {
    this.counts.failovers++;
    this.#state = this.#replica;
    this.#replica = this.#copy();
    this.reset();
  }

  /** It starts again, empty. */
  forget(): void {
    this.#state = { ledger: undefined, values: new Map() };
    this.#replica = this.#copy();
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

  /** What replaces methods of BulkPool. */
  readonly pool = (() => {
    const world = (): VirtualRedis => this;
    return {
      submit(this: BulkPool, job: BulkJob): void {
        world().#submit(this, job);
      },
      close(this: BulkPool): void {
        const { jobs } = world().#jobsOf(this);
        for (const job of [...jobs]) world().#endJob(jobs, job, 'lost');
      },
    };
  })();

  #copy(): State {
    const { ledger, values } = this.#state;
    return { ledger: ledger === undefined ? undefined : structuredCloneOf(ledger), values: new Map(values) };
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
      const size = args.reduce<number>((sum, argument) => sum + text(argument).length, name.length);
      this.controlBytes += size;
      if (!text(args[0]).includes('\n')) this.largestCommandBytes = Math.max(this.largestCommandBytes, size);
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
        const reply = this.#run(name, args.map(text));
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

  #submit(pool: BulkPool, job: BulkJob): void {
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
    const end = (result: BulkResult): void => {
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
    world.schedule(this.#delayUs(), `redis value ${job.kind}`, arrive, world.servers);
  }

  #jobsOf(pool: BulkPool): { readonly owner: Life; readonly jobs: Set<BulkJob> } {
    let entry = this.#pools.get(pool);
    if (entry === undefined) {
      entry = { owner: this.#world.life, jobs: new Set() };
      this.#pools.set(pool, entry);
    }
    return entry;
  }

  #endJob(jobs: Set<BulkJob>, job: BulkJob, result: BulkResult): void {
    if (jobs.delete(job)) job.onDone(result);
  }

  /** SET XX, GETRANGE. `sent`: undefined when not all of it has left. */
  #move({ kind, key, view, start, toEnd }: BulkJob, sent: Buffer | undefined): BulkResult | Buffer {
    const { values } = this.#state;
    const held = values.get(key);
    if (kind === 'get') {
      this.counts.gets++;
      const piece = held?.subarray(start, toEnd ? held.length : start + view.length) ?? Buffer.alloc(0);
      if (piece.length === 0) return 'none'; // GETRANGE knows no difference
      return piece.length === view.length ? Buffer.from(piece) : 'length';
    }
    this.counts.sets++;
    if (sent === undefined) return 'lost';
    if (this.refuses > 0 && this.#world.chance(this.refuses)) return { error: 'OOM command not allowed' };
    if (held === undefined) return 'none';
    values.set(key, Buffer.from(sent));
    return 'ok';
  }

  #run(name: string, args: readonly string[]): Reply | Error {
    const { ledger } = this.#state;
    switch (name) {
      case 'TIME':
        return [bytes(String(Math.floor(this.#nowUs() / 1e6))), bytes(String(Math.floor(this.#nowUs() % 1e6)))];
      case 'INFO':
        return bytes('maxmemory:0\r\nmaxmemory_policy:noeviction\r\n');
      case 'SCRIPT':
        return bytes('ok');
      case 'HSCAN':
        return [bytes('0'), [...(ledger?.blocks ?? [])].flatMap(([field, entry]) => [bytes(field), bytes(entry)])];
      case 'SCAN':
        return [bytes('0'), [...this.#state.values.keys()].map(bytes)];
      case 'UNLINK':
        for (const key of args) this.#state.values.delete(key);
        return args.length;
      case 'EVALSHA':
        return this.#script(args[0]!, args[2]!.slice(0, -6), args.slice(2 + Number(args[1])));
      default:
        return new Error(`ERR simulation: no command ${name}`);
    }
  }

  #script(sha: string, base: string, argv: readonly string[]): Reply | Error {
    if (sha === scripts.resetScript.sha) {
      this.#state.ledger = undefined;
      return 6;
    }
    if (sha === scripts.openScript.sha) return this.#open(base, argv);
    const { ledger } = this.#state;
    if (ledger === undefined || ledger.blocks.size !== ledger.count) return new Error('KVTIER lost');
    const writes = sha !== scripts.pollScript.sha;
    if (writes && this.refuses > 0 && this.#world.chance(this.refuses)) {
      this.counts.refused++;
      return new Error('OOM command not allowed when used memory > maxmemory');
    }
    if (sha === scripts.reserveScript.sha) return this.#reserve(ledger, base, argv);
    if (sha === scripts.commitScript.sha) return this.#commit(ledger, base, argv);
    if (sha === scripts.removeScript.sha) {
      for (let at = 1; at < argv.length; at += 2) {
        if (ledger.blocks.get(argv[at]!) === argv[at + 1]) this.#drop(ledger, base, argv[at]!, argv[0]!);
      }
      return [state(ledger)];
    }
    if (sha === scripts.touchScript.sha) {
      for (let at = 0; at < argv.length; at += 2) {
        if (ledger.blocks.has(argv[at]!)) this.#use(ledger, argv[at]!, Number(argv[at + 1]));
      }
      return [state(ledger)];
    }
    this.#sweep(ledger, base, argv[0]!);
    const first = ledger.events[0]?.number ?? 0;
    const news = ledger.events.filter(({ number }) => number > Number(argv[1])).slice(0, Number(argv[2]));
    return [state(ledger), first, news.map(({ number, fields }) => [bytes(`${number}-1`), fields.map(bytes)])];
  }

  #open(base: string, [partitions, cap, epoch, create]: readonly string[]): Reply {
    let { ledger } = this.#state;
    if (ledger === undefined) {
      if (create === '') return [bytes('new')];
      ledger = new Ledger();
      Object.assign(ledger, { partitions, epoch });
      this.#state.ledger = ledger;
    } else if (ledger.blocks.size !== ledger.count || ledger.recency.size !== ledger.count) return [bytes('damaged')];
    ledger.cap = Number(cap);
    while (ledger.used > ledger.cap && ledger.blocks.size > 0) this.#drop(ledger, base, oldest(ledger)!, '');
    return [bytes('ok'), ...state(ledger)];
  }

  #reserve(ledger: Ledger, base: string, argv: readonly string[]): Reply {
    const [node, leaseMs, part, share] = argv;
    this.#sweep(ledger, base, node!);
    const answers: Buffer[] = [];
    const evicted: Buffer[] = [];
    for (let at = 4; at < argv.length; at += 3) {
      const [field, id, length] = [argv[at]!, argv[at + 1]!, Number(argv[at + 2])];
      const held = ledger.blocks.get(field);
      const need = chargeOf(length, Number(part));
      if (held !== undefined) {
        this.#use(ledger, field, this.#nowUs());
        answers.push(bytes(held));
        continue;
      }
      let fits = need <= ledger.cap && (share === '' || need <= Number(share));
      while (fits && ledger.used + need > ledger.cap) {
        const victim = oldest(ledger);
        if (victim === undefined) fits = false;
        else {
          evicted.push(bytes(victim), bytes(ledger.blocks.get(victim)!));
          this.#drop(ledger, base, victim, node!);
        }
      }
      answers.push(bytes(fits ? 'r' : 'n'));
      if (!fits) continue;
      ledger.used += need;
      ledger.leases.set(`${length} ${part} ${id} ${field}`, this.#nowUs() / 1000 + Number(leaseMs));
      for (let i = 0; i < partsOf(length, Number(part)); i++) {
        this.#state.values.set(`${base}v:${id}:${i}`, Buffer.alloc(0));
      }
    }
    return [state(ledger), answers, evicted];
  }

  #commit(ledger: Ledger, base: string, argv: readonly string[]): Reply {
    const [node, ttlMs, part] = argv;
    const answers: Buffer[] = [];
    for (let at = 3; at < argv.length; at += 5) {
      const [field, id, length, written, used] = argv.slice(at, at + 5) as [string, string, string, string, string];
      const member = `${length} ${part} ${id} ${field}`;
      let answer = 'n';
      if (written === '' || !ledger.leases.has(member)) this.#endLease(ledger, base, member);
      else {
        let there = 0;
        for (let i = 0; i < partsOf(Number(length), Number(part)); i++) {
          there += this.#state.values.get(`${base}v:${id}:${i}`)?.length ?? 0;
        }
        const held = ledger.blocks.get(field);
        if (held !== undefined || there !== Number(length)) {
          this.#endLease(ledger, base, member);
          answer = held ?? 'n';
        } else {
          const entry = `${length} ${part} ${id}`;
          ledger.leases.delete(member);
          ledger.blocks.set(field, entry);
          ledger.count++;
          this.#use(ledger, field, Number(used));
          if (ttlMs !== '') ledger.expiry.set(field, this.#nowUs() / 1000 + Number(ttlMs));
          this.#tell(ledger, 's', field, entry, node!);
          answer = 's';
        }
      }
      answers.push(bytes(answer));
    }
    return [state(ledger), answers];
  }

  #use(ledger: Ledger, field: string, usedUs: number): void {
    const used = Math.min(usedUs, this.#nowUs() + 1_000_000);
    ledger.recency.set(field, Math.max(ledger.recency.get(field) ?? 0, used));
  }

  #sweep(ledger: Ledger, base: string, node: string): void {
    const nowMs = this.#nowUs() / 1000;
    for (const [member, ends] of [...ledger.leases]) if (ends <= nowMs) this.#endLease(ledger, base, member);
    for (const [field, ends] of [...ledger.expiry]) {
      if (ends > nowMs) continue;
      if (ledger.blocks.has(field)) this.#drop(ledger, base, field, node);
      else ledger.expiry.delete(field);
    }
  }

  #endLease(ledger: Ledger, base: string, member: string): void {
    if (!ledger.leases.delete(member)) return;
    const [length, part, id] = member.split(' ');
    this.#dropValue(base, Number(length), Number(part), id!);
    ledger.used -= chargeOf(Number(length), Number(part));
  }

  #drop(ledger: Ledger, base: string, field: string, node: string): void {
    const entry = ledger.blocks.get(field)!;
    const [length, part, id] = entry.split(' ');
    this.#dropValue(base, Number(length), Number(part), id!);
    ledger.blocks.delete(field);
    ledger.recency.delete(field);
    ledger.expiry.delete(field);
    ledger.count--;
    ledger.used -= chargeOf(Number(length), Number(part));
    this.#tell(ledger, 'r', field, entry, node);
  }

  #dropValue(base: string, length: number, part: number, id: string): void {
    for (let i = 0; i < partsOf(length, part); i++) this.#state.values.delete(`${base}v:${id}:${i}`);
  }

  #tell(ledger: Ledger, kind: string, field: string, entry: string, node: string): void {
    const number = ++ledger.eventCount;
    ledger.events.push({ number, fields: ['k', kind, 'f', field, 'e', entry, 'n', node] });
    if (ledger.events.length > Math.min(maxEvents, 200)) ledger.events.shift();
  }

  #nowUs(): number {
    return 5e9 + this.#world.nowUs;
  }

  #delayUs(): number {
    const world = this.#world;
    return world.between(50, 800) + (world.chance(0.03) ? world.between(5_000, 300_000) : 0);
  }
}

const state = (ledger: Ledger): Reply[] => [bytes(ledger.epoch), ledger.used, ledger.cap, ledger.eventCount];

function oldest(ledger: Ledger): string | undefined {
  let found: string | undefined;
  let usedUs = Number.POSITIVE_INFINITY;
  for (const [field, used] of ledger.recency) {
    if (used < usedUs) [found, usedUs] = [field, used];
  }
  return found;
}

function structuredCloneOf(ledger: Ledger): Ledger {
  const copy = Object.assign(new Ledger(), ledger);
  for (const name of ['blocks', 'recency', 'leases', 'expiry'] as const) {
    Object.assign(copy, { [name]: new Map<string, unknown>(ledger[name]) });
  }
  copy.events = [...ledger.events];
  return copy;
}
