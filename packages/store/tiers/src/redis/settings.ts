/**
 * What a Redis tier is made with. `RedisSettings` is what `redisSchema` of @kvtier/config yields: plain data. Invariant: what
 * cannot work is a KvError CONFIG of one line, here or at the first connection, and never shows a password.
 */
import { readFileSync } from 'node:fs';
import type { ConnectionOptions as TlsOptions } from 'node:tls';
import type { ArenaHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import type { ArenaSlots } from '../disk/options.ts';
import type { RedisAddress } from './piece-connection.ts';

/** What holds for the blocks of some namespaces. */
export interface RedisPolicy {
  /** Blocks are forgotten that long after they were written. */
  readonly ttlSeconds?: number | undefined;
  /** At most this part of the budget, 0 to 1. */
  readonly maxShare?: number | undefined;
  /** This node reads them and never writes them. */
  readonly readOnly?: boolean | undefined;
}

export interface RedisSettings {
  readonly mode: 'single' | 'sentinel' | 'cluster';
  /** redis://host:port, rediss://host:port (TLS), unix:/path. Sentinel: the sentinels. Cluster: some of the nodes. */
  readonly servers: readonly string[];
  /** Sentinel: the name of the master. */
  readonly masterName?: string | undefined;
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  /** A file that holds the password; read at start. */
  readonly passwordFile?: string | undefined;
  readonly sentinelUsername?: string | undefined;
  readonly sentinelPassword?: string | undefined;
  /** With rediss: how to trust the server and what to show it. PEM files. */
  readonly tls?:
    | {
        readonly caFile?: string | undefined;
        readonly certFile?: string | undefined;
        readonly keyFile?: string | undefined;
        readonly serverName?: string | undefined;
      }
    | undefined;
  /** Number of the database; 0 in a Cluster. */
  readonly database: number;
  /** Budget of all nodes that share these servers and this prefix. */
  readonly bytes: number;
  readonly keyPrefix: string;
  /** Parts of the directory, each on one server of a Cluster, each with its share of the budget. Default: 1, Cluster: 16. */
  readonly partitions?: number | undefined;
  readonly partBytes: number;
  /** Connections to one server for values, and commands in flight on one. */
  readonly connections: number;
  readonly depth: number;
  readonly timeLimitMs: number;
  /** By the first digits (hex) of a namespace's digest; the longest match holds, else 'default'. */
  readonly policies: Readonly<Record<string, RedisPolicy>>;
}

/**
 * As `redisSchema` has them. A part and its header fill a size class of jemalloc. Each part costs the server some 10 µs in scripts and
 * round trips, so parts are large; reading goes in smaller pieces (native-pool.ts).
 */
export const defaultSettings = {
  mode: 'single',
  database: 0,
  keyPrefix: 'kvtier:',
  partBytes: 1_048_512,
  connections: 2,
  depth: 3,
  timeLimitMs: 2000,
  policies: {},
} as const;

export interface RedisTierOptions {
  readonly settings: RedisSettings;
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
  readonly slots: ArenaSlots;
  readonly log: Log;
  /** Of the ends of objects. Default: the system's. */
  readonly clock?: Clock;
  /** Open although no server answers now, out of service until one does. Default: refuse, so that a wrong address is noticed. */
  readonly openWithoutServer?: boolean;
  /** How often the changes of other nodes are asked for. */
  readonly pollMs?: number;
  /** How long a write may take before its reservation is given back by others. */
  readonly leaseMs?: number;
  /** Writes that may wait or be in flight; more are refused. */
  readonly maxPendingBytes?: number;
  /** Called at named steps; tests stop the process there. */
  readonly onStep?: (step: RedisStep) => void;
  /** 'node': values by Node's sockets, too, where they would move in native code. For simulations, which exchange those. */
  readonly transport?: 'native' | 'node';
}

/** Named steps of a write: reserved, all parts sent and answered, entry written. */
export type RedisStep = 'redis.write.reserved' | 'redis.write.parts' | 'redis.write.committed';

export interface ServerAddress extends RedisAddress {
  readonly isTls: boolean;
  readonly username: string | undefined;
  readonly password: string | undefined;
}

/** The servers of a configuration. KvError CONFIG. */
export function parseServers(settings: RedisSettings): ServerAddress[] {
  const bad = (server: string, why: string): KvError =>
    new KvError(
      'CONFIG',
      `redis: ${withoutPassword(server)} ${why}; write redis://host:port, rediss://host:port or unix:/path`,
    );
  const servers = settings.servers.map((server): ServerAddress => {
    let url: URL;
    try {
      url = new URL(server);
    } catch {
      throw bad(server, 'is not a URL');
    }
    const username = url.username === '' ? undefined : decodeURIComponent(url.username);
    const password = url.password === '' ? undefined : decodeURIComponent(url.password);
    if (url.protocol === 'unix:') {
      if (settings.mode !== 'single') throw bad(server, `is a Unix socket, which a ${settings.mode} has not`);
      return { path: url.pathname, isTls: false, username, password };
    }
    if (url.protocol !== 'redis:' && url.protocol !== 'rediss:') throw bad(server, `has the scheme ${url.protocol}`);
    if (url.hostname === '') throw bad(server, 'names no host');
    if (url.pathname !== '' && url.pathname !== '/')
      throw bad(server, 'has a path (the database has an option of its own)');
    const host = url.hostname.replace(/^\[(.*)\]$/, '$1');
    return { host, port: Number(url.port || 6379), isTls: url.protocol === 'rediss:', username, password };
  });
  if (servers.length === 0) throw new KvError('CONFIG', 'redis: no server is named; give servers');
  if (settings.mode === 'single' && servers.length > 1) {
    throw new KvError('CONFIG', `redis: ${servers.length} servers and mode single; set mode to cluster or sentinel`);
  }
  if (servers.some(({ isTls }) => isTls !== servers[0]!.isTls)) {
    throw new KvError('CONFIG', 'redis: some servers with TLS and some without; use rediss: for all of them');
  }
  if (settings.mode === 'sentinel' && settings.masterName === undefined) {
    throw new KvError('CONFIG', 'redis: mode sentinel without a masterName; name the master that the sentinels watch');
  }
  if (settings.mode === 'cluster' && settings.database !== 0) {
    throw new KvError('CONFIG', `redis: database ${settings.database} in a cluster, which has 0 only; leave it out`);
  }
  return servers;
}

/** User and password for the servers. KvError CONFIG. */
export function credentialsOf(settings: RedisSettings, first: ServerAddress) {
  const fromFile =
    settings.passwordFile === undefined ? undefined : readText(settings.passwordFile, 'passwordFile').trim();
  return {
    username: settings.username ?? first.username,
    password: settings.password ?? fromFile ?? first.password,
  };
}

/** KvError CONFIG when a file cannot be read. */
export function tlsOf(settings: RedisSettings, isTls: boolean): TlsOptions | undefined {
  const { caFile, certFile, keyFile, serverName } = settings.tls ?? {};
  if (!isTls) {
    if (settings.tls === undefined) return undefined;
    throw new KvError('CONFIG', 'redis: tls is configured, but the servers begin with redis:; write rediss:');
  }
  return {
    ...(caFile === undefined ? {} : { ca: readText(caFile, 'tls.caFile') }),
    ...(certFile === undefined ? {} : { cert: readText(certFile, 'tls.certFile') }),
    ...(keyFile === undefined ? {} : { key: readText(keyFile, 'tls.keyFile') }),
    ...(serverName === undefined ? {} : { servername: serverName }),
  };
}

export function policyOf(policies: RedisSettings['policies'], namespace: Namespace): RedisPolicy {
  const digest = Buffer.from(namespace.digest).toString('hex');
  const names = Object.keys(policies).filter((name) => name !== 'default' && digest.startsWith(name));
  const longest = names.sort((a, b) => b.length - a.length)[0];
  return policies[longest ?? 'default'] ?? {};
}

function readText(file: string, option: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new KvError('CONFIG', `redis: ${option} cannot be read (${(error as Error).message}); name a readable file`);
  }
}

function withoutPassword(server: string): string {
  return server.replace(/\/\/[^@/]*@/, '//');
}
