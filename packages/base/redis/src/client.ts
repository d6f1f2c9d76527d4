/**
 * One client of Redis servers: ioredis, which knows discovery, topology and failover. Invariants: every call ends within the time
 * limit; every failure is a KvError of one line, CONFIG when waiting does not mend it, IO (retry) else; the client comes back by
 * itself, whatever becomes of its servers.
 */
import { KvError, Outside } from '@kvtier/errors';
import { Cluster, Redis, type RedisOptions } from 'ioredis';
import { backoffMs, listenAgainMs, nextRoundMs, Pauses, tellingConnector } from './failover-news.ts';
import { connectAdvice, spokenOtherwise } from './other-speech.ts';
import { RenewedLogin } from './renewed-login.ts';
import { parseServers, type RedisLogin, type RedisServers } from './servers.ts';

/** What must happen at once, as Lua; `sha`: SHA-1 of its text, hex. */
export interface RedisScript {
  readonly lua: string;
  readonly sha: string;
}

/** As a server answers: bytes, and nothing that is believed yet. */
type Answer = Buffer | number | null | readonly Answer[];

/** Between two attempts to connect, at most. */
const defaultMaxBackoffMs = 2000;
/** What a server that stands still may hold up the end of its connection; ioredis would wait two seconds. */
const goodbyeMs = 100;
/** A server that loads its data tells how long it will take; it is asked again no later than this. */
const maxLoadingMs = 1000;
/** Connected for longer and not ready is a state of the server, not a step on the way. */
const notReadyMs = 200;

export class RedisClient {
  readonly #client: Outside<Redis | Cluster>;
  readonly #timeLimitMs: number;
  readonly #login: RenewedLogin;
  readonly #isTls: boolean;
  /** Why the last connection was not made or kept; ioredis tells by events. */
  #lastError: Error | undefined;
  #isClosed = false;
  /** It was told to connect anew, and its old connection has not ended yet. */
  #isLeaving = false;
  /** A connection ended before it was of any use, and no error says why. */
  #isCutWordless = false;
  /** When the last connection was made, on performance.now(). */
  #connectedMs = 0;
  #masterHost: string | undefined;

