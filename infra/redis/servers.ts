/**
 * Real Redis servers for tests and by hand: one, one with TLS and an ACL user, a Cluster, or a master under Sentinels. Free ports of
 * the loopback, a temporary folder each. Invariant: `stop` (and this process's end) leaves no process, port or folder.
 */
import { type ChildProcess, execFile, execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect as connectTls } from 'node:tls';
import { promisify } from 'node:util';
import { freePort } from '../ports.ts';

const run = promisify(execFile);
/** Of a machine that does many other things. */
const readyMs = 60_000;
const host = '127.0.0.1';

export interface ServerOptions {
  /** Lines of redis.conf. */
  readonly config?: readonly string[];
  readonly port?: number;
  /** Keep the data over a restart (an append-only file, written at every command). */
  readonly persistent?: boolean;
  /** Speak TLS and nothing else, with this certificate, also between servers. */
  readonly tls?: Certificate | undefined;
}

/** Files, PEM; who trusts the certificate itself trusts its server. */
export interface Certificate {
  readonly keyFile: string;
  readonly certFile: string;
}

const living = new Set<RedisServer>();
process.on('exit', () => {
  for (const server of living) server.killNow();
});

/** One redis-server (or redis-sentinel) process. */
export class RedisServer {
  readonly port: number;
  readonly dir: string;
  readonly program: string;
  readonly #config: string;
  readonly #tls: Certificate | undefined;
  #child: ChildProcess | undefined;

  private constructor(program: string, port: number, dir: string, config: readonly string[], tls?: Certificate) {
    this.program = program;
    this.port = port;
    this.dir = dir;
    this.#config = config.join('\n');
    this.#tls = tls;
  }

  static async start(options: ServerOptions = {}, program = 'redis-server'): Promise<RedisServer> {
    const port = options.port ?? (await freePort());
    const dir = mkdtempSync(join(tmpdir(), 'kvtier-redis-'));
    const isSentinel = program === 'redis-sentinel';
    const { tls } = options;
    const config = [
      ...(tls === undefined ? [`port ${port}`] : ['port 0', `tls-port ${port}`, ...tlsLines(tls)]),
      `bind ${host}`,
      `dir ${dir}`,
      ...(isSentinel ? [] : ['save ""', `appendonly ${options.persistent ? 'yes' : 'no'}`, 'appendfsync always']),
      ...(options.config ?? []),
    ];
    const server = new RedisServer(program, port, dir, config, tls);
    try {
      await server.start();
    } catch (error) {
      await server.stop();
      throw error;
    }
    return server;
  }

  get pid(): number {
    return this.#child!.pid!;
  }

  get url(): string {
    return `${this.#tls === undefined ? 'redis' : 'rediss'}://${host}:${this.port}`;
  }

