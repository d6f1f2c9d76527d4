/**
 * The commands' way to Redis: ioredis, which knows discovery, topology and failover, and runs the scripts of a partition on the
 * server that has it. Invariants: every call ends within the time limit; replies of one partition come in the order in which the
 * server made them (one connection a server).
 */
import { KvError, Outside } from '@kvtier/errors';
import { Cluster, Redis, type RedisOptions } from 'ioredis';
import type { RedisAddress, RedisLogin } from './piece-connection.ts';
import type { Reply } from './replies.ts';
import { allScripts, keyNames, type Script } from './scripts.ts';
import { credentialsOf, parseServers, type RedisSettings, tlsOf } from './settings.ts';

const slotCount = 16_384;
type Argument = string | number | Buffer;

/** Keys of one partition: one hash tag, one slot. */
export interface Partition {
  readonly index: number;
  /** "kvtier:{p0}:" */
  readonly base: string;
  readonly keys: readonly string[];
  readonly slot: number;
}

export class RedisCommands {
  readonly #client: Outside<Redis | Cluster>;
  readonly #settings: RedisSettings;
  readonly #login: RedisLogin;
  /** Why the last connection was not made or kept; ioredis tells by events. */
  #lastError: Error | undefined;
  #isClosed = false;

  /** Begins to connect. KvError CONFIG for what cannot work. `onLost`: the connection to a server ended, or a server was replaced. */
  constructor(settings: RedisSettings, onLost: (reason: string) => void) {
    this.#settings = settings;
    const servers = parseServers(settings);
    const first = servers[0]!;
    const tls = tlsOf(settings, first.isTls);
    const { username, password } = credentialsOf(settings, first);
    const connectTimeoutMs = settings.timeLimitMs;
    this.#login = { username, password, database: settings.database, tls, connectTimeoutMs };
    const common = {
      ...(username === undefined ? {} : { username }),
      ...(password === undefined ? {} : { password }),
      ...(tls === undefined ? {} : { tls }),
      protocol: 2 as const,
      connectTimeout: settings.timeLimitMs,
      commandTimeout: settings.timeLimitMs,
      disableClientInfo: true,
      maxRetriesPerRequest: 0,
      enableOfflineQueue: false,
      autoResendUnfulfilledCommands: false,
      retryStrategy: backoffMs,
      // A master that became a replica: connect again, and find the new one.
      reconnectOnError: (error: Error) => error.message.startsWith('READONLY'),
    } satisfies RedisOptions;
    if (settings.mode === 'cluster') {
      const { retryStrategy: _, enableOfflineQueue: __, ...redisOptions } = common;
      const seeds = servers.map(({ host, port }) => ({ host: host!, port: port! }));
      const clusterOptions = {
        redisOptions,
        clusterRetryStrategy: backoffMs,
        enableOfflineQueue: false,
        slotsRefreshTimeout: settings.timeLimitMs,
        slotsRefreshInterval: 5000,
        // Names and addresses as the cluster announces them: a certificate is for the name.
        dnsLookup: (address: string, callback: (error: null, address: string) => void) => callback(null, address),
        maxRedirections: 4,
        retryDelayOnFailover: 100,
        retryDelayOnClusterDown: 100,
        retryDelayOnTryAgain: 20,
      };
      this.#client = new Outside('redis', new Cluster(seeds, clusterOptions));
    } else if (settings.mode === 'sentinel') {
      const { sentinelUsername, sentinelPassword } = settings;
      const options = {
        ...common,
        db: settings.database,
        sentinels: servers.map(({ host, port }) => ({ host: host!, port: port! })),
        name: settings.masterName!,
        failoverDetector: true,
        sentinelRetryStrategy: backoffMs,
        ...(sentinelUsername === undefined ? {} : { sentinelUsername }),
        ...(sentinelPassword === undefined ? {} : { sentinelPassword }),
        ...(tls === undefined ? {} : { sentinelTLS: tls, enableTLSForSentinelMode: true }),
      };
      this.#client = new Outside('redis', new Redis(options));
    } else {
      const place = first.path === undefined ? { host: first.host!, port: first.port! } : { path: first.path };
      this.#client = new Outside('redis', new Redis({ ...common, ...place, db: settings.database }));
    }
    this.#client.now((client) => {
      for (const event of ['error', 'node error']) {
        client.on(event, (error: Error) => {
          this.#lastError = error;
        });
      }
      client.on('close', () => onLost(this.#lastError?.message ?? 'the connection ended'));
    });
  }

