/**
 * Which Redis servers, and what to show them: plain data, as @kvtier/config yields it, and who is told of it. Invariant: what cannot work is a KvError
 * CONFIG of one line, here or at the first connection, and never shows a password.
 */
import type { ConnectionOptions as TlsOptions } from 'node:tls';
import { KvError } from '@kvtier/errors';

export interface RedisServers {
  readonly mode: 'single' | 'sentinel' | 'cluster';
  /** redis://host:port, rediss://host:port (TLS), unix:/path. Sentinel: the sentinels. Cluster: some of the nodes. */
  readonly servers: readonly string[];
  /** Sentinel: the name of the master. */
  readonly masterName?: string | undefined;
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  /** A file that holds the password. */
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
  /** Of these keys in the configuration, for a line that names a file: "redis" (the default), "membership.redis". */
  readonly place?: string | undefined;
  /** How often the files are looked at for new ones. */
  readonly reloadMs?: number | undefined;
  /** Why the files that lie there are not in use (one line); undefined: they are. */
  readonly onProblem?: ((why: string | undefined) => void) | undefined;
  /** Number of the database; 0 in a Cluster. */
  readonly database: number;
  /** Of one command, and of making a connection. */
  readonly timeLimitMs: number;
}

/** Where a server listens. */
export interface RedisAddress {
  readonly host?: string | undefined;
  readonly port?: number | undefined;
  readonly path?: string | undefined;
  /** What its certificate names, where `host` is not that. */
  readonly tlsName?: string | undefined;
}

export interface RedisLogin {
  readonly username?: string | undefined;
  readonly password?: string | undefined;
  /** Not in a Cluster. */
  readonly database?: number | undefined;
  readonly tls?: TlsOptions | undefined;
  readonly connectTimeoutMs: number;
}

export interface ServerAddress extends RedisAddress {
  readonly isTls: boolean;
  readonly username: string | undefined;
  readonly password: string | undefined;
}

/** The servers of a configuration. KvError CONFIG. */
export function parseServers(settings: RedisServers): ServerAddress[] {
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
    const decoded = (text: string, where = 'user or password'): string | undefined => {
      if (text === '') return undefined;
      try {
        return decodeURIComponent(text);
      } catch {
        throw bad(server, `has a % in its ${where} that must be written %25`);
      }
    };
    const [username, password] = [decoded(url.username), decoded(url.password)];
    if (url.search !== '' || url.hash !== '') {
      const remedy = 'the database has an option of its own; in a password or a path write %3F and %23';
      throw bad(server, `is followed by ? or # (${remedy})`);
    }
    if (url.protocol === 'unix:') {
      if (settings.mode !== 'single') throw bad(server, `is a Unix socket, which a ${settings.mode} has not`);
      return { path: decoded(url.pathname, 'path'), isTls: false, username, password };
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

function withoutPassword(server: string): string {
  return server.replace(/\/\/[^@/]*@/, '//').replace(/[?#].*$/, ''); // a query may name one, too
}