  /** Again, after `kill` or `end`. */
  async start(): Promise<void> {
    const file = join(this.dir, 'server.conf');
    writeFileSync(file, `${this.#config}\n`); // Sentinels and Clusters write to theirs
    // A group of its own, as Ctrl-C is for us; and it ends with us, should we be killed.
    const args = ['--pdeathsig', 'KILL', this.program, file];
    const child = spawn('setpriv', args, { stdio: ['ignore', 'pipe', 'pipe'], detached: true });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (text) => {
        output = (output + text).slice(-4000);
      });
    }
    this.#child = child;
    living.add(this);
    const failed = new Promise<never>((_, reject) => {
      child.once('error', (error) =>
        reject(new Error(`${this.program}: ${error.message}; apt-get install redis-server redis-sentinel`)),
      );
      child.once('exit', (code) => reject(new Error(`${this.program} ended (${code}): ${output}`)));
    });
    failed.catch(() => {});
    await Promise.race([failed, until(() => listens(this.port, this.#tls), `${this.program} on ${this.port}`)]);
  }

  signal(name: NodeJS.Signals): void {
    this.#child?.kill(name);
  }

  /** SIGKILL, awaited. */
  async kill(): Promise<void> {
    const child = this.#child;
    if (child === undefined) return;
    this.#child = undefined;
    living.delete(this);
    if (child.exitCode !== null || child.signalCode !== null) return;
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill('SIGCONT');
    child.kill('SIGKILL');
    await ended;
  }

  killNow(): void {
    this.#child?.kill('SIGKILL');
    rmSync(this.dir, { recursive: true, force: true });
  }

  /** The end: process and folder. */
  async stop(): Promise<void> {
    await this.kill();
    rmSync(this.dir, { recursive: true, force: true });
  }

  /** One command, by redis-cli; its output. */
  async cli(...args: readonly string[]): Promise<string> {
    const place = ['-h', host, '-p', String(this.port), ...cliTls(this.#tls)];
    const { stdout } = await run('redis-cli', [...place, ...args], { timeout: 10_000 });
    return stdout.trimEnd();
  }

  /** Several, over one connection and without a process; their replies, as the protocol writes them. */
  ask(...commands: readonly string[]): Promise<string> {
    return new Promise((resolve, reject) => {
      const socket = connectedTo(this.port, this.#tls);
      const what = `${this.program} on ${this.port}: ${commands.join(', ')}`;
      let replies = '';
      socket.on('data', (data) => {
        replies += String(data);
      });
      socket.setTimeout(10_000, () => socket.destroy(new Error(`${what}: no answer within 10 s`)));
      socket.once('error', reject);
      socket.once('end', () => (/^-/m.test(replies) ? reject(new Error(`${what}: ${replies}`)) : resolve(replies)));
      socket.write([...commands, 'QUIT', ''].join('\r\n'));
    });
  }
}

// Whoever is connected to is a server of our own, by the loopback.
const connectedTo = (port: number, tls: Certificate | undefined): Socket =>
  tls === undefined ? connect(port, host) : connectTls({ port, host, rejectUnauthorized: false });

const tlsLines = ({ keyFile, certFile }: Certificate): string[] => [
  ...[`tls-key-file ${keyFile}`, `tls-cert-file ${certFile}`, `tls-ca-cert-file ${certFile}`],
  ...['tls-auth-clients no', 'tls-cluster yes', 'tls-replication yes'],
];
const cliTls = (tls: Certificate | undefined): string[] =>
  tls === undefined ? [] : ['--tls', '--cacert', tls.certFile];

export interface ServerGroup {
  /** As the tier's settings want them. */
  readonly urls: readonly string[];
  readonly servers: readonly RedisServer[];
  stop(): Promise<void>;
}

/** What a user of the tier may do (docs/operating.md, "Redis"), as rules of `ACL SETUSER`. */
export function aclRules(keyPrefix: string): string {
  const commands = [
    ...['ping', 'auth', 'hello', 'select', 'info', 'asking', 'readonly', 'client|setname', 'script|load'],
    ...[
      'evalsha',
      'eval',
      'type',
      'exists',
      'time',
      'getrange',
      'set',
      'mset',
      'del',
      'unlink',
      'rename',
      'pexpireat',
      'scan',
      'hscan',
    ],
    ...[
      'hget',
      'hmget',
      'hset',
      'hdel',
      'hlen',
      'hincrby',
      'zadd',
      'zrem',
      'zcard',
      'zmscore',
      'zrange',
      'zrangebyscore',
    ],
    ...['xadd', 'xrange', 'cluster|slots', 'cluster|info', 'cluster|shards'],
  ];
  return `~${keyPrefix}* -@all ${commands.map((name) => `+${name}`).join(' ')}`;
}

/** What who announces members, or reads them, may do (docs/cluster.md, "Redis"), as rules of `ACL SETUSER`. */
export function memberAclRules(keyPrefix: string): string {
  const commands = [
    ...['ping', 'auth', 'hello', 'select', 'info', 'asking', 'readonly', 'client|setname', 'evalsha', 'eval', 'time'],
    ...['get', 'set', 'hget', 'hset', 'hdel', 'hmget', 'zadd', 'zrem', 'zcount', 'zscore', 'zrangebyscore'],
    ...['cluster|slots', 'cluster|info', 'cluster|shards'],
  ];
  return `~${keyPrefix}{members}* -@all ${commands.map((name) => `+${name}`).join(' ')}`;
}

/** A certificate of its own for localhost; `dir`: where it may be written. */
export function makeCertificate(dir: string): Certificate {
  const [keyFile, certFile] = [join(dir, 'key.pem'), join(dir, 'cert.pem')];
  const kind = ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2'];
  const names = ['-subj', '/CN=localhost', '-addext', `subjectAltName=DNS:localhost,IP:${host}`];
  execFileSync('openssl', [...kind, '-keyout', keyFile, '-out', certFile, ...names], { stdio: 'ignore' });
  return { keyFile, certFile };
}

/** One server that speaks TLS only, with an ACL user of its own. `caFile`: whom to trust. */
export async function startTls(acl: string): Promise<ServerGroup & { caFile: string; server: RedisServer }> {
  const dir = mkdtempSync(join(tmpdir(), 'kvtier-redis-tls-'));
  const tls = makeCertificate(dir);
  const server = await RedisServer.start({ tls, config: [`user kvtier on >secret ${acl}`] });
  return {
    urls: [server.url],
    servers: [server],
    server,
    caFile: tls.certFile,
    stop: async () => {
      await server.stop();
      rmSync(dir, { recursive: true, force: true });
    },
  };
}

/** `masters` masters with `replicas` replicas each; every slot served when it resolves. */
export async function startCluster(masters = 3, replicas = 1, tls?: Certificate): Promise<ServerGroup> {
  const config = [
    'cluster-enabled yes',
    'cluster-node-timeout 15000', // a server that takes longer than that to answer another's first greeting is not asked again
    'cluster-config-file nodes.conf',
    'repl-diskless-sync-delay 0',
  ];
  const servers = await Promise.all(
    Array.from({ length: masters * (1 + replicas) }, () => RedisServer.start({ config, tls })),
  );
  const stop = async (): Promise<void> => {
    await Promise.all(servers.map((server) => server.stop()));
  };
  try {
    await joinCluster(servers, masters);
    const isWhole = async (server: RedisServer): Promise<boolean> =>
      (await server.ask('cluster info')).includes('cluster_state:ok');
    const hasReplica = async (server: RedisServer): Promise<boolean> => {
      const info = await server.ask('info replication');
      return info.includes('role:master')
        ? Number(/connected_slaves:(\d+)/.exec(info)?.[1]) >= replicas
        : info.includes('master_link_status:up');
    };
    await until(async () => (await Promise.all(servers.map(isWhole))).every(Boolean), 'the cluster');
    await until(async () => (await Promise.all(servers.map(hasReplica))).every(Boolean), 'the replicas');
    await Promise.all(servers.map((server) => server.ask('config set cluster-node-timeout 1000')));
  } catch (error) {
    await stop();
    throw error;
  }
  return { urls: servers.map(({ url }) => url), servers, stop };
}

/**
 * Makes one Cluster of servers that know nobody, the first `masters` with equal shares of the slots. As `redis-cli --cluster create`
 * does, which looks only once a second whether they have met.
 */
async function joinCluster(servers: readonly RedisServer[], masters: number): Promise<void> {
  const slots = 16_384;
  const first = (master: number): number => Math.floor((master * slots) / masters);
  for (const [at, server] of servers.entries()) {
    // Different epochs: who finds another master of its own takes a new one, and tells all others again.
    const its = [`cluster set-config-epoch ${at + 1}`];
    if (at < masters) its.push(`cluster addslotsrange ${first(at)} ${first(at + 1) - 1}`);
    // Each meets each: nobody waits for what others tell of a third.
    await server.ask(...its, ...servers.slice(0, at).map(({ port }) => `cluster meet ${host} ${port}`));
  }
  /** Ids of those that it knows, its own first. */
  const knownOf = async (server: RedisServer): Promise<string[]> => {
    const rows = (await server.ask('cluster nodes')).match(/^[0-9a-f]{40} .*$/gm) ?? [];
    const met = rows.filter((row) => !/handshake|noaddr/.test(row));
    return met
      .toSorted((a, b) => Number(b.includes('myself')) - Number(a.includes('myself')))
      .map((row) => row.slice(0, 40));
  };
  const knowsAll = async (server: RedisServer): Promise<boolean> => (await knownOf(server)).length === servers.length;
  await until(async () => (await Promise.all(servers.map(knowsAll))).every(Boolean), 'the servers of a Cluster');
  const ids = (await Promise.all(servers.slice(0, masters).map(knownOf))).map(([own]) => own!);
  const replicas = servers.slice(masters);
  await Promise.all(replicas.map((server, at) => server.ask(`cluster replicate ${ids[at % masters]}`)));
}

/** A slot of a Cluster on its way from one master to another, as `redis-cli --cluster reshard` moves it, step by step. */
export class SlotMove {
  readonly #cluster: ServerGroup;
  readonly #source: RedisServer;
  readonly #target: RedisServer;
  readonly #slot: string;

  private constructor(cluster: ServerGroup, source: RedisServer, target: RedisServer, slot: string) {
    this.#cluster = cluster;
    this.#source = source;
    this.#target = target;
    this.#slot = slot;
  }

  /** From now on the source answers ASK for the slot's keys that it does not have. */
  static async begin(cluster: ServerGroup, source: RedisServer, target: RedisServer, slot: string): Promise<SlotMove> {
    await target.cli('cluster', 'setslot', slot, 'importing', await source.cli('cluster', 'myid'));
    await source.cli('cluster', 'setslot', slot, 'migrating', await target.cli('cluster', 'myid'));
    return new SlotMove(cluster, source, target, slot);
  }

  async keys(): Promise<string[]> {
    return (await this.#source.cli('cluster', 'getkeysinslot', this.#slot, '100000')).split('\n').filter(Boolean);
  }

  async move(keys: readonly string[]): Promise<void> {
    await this.#source.cli('migrate', host, String(this.#target.port), '', '0', '5000', 'keys', ...keys);
  }

  /** Moves the rest; from now on all answer MOVED. */
  async end(): Promise<void> {
    await this.move(await this.keys());
    const owner = await this.#target.cli('cluster', 'myid');
    const others = this.#cluster.servers.filter((server) => server !== this.#source && server !== this.#target);
    for (const server of [this.#target, this.#source, ...others])
      await server.cli('cluster', 'setslot', this.#slot, 'node', owner);
  }
}

/** A master named "kvtier", a replica, and three Sentinels that agree by two. `servers`: master, replica, then the Sentinels. */
export async function startSentinel(): Promise<ServerGroup> {
  const master = await RedisServer.start({ config: ['repl-diskless-sync-delay 0'] });
  const replica = await RedisServer.start({
    config: [`replicaof ${host} ${master.port}`, 'repl-diskless-sync-delay 0'],
  });
  const config = [
    `sentinel monitor kvtier ${host} ${master.port} 2`,
    ...['sentinel down-after-milliseconds kvtier 1000', 'sentinel failover-timeout kvtier 3000'],
  ];
  const sentinels = await Promise.all([1, 2, 3].map(() => RedisServer.start({ config }, 'redis-sentinel')));
  const servers = [master, replica, ...sentinels];
  const stop = async (): Promise<void> => {
    await Promise.all(servers.map((server) => server.stop()));
  };
  try {
    const knows = async (sentinel: RedisServer): Promise<boolean> => {
      const text = await sentinel.cli('sentinel', 'master', 'kvtier');
      return /num-slaves\n1\n/.test(text) && /num-other-sentinels\n2\n/.test(text);
    };
    await until(
      async () => (await replica.cli('info', 'replication')).includes('master_link_status:up'),
      'the replica',
    );
    await until(async () => (await Promise.all(sentinels.map(knows))).every(Boolean), 'the sentinels');
  } catch (error) {
    await stop();
    throw error;
  }
  return { urls: sentinels.map(({ url }) => url), servers, stop };
}

function listens(port: number, tls: Certificate | undefined): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connectedTo(port, tls);
    const end = (isThere: boolean): void => {
      socket.destroy();
      resolve(isThere);
    };
    socket.once(tls === undefined ? 'connect' : 'secureConnect', () => socket.write('PING\r\n'));
    socket.once('data', (data) => end(!String(data).startsWith('-LOADING')));
    socket.once('error', () => end(false));
  });
}

/** Asks until it is so. */
export async function until(isSo: () => boolean | Promise<boolean>, what: string, limitMs = readyMs): Promise<void> {
  const endMs = performance.now() + limitMs;
  while (!(await isSo())) {
    if (performance.now() > endMs) throw new Error(`${what}: not ready within ${limitMs} ms`);
    await new Promise((resolve) => setTimeout(resolve, 25));
  }
}
