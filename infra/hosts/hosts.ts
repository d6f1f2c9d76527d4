/**
 * Hosts on one machine, for tests and measurements: each in a network namespace of its own, all on one bridge, which has a namespace
 * of its own as well. What a host sends and what it gets is shaped by tbf, packets are dropped by nftables. Root only.
 *
 *     host a [eth0 10.80.0.1] ══veth══ [p0 ┐
 *     host b [eth0 10.80.0.2] ══veth══ [p1 ┤ bridge ]     the machine's own network is not touched
 *
 * Files, Unix sockets and shared memory are those of the machine. Invariant: `close` (and this process's end) leaves no namespace and
 * no process in one; what a killed process has left is removed by the next one that opens hosts.
 */
import { type ChildProcess, execFile, execFileSync, type SpawnOptions, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const run = promisify(execFile);
const prefix = 'kvthost';
const spaceForm = new RegExp(`^${prefix}-(\\d+)-(\\d+)-`);
const spacesDir = '/var/run/netns';
const slowWay = fileURLToPath(new URL('./slow-way.mjs', import.meta.url));
const mostHosts = 200;
/** tbf drops what would wait longer. */
const queueMs = 50;
/** How long a process that ends waits for those that it killed, and how often it looks. */
const [endMs, lookMs] = [5_000, 10];
const still = new Int32Array(new SharedArrayBuffer(4));
/** Of a bucket: what a shaped device may send at once. A packet of 64 KiB has to fit; more only blurs the rate. */
const leastBurstBytes = 128 << 10;

export interface HostsOptions {
  /** Of each host's link, each way; absent: as fast as the machine. */
  readonly gbit?: number;
}

/** Why there can be no hosts here, in one line; undefined: there can. */
export function hostsMissing(): string | undefined {
  if (process.getuid?.() !== 0) return 'hosts in network namespaces need root';
  const inPath = (name: string): boolean =>
    (process.env.PATH ?? '').split(':').some((folder) => existsSync(`${folder}/${name}`));
  for (const [name, debian] of [
    ['ip', 'iproute2'],
    ['tc', 'iproute2'],
    ['nft', 'nftables'],
    ['setpriv', 'util-linux'],
  ] as const) {
    if (!inPath(name)) return `hosts in network namespaces need "${name}": apt-get install ${debian}`;
  }
  const probe = `${ownPrefix()}probe`;
  const within = (...command: string[]): void =>
    void execFileSync('ip', ['netns', 'exec', probe, ...command], { stdio: ['ignore', 'ignore', 'pipe'] });
  try {
    execFileSync('ip', ['netns', 'add', probe], { stdio: ['ignore', 'ignore', 'pipe'] });
    within('ip', 'link', 'add', 'p0', 'type', 'veth', 'peer', 'name', 'p1');
    within('ip', 'link', 'add', 'br0', 'type', 'bridge');
    within('tc', 'qdisc', 'add', 'dev', 'p0', 'root', ...shape(1));
    within('nft', 'table inet wire { chain in { type filter hook input priority 0; }; }');
    return undefined;
  } catch (error) {
    return `hosts in network namespaces are not permitted here: ${(error as Error).message.trim().split('\n').at(-1)}`;
  } finally {
    removeSpaces([probe]);
  }
}

/** @throws Error of the command that failed; nothing is left then */
export async function hosts<Name extends string>(
  names: readonly Name[],
  options: HostsOptions = {},
): Promise<Hosts<Name>> {
  removeSpaces(spacesOfTheDead());
  const made = new Hosts(names);
  try {
    await made.open(options);
    return made;
  } catch (error) {
    await made.close();
    throw error;
  }
}

let opened = 0;

export class Hosts<Name extends string> {
  readonly #names: readonly Name[];
  readonly #prefix: string;
  readonly #wire: string;
  /** nftables rules by host, without the verdict. */
  readonly #drops = new Map<Name, Map<string, string>>();
  readonly #children = new Set<ChildProcess>();
  #slowWays = 0;
  readonly #onExit = (): void => removeSpaces(this.#spaces());

  constructor(names: readonly Name[]) {
    if (names.length > mostHosts) throw new Error(`hosts: ${names.length} are more than ${mostHosts}`);
    if (new Set(names).size < names.length || !names.every((name) => /^[a-z][a-z0-9]{0,14}$/.test(name)))
      throw new Error(`hosts: ${names.join(', ')}: not different short names`);
    this.#names = names;
    this.#prefix = `${ownPrefix()}${opened++}-`;
    this.#wire = `${this.#prefix}wire.`;
    process.once('exit', this.#onExit);
  }

  /** Of `hosts`. */
  async open({ gbit }: HostsOptions): Promise<void> {
    await ip('netns', 'add', this.#wire);
    await ip('-n', this.#wire, 'link', 'add', 'br0', 'type', 'bridge');
    await ip('-n', this.#wire, 'link', 'set', 'br0', 'up');
    for (const name of this.#names) {
      const space = this.space(name);
      const port = this.#port(name);
      await ip('netns', 'add', space);
      await ip('link', 'add', port, 'netns', this.#wire, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', space);
      await ip('-n', this.#wire, 'link', 'set', port, 'master', 'br0', 'up');
      await ip('-n', space, 'addr', 'add', `${this.address(name)}/24`, 'dev', 'eth0');
      for (const device of ['lo', 'eth0']) await ip('-n', space, 'link', 'set', device, 'up');
      await inSpace(space, 'nft', 'table inet wire { chain in { type filter hook input priority 0; }; }');
    }
    if (gbit !== undefined) await this.rate(gbit);
  }

  /** Name of its network namespace. */
  space = (name: Name): string => `${this.#prefix}${name}`;

  address = (name: Name): string => `10.80.0.${1 + this.#names.indexOf(name)}`;

  /** Runs `command` on a host; it is killed with this process. */
  spawn(name: Name, command: readonly string[], options: SpawnOptions = {}): ChildProcess {
    const [program, ...args] = this.prefix(name, command);
    const child = spawn(program!, args, options);
    this.#children.add(child);
    child.once('close', () => this.#children.delete(child));
    return child;
  }

  /** `command` as it has to be said on the machine to run on that host; what is spawned so is that process itself. */
  prefix(name: Name, command: readonly string[] = []): string[] {
    return ['setpriv', '--pdeathsig', 'KILL', 'ip', 'netns', 'exec', this.space(name), ...command];
  }

  /** Of each host's link, each way; null: as fast as the machine. */
  async rate(gbit: number | null, names: readonly Name[] = this.#names): Promise<void> {
    for (const name of names) {
      for (const [space, device] of [
        [this.space(name), 'eth0'],
        [this.#wire, this.#port(name)],
      ] as const) {
        const at = ['dev', device, 'root'];
        if (gbit === null)
          await inSpace(space, 'tc', 'qdisc', 'del', ...at).catch(() => {}); // it was not shaped
        else await inSpace(space, 'tc', 'qdisc', 'replace', ...at, ...shape(gbit));
      }
    }
  }

  /** Nothing passes between these two, and neither is told: a cable that is cut somewhere. Without `other`: between it and all. */
  async cut(name: Name, other?: Name): Promise<void> {
    await this.lose(100, name, other);
  }

  async heal(name: Name, other?: Name): Promise<void> {
    await this.lose(0, name, other);
  }

  /** Of the packets between these two, or between `name` and all, each way; 0 to 100. */
  async lose(percent: number, name: Name, other?: Name): Promise<void> {
    const others = other === undefined ? this.#names.filter((each) => each !== name) : [other];
    for (const each of others) {
      await this.#drop(name, each, percent);
      await this.#drop(each, name, percent);
    }
  }

  async #drop(at: Name, from: Name, percent: number): Promise<void> {
    const rules = this.#drops.get(at) ?? new Map<string, string>();
    this.#drops.set(at, rules);
    const which = percent < 100 ? `numgen random mod 100 < ${percent} ` : '';
    if (percent === 0) rules.delete(from);
    else rules.set(from, `ip saddr ${this.address(from)} ${which}drop`);
    const lines = [...rules.values()].map((rule) => `add rule inet wire in ${rule}`);
    await inSpace(this.space(at), 'nft', ['flush chain inet wire in', ...lines].join('; '));
  }

  /**
   * A second way from host `from` to host `to` for connections to these ports, `ms` longer in each direction: the address at which
   * `from` finds it. It is gone with the hosts.
   */
  async slowWay(from: Name, to: Name, ports: readonly number[], ms: number): Promise<string> {
    const address = `127.0.1.${++this.#slowWays}`;
    const args = [slowWay, address, this.address(to), String(ms), ...ports.map(String)];
    const proxy = this.spawn(from, [process.execPath, ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
    const said = await Promise.race([once(proxy.stdout!, 'data'), once(proxy, 'exit')]);
    if (String(said[0]).trim() !== 'up') throw new Error(`hosts: no slow way from ${from} to ${to}`);
    return address;
  }

  async close(): Promise<void> {
    process.off('exit', this.#onExit);
    const ended = [...this.#children].map((child) => once(child, 'close'));
    removeSpaces(this.#spaces());
    for (const child of this.#children) child.kill('SIGKILL'); // it may not be in its namespace yet
    await Promise.all(ended);
  }

  /** As `close`, at once: for a process that ends. What ran on the hosts holds no file any more then, or `endMs` have passed. */
  end(): void {
    const pids = [...this.#children].map(({ pid }) => pid!);
    removeSpaces(this.#spaces());
    for (const pid of pids) kill(pid);
    const byMs = performance.now() + endMs;
    while (pids.some(isAlive) && performance.now() < byMs) Atomics.wait(still, 0, 0, lookMs);
  }

  #port = (name: Name): string => `p${this.#names.indexOf(name)}`;

  #spaces = (): string[] => [...this.#names.map(this.space), this.#wire];
}

const ip = (...args: readonly string[]): Promise<unknown> => run('ip', args);
const inSpace = (space: string, ...command: readonly string[]): Promise<unknown> =>
  run('ip', ['netns', 'exec', space, ...command]);

function shape(gbit: number): string[] {
  const burst = Math.max(leastBurstBytes, Math.round((gbit * 1e9) / 8 / 1000));
  return ['tbf', 'rate', `${Math.round(gbit * 1000)}mbit`, 'burst', String(burst), 'latency', `${queueMs}ms`];
}

/** Of namespaces of this process: number and start, so that another process of this number is not taken for it. */
const ownPrefix = (): string => `${prefix}-${process.pid}-${startOf(process.pid)}-`;

/** When a process started, in ticks since the machine did; undefined: there is none. */
function startOf(pid: number): string | undefined {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return stat.slice(stat.lastIndexOf(')') + 2).split(' ')[19];
  } catch {
    return undefined;
  }
}

function spacesOfTheDead(): string[] {
  const names = existsSync(spacesDir) ? readdirSync(spacesDir) : [];
  return names.filter((name) => {
    const [, pid, start] = spaceForm.exec(name) ?? [];
    return pid !== undefined && startOf(Number(pid)) !== start;
  });
}

/** With all processes in them. What cannot be removed is somebody else's by now. */
function removeSpaces(names: readonly string[]): void {
  for (const name of names) {
    if (!existsSync(`${spacesDir}/${name}`)) continue;
    try {
      const pids = execFileSync('ip', ['netns', 'pids', name], { encoding: 'latin1' }).trim().split('\n');
      for (const pid of pids) if (/^\d+$/.test(pid)) kill(Number(pid));
      execFileSync('ip', ['netns', 'del', name], { stdio: 'ignore' });
    } catch {
      // another one that opens hosts was faster
    }
  }
}

/** One that has ended, and that nobody has asked for, is none. */
function isAlive(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return stat[stat.lastIndexOf(')') + 2] !== 'Z';
  } catch {
    return false;
  }
}

function kill(pid: number): void {
  try {
    process.kill(pid, 'SIGKILL');
  } catch {
    // it has just ended
  }
}