  /**
   * Begins to connect. KvError CONFIG for what cannot work. `onLost`: the connection to a server ended, or a server was replaced.
   * `maxBackoffMs`: between two attempts to connect.
   */
  constructor(settings: RedisServers, onLost: (reason: string) => void, maxBackoffMs = defaultMaxBackoffMs) {
    this.#timeLimitMs = settings.timeLimitMs;
    const pauses = new Pauses(maxBackoffMs);
    const servers = parseServers(settings);
    const first = servers[0]!;
    this.#isTls = first.isTls;
    this.#login = new RenewedLogin(settings, first, () => this.#renewed());
    const { username, password, tls } = this.#login.now;
    const common = {
      ...(username === undefined ? {} : { username }),
      ...(password === undefined ? {} : { password }),
      ...(tls === undefined ? {} : { tls }),
      protocol: 2 as const,
      connectTimeout: settings.timeLimitMs,
      commandTimeout: settings.timeLimitMs,
      disconnectTimeout: goodbyeMs,
      disableClientInfo: true,
      maxLoadingRetryTime: maxLoadingMs,
      maxRetriesPerRequest: 0,
      enableOfflineQueue: false,
      autoResendUnfulfilledCommands: false,
      retryStrategy: pauses.next,
      // A master that became a replica: connect again, and find the new one.
      reconnectOnError: (error: Error) => error.message.startsWith('READONLY'),
    } satisfies RedisOptions;
    if (settings.mode === 'cluster') {
      const { retryStrategy: _, enableOfflineQueue: __, ...redisOptions } = common;
      const seeds = servers.map(({ host, port }) => ({ host: host!, port: port! }));
      const clusterOptions = {
        redisOptions,
        clusterRetryStrategy: (times: number) => backoffMs(times, maxBackoffMs),
        enableOfflineQueue: false,
        slotsRefreshTimeout: settings.timeLimitMs,
        slotsRefreshInterval: 5000,
        // Names and addresses as the cluster announces them: a certificate is for the name.
        dnsLookup: (address: string, callback: (error: null, address: string) => void) => callback(null, address),
        maxRedirections: 4,
        // What was sent when a connection ended may have been done: it is not sent again, as with one server. The budget counts by it.
        retryDelayOnFailover: 0,
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
        Connector: tellingConnector(
          () => this.#failedOver(pauses),
          (host) => {
            this.#masterHost = host;
          },
        ),
        sentinelRetryStrategy: (round: number) => nextRoundMs(round, maxBackoffMs),
        // To one that starts anew we listen again; ioredis alone would after a minute.
        sentinelReconnectStrategy: (times: number) => listenAgainMs(times, maxBackoffMs),
        // A Sentinel that accepts and says nothing: the next one is asked.
        sentinelCommandTimeout: settings.timeLimitMs,
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
      // A Cluster's client keeps a copy of the options that it began with for servers that it learns of; each connects a turn later.
      client.on('+node', ({ options }: Redis) => this.#show(options));
      client.on('connect', () => {
        this.#connectedMs = performance.now();
      });
      client.on('ready', () => {
        this.#isLeaving = false;
      });
      client.on('close', () => {
        this.#isLeaving = false;
        this.#isCutWordless = this.#lastError === undefined && !this.#isClosed;
        onLost(this.#lastError?.message ?? 'the connection ended');
      });
    });
  }

  /** What is known of it, and what is begun without waiting for it. */
  now<R>(
    look: (client: Redis | Cluster) => R,
    ...waits: R extends PromiseLike<unknown> ? ['ask, with a limit'] : []
  ): R {
    return this.#client.now(look, ...waits);
  }

  get isReady(): boolean {
    return !this.#isLeaving && this.#client.now(({ status }) => status === 'ready');
  }

  /** Waits until commands can be sent. KvError with the reason, CONFIG when waiting longer will not help. */
  async ready(limitMs: number): Promise<void> {
    const endMs = performance.now() + limitMs;
    while (!this.isReady) {
      if (this.#isClosed) throw new KvError('CANCELLED', 'redis: it was closed', { retry: true });
      this.#client.now(unstick);
      const error = this.#lastError;
      if (error !== undefined && isRefusal(error.message)) throw asRedisError(error);
      const leftMs = endMs - performance.now();
      if (leftMs <= 0) {
        // Why the connection before was not made or kept says nothing of this one.
        if (this.#isNotReady) throw new KvError('DEADLINE', `redis: ${notReady}`, { retry: true });
        throw error === undefined
          ? new KvError('DEADLINE', `redis: ${this.#silence(limitMs)}`, { retry: true })
          : asRedisError(error, connectAdvice(error.message, this.#isTls));
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

  get #isNotReady(): boolean {
    const isConnected = this.#client.now(({ status }) => status === 'connect');
    return isConnected && performance.now() - this.#connectedMs > notReadyMs;
  }

  #silence(limitMs: number): string {
    return this.#isCutWordless
      ? 'the server ends every connection without a word; write rediss: if it speaks TLS at this port'
      : `no connection within ${limitMs} ms; ${reachAdvice}`;
  }

  /** KvError when it is not answered in time. */
  async ask<T>(call: (client: Redis | Cluster) => Promise<T>): Promise<T> {
    try {
      // ioredis's own limit does not cover every wait of a Cluster (redirections, discovery).
      return await this.#client.ask(this.#timeLimitMs + 200, call);
    } catch (error) {
      throw asRedisError(error as Error);
    }
  }

  /** A script on the server of its keys, which have one slot. KvError when it is not done in time. */
  async run(
    script: RedisScript,
    keys: readonly string[],
    args: readonly (string | number | Buffer)[],
  ): Promise<Answer> {
    const rest = [String(keys.length), ...keys, ...args];
    try {
      return (await this.ask((client) => client.callBuffer('EVALSHA', [script.sha, ...rest]))) as Answer;
    } catch (error) {
      if (!(error as Error).message.includes('NOSCRIPT')) throw error;
      return (await this.ask((client) => client.callBuffer('EVAL', [script.lua, ...rest]))) as Answer;
    }
  }

  /** Connect anew: what is connected may be connected to nothing any more. */
  reset(): void {
    if (!this.isReady) return;
    this.#isLeaving = true;
    this.#client.now((client) => client.disconnect(true));
  }

  /** Of Sentinels: the name or address by which they know the master. Its certificate is for that, whatever address it has. */
  get masterHost(): string | undefined {
    return this.#masterHost;
  }

  /** For connections of the caller's own. */
  get login(): RedisLogin {
    return this.#login.now;
  }

  /** Connections that stand stay. ioredis looks at its options when it makes the next one. */
  #renewed(): void {
    this.#client.now((client) => {
      for (const { options } of client instanceof Cluster ? client.nodes('all') : [client]) this.#show(options);
    });
  }

  /** What is shown from now on. */
  #show(options: RedisOptions): void {
    const { password, tls } = this.#login.now;
    if (password !== undefined) options.password = password;
    if (tls === undefined) return;
    options.tls = tls;
    if (options.sentinelTLS !== undefined) options.sentinelTLS = tls;
  }

  #failedOver(pauses: Pauses): void {
    if (this.#isClosed) return;
    this.#client.now((client) => {
      const isPausing = client.status === 'reconnecting';
      pauses.told(isPausing);
      if (isPausing) client.connect().catch(() => {});
    });
  }

  close(): void {
    this.#isClosed = true;
    this.#login.close();
    this.#client.now((client) => {
      client.removeAllListeners('close');
      client.disconnect();
    });
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

const notReady =
  'the server is connected and not ready; it may be loading its data: wait, or check that it speaks Redis';
const reachAdvice =
  'check that servers can be reached and speak Redis, with rediss: and tls (caFile, serverName) where they speak TLS';

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

/** `advice`: of who knows more of it than its words say. */
export function asRedisError(error: Error, advice?: string): KvError {
  if (error instanceof KvError) return error;
  // A cluster that could not be reached hides why in its last node's error.
  const last = (error as { lastNodeError?: Error }).lastNodeError;
  const message = (last === undefined ? error.message : `${error.message} (${last.message})`).split('\n')[0]!;
  const remedy = remedies.find(([pattern]) => pattern.test(message))?.[1] ?? advice;
  const code = isRefusal(message) ? 'CONFIG' : 'IO';
  const line = spokenOtherwise(message) ?? `${message}${remedy === undefined ? '' : `; ${remedy}`}`;
  return new KvError(code, `redis: ${line}`, {
    retry: code === 'IO',
    tier: 'redis',
    cause: error,
  });
}
