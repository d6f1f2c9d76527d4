/**
 * A real S3 server for tests and by hand: Ceph's RADOS Gateway over one monitor and one store in memory, on free ports of the
 * loopback, in a temporary folder. Ready in 2 to 4 seconds. Invariant: `stop` (and this process's end) leaves no process, port or
 * folder: all daemons run in the foreground and end with us.
 */
import { type ChildProcess, execFile, execFileSync, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { freePort } from '../ports.ts';
import { stopProcess } from '../stopped.ts';

const run = promisify(execFile);
const host = '127.0.0.1';
const readyMs = 90_000;

/** The only user of the server. */
export const s3Credentials = { accessKeyId: 'kvtier-test', secretAccessKey: 'kvtier-test-secret' };

const living = new Set<S3Server>();
process.on('exit', () => {
  for (const server of living) server.killNow();
});

export class S3Server {
  readonly dir: string;
  readonly port: number;
  readonly #config: string;
  readonly #children = new Map<string, ChildProcess>();
  #output = '';

  private constructor(dir: string, port: number, config: string) {
    this.dir = dir;
    this.port = port;
    this.#config = config;
  }

  static async start(options: { readonly port?: number; readonly storeBytes?: number } = {}): Promise<S3Server> {
    const dir = mkdtempSync(join(tmpdir(), 'kvtier-s3-'));
    const [monV1, monV2] = [await freePort(), await freePort()];
    const port = options.port ?? (await freePort());
    const server = new S3Server(dir, port, join(dir, 'ceph.conf'));
    const storeBytes = options.storeBytes ?? 4 * 2 ** 30;
    writeFileSync(server.#config, configOf(dir, monV1, monV2, port, storeBytes));
    living.add(server);
    try {
      await server.#make(`[v2:${host}:${monV2},v1:${host}:${monV1}]`);
    } catch (error) {
      await server.stop();
      throw new Error(`s3 server: ${(error as Error).message}\n${server.#output}`);
    }
    return server;
  }

  get url(): string {
    return `http://${host}:${this.port}`;
  }

  /** To the process that keeps the objects: stopped, every request hangs at the gateway. */
  signalStore(name: 'SIGSTOP' | 'SIGCONT'): Promise<void> {
    return this.#signal('ceph-osd', name);
  }

  /** To the gateway itself: stopped, the kernel takes connections and nobody answers. */
  signalGateway(name: 'SIGSTOP' | 'SIGCONT'): Promise<void> {
    return this.#signal('radosgw', name);
  }

  async #signal(daemon: string, name: 'SIGSTOP' | 'SIGCONT'): Promise<void> {
    const child = this.#children.get(daemon);
    if (child?.pid === undefined) throw new Error(`${daemon} does not run`);
    if (name === 'SIGSTOP') await stopProcess(child.pid);
    else child.kill(name);
  }

  /** SIGKILL the gateway, awaited; connections are refused from then on. */
  async killGateway(): Promise<void> {
    await this.#kill('radosgw');
  }

  /** Again, after `killGateway`. */
  async startGateway(): Promise<void> {
    this.#daemon('radosgw', ['-n', 'client.rgw']);
    await this.#until(() => answers(this.url), 'radosgw');
  }

  /** The user's secret key is another one; the one before is refused from then on. */
  async setSecret(secretAccessKey: string, accessKeyId = s3Credentials.accessKeyId): Promise<void> {
    await this.#key('create', `--access-key=${accessKeyId}`, `--secret-key=${secretAccessKey}`);
  }

  /** The user has it no more. */
  revoke = (accessKeyId: string): Promise<void> => this.#key('rm', `--access-key=${accessKeyId}`);

  /** The bucket holds no more objects than so many from now on; undefined: as many as there is room for. Deletes go on. */
  async setQuota(bucket: string, objects: number | undefined): Promise<void> {
    const quota = (...args: string[]) =>
      this.#tool('radosgw-admin', ['-n', 'client.rgw', 'quota', ...args, '--quota-scope=bucket', `--bucket=${bucket}`]);
    if (objects === undefined) await quota('disable');
    else {
      await quota('set', `--max-objects=${objects}`);
      await quota('enable');
    }
  }

  async #key(what: string, ...args: readonly string[]): Promise<void> {
    await this.#tool('radosgw-admin', ['-n', 'client.rgw', 'key', what, '--uid=kvtier', '--key-type=s3', ...args]);
  }

  async stop(): Promise<void> {
    await Promise.all([...this.#children.keys()].map((name) => this.#kill(name)));
    living.delete(this);
    rmSync(this.dir, { recursive: true, force: true });
  }

  killNow(): void {
    for (const child of this.#children.values()) child.kill('SIGKILL');
    rmSync(this.dir, { recursive: true, force: true });
  }

  async #make(addresses: string): Promise<void> {
    const keyring = join(this.dir, 'keyring');
    const monmap = join(this.dir, 'monmap');
    for (const path of ['mon/a', 'osd/0', 'rgw', 'log', 'run']) mkdirSync(join(this.dir, path), { recursive: true });
    const keys: [string, ...string[]][] = [
      ['mon.', 'mon', 'allow *'],
      ['client.admin', 'mon', 'allow *', 'osd', 'allow *', 'mgr', 'allow *'],
      ['client.rgw', 'mon', 'allow *', 'osd', 'allow *'],
      ['osd.0', 'mon', 'allow profile osd', 'osd', 'allow *'],
    ];
    for (const [index, [name, ...caps]] of keys.entries()) {
      const capArgs = caps.flatMap((word, at) => (at % 2 === 0 ? ['--cap', word] : [word]));
      const create = index === 0 ? ['--create-keyring'] : [];
      await this.#tool('ceph-authtool', [...create, keyring, '--gen-key', '-n', name, ...capArgs], false);
    }
    const fsid = /fsid = (\S+)/.exec(readFileSync(this.#config, 'utf8'))![1]!;
    await this.#tool('monmaptool', ['--create', '--addv', 'a', addresses, '--fsid', fsid, monmap], false);
    await this.#tool('ceph-mon', ['--mkfs', '-i', 'a', '--monmap', monmap, '--keyring', keyring]);
    this.#daemon('ceph-mon', ['-i', 'a']);
    const store = randomUUID();
    await this.#tool('ceph', ['osd', 'new', store, '0']);
    await this.#tool('ceph-osd', ['-i', '0', '--mkfs', '--osd-uuid', store, '--keyring', keyring]);
    this.#daemon('ceph-osd', ['-i', '0']);
    const isUp = async (): Promise<boolean> => (await this.#tool('ceph', ['osd', 'stat'])).includes('1 up');
    await this.#until(isUp, 'ceph-osd');
    await this.startGateway();
    const { accessKeyId, secretAccessKey } = s3Credentials;
    const user = ['--uid=kvtier', '--display-name=kvtier'];
    const secret = [`--access-key=${accessKeyId}`, `--secret-key=${secretAccessKey}`];
    await this.#tool('radosgw-admin', ['-n', 'client.rgw', 'user', 'create', ...user, ...secret]);
  }

  /** Runs to its end; its output. */
  async #tool(name: string, args: readonly string[], configured = true): Promise<string> {
    const all = configured ? ['-c', this.#config, ...args] : args;
    try {
      return (await run(name, all, { timeout: 60_000 })).stdout;
    } catch (error) {
      throw (error as NodeJS.ErrnoException).code === 'ENOENT' ? missing(name) : error;
    }
  }

  #daemon(name: string, args: readonly string[]): void {
    // A group of its own, as Ctrl-C is for us; and it ends with us, should we be killed.
    const all = ['--pdeathsig', 'KILL', name, '-f', '-c', this.#config, ...args];
    const child = spawn('setpriv', all, { stdio: ['ignore', 'pipe', 'pipe'], detached: true });
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (text) => {
        this.#output = (this.#output + text).slice(-4000);
      });
    }
    child.once('error', (error) => {
      this.#output += `${name}: ${error.message}`;
    });
    this.#children.set(name, child);
  }

  async #until(isSo: () => Promise<boolean>, name: string): Promise<void> {
    const endMs = performance.now() + readyMs;
    while (!(await isSo())) {
      const child = this.#children.get(name);
      if (child?.exitCode != null || child?.signalCode != null) throw new Error(`${name} ended`);
      if (performance.now() > endMs) throw new Error(`${name}: not ready within ${readyMs} ms`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }

  async #kill(name: string): Promise<void> {
    const child = this.#children.get(name);
    this.#children.delete(name);
    if (child?.pid === undefined || child.exitCode !== null || child.signalCode !== null) return;
    const ended = new Promise((resolve) => child.once('exit', resolve));
    child.kill('SIGCONT');
    child.kill('SIGKILL');
    await ended;
    rmSync(join(this.dir, 'run', `client.rgw.asok`), { force: true });
  }
}

const missing = (name: string): Error =>
  new Error(
    `${name} is not installed; apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw ceph-common`,
  );

async function answers(url: string): Promise<boolean> {
  try {
    const reply = await fetch(url, { signal: AbortSignal.timeout(2000) });
    await reply.arrayBuffer();
    return reply.ok;
  } catch {
    return false;
  }
}

/**
 * One monitor, one store without replicas, no manager: what a test needs and no more. A monitor gathers changes for a second before it
 * proposes them; alone it need not, and the dozen pools that a gateway makes one by one are there five times as soon. A gateway that
 * was killed is waited for by the next one, for as long as its watches live: 30 s otherwise.
 */
function configOf(dir: string, monV1: number, monV2: number, port: number, storeBytes: number): string {
  return `[global]
fsid = ${randomUUID()}
mon host = [v2:${host}:${monV2}/0,v1:${host}:${monV1}/0]
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
keyring = ${dir}/keyring
run dir = ${dir}/run
log file = ${dir}/log/$name.log
admin socket = ${dir}/run/$name.asok
pid file = ${dir}/run/$name.pid
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
osd crush chooseleaf type = 0
paxos propose interval = 0.05
paxos min wait = 0.01
osd client watch timeout = 3
objecter tick interval = 0.5
[mon.a]
mon data = ${dir}/mon/a
mon data avail crit = 1
mon cluster log file = ${dir}/log/cluster.log
[osd.0]
osd data = ${dir}/osd/0
osd objectstore = memstore
memstore device bytes = ${storeBytes}
[client.rgw]
rgw data = ${dir}/rgw
rgw frontends = beast endpoint=${host}:${port}
`;
}

export interface Certificate {
  readonly key: string;
  readonly cert: string;
}

/** A certificate of its own for localhost, PEM; `dir`: where openssl may write. */
export function makeCertificate(dir: string): Certificate {
  const [key, cert] = [join(dir, 'key.pem'), join(dir, 'cert.pem')];
  if (!existsSync(cert)) {
    const kind = ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2'];
    const names = ['-subj', '/CN=localhost', '-addext', `subjectAltName=DNS:localhost,IP:${host}`];
    execFileSync('openssl', [...kind, '-keyout', key, '-out', cert, ...names], { stdio: 'ignore' });
  }
  return { key: readFileSync(key, 'utf8'), cert: readFileSync(cert, 'utf8') };
}