  get partitionCount(): number {
    return this.#settings.partitions ?? (this.#settings.mode === 'cluster' ? 16 : 1);
  }

  /** Tags whose slots lie evenly over all slots, so that servers get equal shares. The same at every node. */
  partitions(): Partition[] {
    const count = this.partitionCount;
    return Array.from({ length: count }, (_, index) => {
      let tag = `p${index}`;
      const inShare = (slot: number): boolean => Math.floor((slot * count) / slotCount) === index;
      for (let salt = 0; !inShare(slotOf(tag)); salt++) tag = `p${index}.${salt}`;
      const base = `${this.#settings.keyPrefix}{${tag}}:`;
      return { index, base, keys: keyNames.map((name) => base + name), slot: slotOf(tag) };
    });
  }

  get isReady(): boolean {
    return this.#client.now(({ status }) => status === 'ready');
  }

  /** Waits until commands can be sent. KvError with the reason, CONFIG when waiting longer will not help. */
  async ready(limitMs: number): Promise<void> {
    const endMs = performance.now() + limitMs;
    while (!this.isReady) {
      if (this.#isClosed) throw new KvError('CANCELLED', 'redis: the tier was closed', { retry: true });
      this.#client.now(unstick);
      const error = this.#lastError;
      if (error !== undefined && isRefusal(error.message)) throw asKvError(error);
      const leftMs = endMs - performance.now();
      if (leftMs <= 0) {
        throw error === undefined
          ? new KvError('DEADLINE', `redis: no connection within ${limitMs} ms; ${reachAdvice}`, { retry: true })
          : asKvError(error);
      }
      await new Promise<void>((resolve) => {
        const events = ['ready', 'error', 'node error'];
        const done = (): void => {
          clearTimeout(timer);
          this.#client.now((client) => events.forEach((event) => void client.off(event, done)));
          resolve();
        };
        const timer = setTimeout(done, Math.min(leftMs, 100));
        this.#client.now((client) => events.forEach((event) => void client.once(event, done)));
      });
    }
    this.#lastError = undefined;
  }

  /** Has every server know the scripts, so that calling one is one round trip. */
  async loadScripts(): Promise<void> {
    const servers = this.#client.now((client) => (client instanceof Cluster ? client.nodes('master') : [client]));
    for (const server of servers) {
      for (const { lua } of allScripts) await this.#limited(() => server.call('SCRIPT', 'LOAD', lua));
    }
  }

  /** KvError IO (retry) when the server does not do it in time. */
  async run(script: Script, partition: Partition, args: readonly Argument[]): Promise<Reply> {
    const rest = [String(partition.keys.length), ...partition.keys, ...args];
    try {
      return (await this.#limited((client) => client.callBuffer('EVALSHA', [script.sha, ...rest]))) as Reply;
    } catch (error) {
      if (!(error as Error).message.includes('NOSCRIPT')) throw error;
      return (await this.#limited((client) => client.callBuffer('EVAL', [script.lua, ...rest]))) as Reply;
    }
  }

  /** A command on the server of a partition. */
  async command(partition: Partition, name: string, args: readonly Argument[]): Promise<Reply> {
    return (await this.#limited((client) => this.#serverIn(client, partition).callBuffer(name, [...args]))) as Reply;
  }

  /** Where values of a partition are, as far as is known; undefined when that slot has no server now. */
  address(partition: Partition): (RedisAddress & { readonly name: string }) | undefined {
    return this.#client.now((client) => {
      if (client instanceof Cluster) {
        const name = client.slots[partition.slot]?.[0];
        return name === undefined ? undefined : addressNamed(name);
      }
      if (this.#settings.mode === 'single') {
        const { host, port, path } = client.options;
        if (path !== undefined && path !== null) return { path, name: path };
        return { host, port, name: `${host}:${port}` };
      }
      // Sentinel: whichever server commands go to now.
      const { remoteAddress, remotePort } = client.stream as { remoteAddress?: string; remotePort?: number };
      if (remoteAddress === undefined || remotePort === undefined) return undefined;
      return { host: remoteAddress, port: remotePort, name: `${remoteAddress}:${remotePort}` };
    });
  }

  /** Connect anew: what is connected may be connected to nothing any more. */
  reset(): void {
    if (this.isReady) this.#client.now((client) => client.disconnect(true));
  }

  /** For connections of our own. */
  get login(): RedisLogin {
    return this.#login;
  }

  /** A value's server said MOVED: ask the cluster anew. */
  refreshTopology(): void {
    this.#client.now((client) => (client instanceof Cluster ? client.refreshSlotsCache(() => {}) : undefined));
  }

  close(): void {
    this.#isClosed = true;
    this.#client.now((client) => {
      client.removeAllListeners('close');
      client.disconnect();
    });
  }

  #serverIn(client: Redis | Cluster, partition: Partition): Redis {
    if (!(client instanceof Cluster)) return client;
    const name = client.slots[partition.slot]?.[0];
    const server = client.nodes('master').find((node) => `${node.options.host}:${node.options.port}` === name);
    if (server === undefined)
      throw new KvError('IO', `redis: no server has slot ${partition.slot} now`, { retry: true });
    return server;
  }

  /** ioredis's own limit does not cover every wait of a Cluster (redirections, discovery). */
  async #limited<T>(call: (client: Redis | Cluster) => Promise<T>): Promise<T> {
    try {
      return await this.#client.ask(this.#settings.timeLimitMs + 200, call);
    } catch (error) {
      throw asKvError(error as Error);
    }
  }
}

/** What ioredis leaves undone when events come at a bad moment. What is begun here, its events tell of. */
function unstick(client: Redis | Cluster): void {
  // It gives up for good when a failover is announced just while it connects.
  if (client.status === 'end') client.connect().catch(() => {});
  // A Cluster's client that learns of a server while it disconnects waits for ever that this one goes, too.
  if (client instanceof Cluster && client.status === 'disconnecting') {
    for (const node of client.nodes('all')) node.disconnect();
  }
}

/** "host:port" as the cluster announces it; an IPv6 host has colons itself. */
export function addressNamed(name: string): RedisAddress & { readonly name: string } {
  const colon = name.lastIndexOf(':');
  return { host: name.slice(0, colon), port: Number(name.slice(colon + 1)), name };
}

/** CRC-16/XMODEM of a hash tag, modulo the slots: the Cluster specification. */
function slotOf(tag: string): number {
  let crc = 0;
  for (const byte of Buffer.from(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = crc & 0x8000 ? ((crc << 1) ^ 0x1021) & 0xffff : (crc << 1) & 0xffff;
  }
  return crc % slotCount;
}

function backoffMs(times: number): number {
  return Math.min(2000, 50 * 2 ** Math.min(times, 6)) * (0.75 + Math.random() / 2);
}

const reachAdvice = 'check that servers can be reached, and tls (caFile, serverName) where they speak it';

const remedies: readonly (readonly [RegExp, string])[] = [
  [/NOAUTH|WRONGPASS|invalid (username|password)|without any password configured/i, 'correct username and password'],
  [/NOPERM/, 'give the user the commands and keys that docs/operating.md lists'],
  [/certificate|self.signed|CERT_|ERR_TLS|wrong version number/i, 'correct tls (caFile, serverName) or the scheme'],
  [/cluster support disabled/i, 'set mode to single'],
  [/DB index is out of range|SELECT is not allowed/i, 'correct database'],
  [/All sentinels are unreachable/, 'correct servers and masterName'],
  // ioredis keeps to itself what its connections for this met; which of the two it tells of depends on which ended first.
  [/Failed to refresh slots cache|Connection is closed/, reachAdvice],
];

/** Waiting does not mend it. */
function isRefusal(message: string): boolean {
  return remedies.slice(0, 5).some(([pattern]) => pattern.test(message));
}

export function asKvError(error: Error): KvError {
  if (error instanceof KvError) return error;
  // A cluster that could not be reached hides why in its last node's error.
  const last = (error as { lastNodeError?: Error }).lastNodeError;
  const message = (last === undefined ? error.message : `${error.message} (${last.message})`).split('\n')[0]!;
  const remedy = remedies.find(([pattern]) => pattern.test(message))?.[1];
  const code = isRefusal(message) ? 'CONFIG' : 'IO';
  return new KvError(code, `redis: ${message}${remedy === undefined ? '' : `; ${remedy}`}`, {
    retry: code === 'IO',
    tier: 'redis',
    cause: error,
  });
}
