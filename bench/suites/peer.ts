/**
 * Blocks out of one node's arena into another's, over a veth pair between two network namespaces, beside iperf3 over the same
 * pair with that of 1, 2 and 4 streams that it is fastest with, in paired rounds. The giving node is a process of its own in its
 * namespace; so is the fetching one. iperf3 moves one small buffer that stays in the cache, we move arenas that do not: on a
 * machine whose memory is slow, a copy out of and into memory alone is most of the difference.
 * Arena to arena means: found by the index, requested, received into its slot, header and checksum verified.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { existsSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, rate, type Suite, time } from '../figures.ts';
import { isPaced, unpace } from '../unpaced.ts';

const rounds = 5;
const turnMs = 1000;
const streams = 2;
const iperfStreams = [1, 2, 4];
const port = 7411;
const iperfPort = 7412;
const giver = `kvb${process.pid}a`;
const fetcher = `kvb${process.pid}b`;
const worker = fileURLToPath(new URL('../scripts/peer-node.ts', import.meta.url));
const cases = [
  { label: '2m', payloadBytes: 2 << 20, encryption: 'none' },
  { label: '64k', payloadBytes: 64 << 10, encryption: 'none' },
  { label: '2m_tls', payloadBytes: 2 << 20, encryption: 'tls' },
] as const;

const ip = (...args: readonly string[]): void => {
  execFileSync('ip', args, { stdio: ['ignore', 'ignore', 'pipe'] });
};

function makeNamespaces(): void {
  try {
    ip('netns', 'add', giver);
    ip('netns', 'add', fetcher);
    ip('link', 'add', 'veth-a', 'netns', giver, 'type', 'veth', 'peer', 'name', 'veth-b', 'netns', fetcher);
    for (const [space, device, address] of [
      [giver, 'veth-a', '10.77.0.1/24'],
      [fetcher, 'veth-b', '10.77.0.2/24'],
    ] as const) {
      ip('-n', space, 'addr', 'add', address, 'dev', device);
      ip('-n', space, 'link', 'set', device, 'up');
      ip('-n', space, 'link', 'set', 'lo', 'up');
      if (isPaced()) unpace(space);
    }
  } catch (error) {
    throw new KvError('SETUP', `ip netns: not permitted here (${(error as Error).message}); run this suite as root`);
  }
}

const started = new Set<ChildProcess>();
const arenas: string[] = [];

/** What is spawned so is that process itself. */
function inSpace(space: string, command: readonly string[]): ChildProcess {
  const child = spawn('ip', ['netns', 'exec', space, ...command], { stdio: ['pipe', 'pipe', 'inherit'] });
  started.add(child);
  arenas.push(`/dev/shm/kvtier-bench-peer-${child.pid}`);
  child.once('exit', () => started.delete(child));
  return child;
}

/** All that this suite made outside of its scratch folder; also when its process ends by a signal or an error. */
function leave(): void {
  for (const child of started) child.kill('SIGKILL');
  for (const path of arenas) rmSync(path, { force: true }); // of a node that died while it made its own
  for (const space of [giver, fetcher]) {
    if (!existsSync(`/var/run/netns/${space}`)) continue;
    try {
      ip('netns', 'del', space);
    } catch (error) {
      process.stderr.write(
        `kvtier: ${space}: was not removed (${(error as Error).message}); run: ip netns del ${space}\n`,
      );
    }
  }
}

/** An authority and one certificate, for both nodes. */
function makeCertificates(dir: string, address: string): void {
  const at = (name: string): string => join(dir, name);
  const openssl = (...args: readonly string[]): void => {
    execFileSync('openssl', args, { stdio: 'ignore' });
  };
  const newKey = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes'];
  openssl('req', '-x509', ...newKey, '-subj', '/CN=kvtier bench CA', '-keyout', at('ca.key'), '-out', at('ca.pem'));
  openssl('req', ...newKey, '-subj', '/CN=kvtier bench', '-keyout', at('node.key'), '-out', at('node.csr'));
  writeFileSync(at('node.ext'), `subjectAltName=IP:${address}\n`);
  const sign = ['-CA', at('ca.pem'), '-CAkey', at('ca.key'), '-CAcreateserial', '-extfile', at('node.ext')];
  openssl('x509', '-req', '-in', at('node.csr'), ...sign, '-out', at('node.pem'));
}

/** A child that answers each line with a line. */
class Asked {
  readonly child: ChildProcess;
  readonly ended: Promise<void>;
  #text = '';
  #waiting: ((line: string) => void) | undefined;
  #fail: ((error: Error) => void) | undefined;

  constructor(child: ChildProcess) {
    this.child = child;
    child.stdout!.setEncoding('utf8').on('data', (text: string) => {
      this.#text += text;
      this.#give();
    });
    this.ended = new Promise((resolve) => child.once('exit', () => resolve()));
    child.on('exit', (code) => this.#fail?.(new KvError('IO', `bench peer: a node ended with ${code}`)));
  }

  line(): Promise<string> {
    return new Promise((resolve, reject) => {
      [this.#waiting, this.#fail] = [resolve, reject];
      this.#give();
    });
  }

  end(): void {
    this.child.stdin!.end();
  }

  ask(line: string): Promise<string> {
    this.child.stdin!.write(`${line}\n`);
    return this.line();
  }

  #give(): void {
    const end = this.#text.indexOf('\n');
    if (end === -1 || this.#waiting === undefined) return;
    const line = this.#text.slice(0, end);
    this.#text = this.#text.slice(end + 1);
    const waiting = this.#waiting;
    this.#waiting = undefined;
    waiting(line);
  }
}

const node = (space: string, ...args: readonly string[]): Asked =>
  new Asked(inSpace(space, [process.execPath, '--import', 'tsx', worker, ...args]));

/** GB/s, and CPU seconds per GB of both ends. */
function iperf(count: number): { rate: number; cpu: number } {
  const out = execFileSync(
    'ip',
    [
      ...['netns', 'exec', fetcher, 'iperf3', '-c', '10.77.0.1', '-p', String(iperfPort), '-R', '-J'],
      ...['-P', String(count), '-t', String(turnMs / 1000)],
    ],
    { encoding: 'utf8' },
  );
  const { end } = JSON.parse(out) as {
    end: {
      sum_received: { bits_per_second: number };
      cpu_utilization_percent: { host_total: number; remote_total: number };
    };
  };
  const value = end.sum_received.bits_per_second / 8e9;
  const { host_total, remote_total } = end.cpu_utilization_percent;
  return { rate: value, cpu: (host_total + remote_total) / 100 / value };
}

/** GB/s of TLS's cipher on one core, in records of TLS's size. */
function aesRate(): number {
  const args = ['speed', '-mr', '-seconds', '1', '-bytes', '16384', '-evp', 'aes-128-gcm'];
  const out = execFileSync('openssl', args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] });
  const bytesPerSecond = /^\+F:\d+:AES-128-GCM:([\d.]+)/m.exec(out)?.[1];
  if (bytesPerSecond === undefined)
    throw new KvError('SETUP', 'openssl speed: no rate of AES-128-GCM; install openssl 3');
  return Number(bytesPerSecond) / 1e9;
}

/** How many streams iperf3 is fastest with here. */
function bestStreams(context: BenchContext): number {
  const rateOf = (count: number): number => median([1, 2, 3].map(() => iperf(count).rate));
  const rates = iperfStreams.map((count) => ({ count, rate: rateOf(count) }));
  context.log(
    `iperf3: ${rates.map(({ count, rate: value }) => `${count} streams ${value.toFixed(2)} GB/s`).join(', ')}`,
  );
  return rates.reduce((best, each) => (each.rate > best.rate ? each : best)).count;
}

async function measure(context: BenchContext, limitStreams: number, one: (typeof cases)[number]): Promise<Figure[]> {
  const { label, payloadBytes, encryption } = one;
  const shared = ['10.77.0.1', String(port), encryption, String(payloadBytes), context.scratchDir];
  const giving = node(giver, 'give', ...shared);
  let fetching: Asked | undefined;
  try {
    await giving.line();
    fetching = node(fetcher, 'fetch', ...shared, String(streams));
    await fetching.line();
    await fetching.ask(String(turnMs / 2)); // warm
    await giving.ask('cpu');
    const [ours, cpus]: [number[], number[]] = [[], []];
    const limits: ReturnType<typeof iperf>[] = [];
    for (let round = 0; round < rounds; round++) {
      limits.push(iperf(limitStreams));
      const { rate: value, cpu } = JSON.parse(await fetching.ask(String(turnMs))) as { rate: number; cpu: number };
      const given = JSON.parse(await giving.ask('cpu')) as { cpu: number; bytes: number };
      ours.push(value);
      cpus.push(cpu + given.cpu / (given.bytes / 1e9));
    }
    const list = (values: readonly number[]): string => values.map((each) => each.toFixed(2)).join(' ');
    context.log(
      `${label}: ${list(ours)} GB/s, iperf3 ${list(limits.map((each) => each.rate))}, CPU s/GB both ends ${list(cpus)}`,
    );
    const limit = `iperf3, ${limitStreams} streams`;
    const figures = [
      rate(`fetch_${label}`, median(ours), 'GB/s', median(limits.map((each) => each.rate)), limit),
      time(`cpu_${label}`, median(cpus), 's/GB', median(limits.map((each) => each.cpu)), `${limit}, both ends too`),
    ];
    if (encryption === 'none') return figures;
    // iperf3 does not encrypt: its time for a byte and that of AES, which both ends do at once, each on a core.
    const aes = median([1, 2, 3].map(aesRate));
    const withAes = limits.map((each) => 1 / (1 / each.rate + 1 / aes));
    const aesLimit = `${limit}, and AES-128-GCM at both ends`;
    return [...figures, rate(`fetch_${label}_aes`, median(ours), 'GB/s', median(withAes), aesLimit)];
  } finally {
    for (const each of [giving, fetching]) each?.end();
    for (const each of [giving, fetching]) await each?.ended;
  }
}

const suite: Suite = {
  name: 'peer',
  description: "blocks from another node's arena over a veth pair, plain and under TLS, against iperf3",
  needs: ['iperf3', 'iproute2', 'openssl'],
  async run(context) {
    argumentsOf('peer', context.args, {});
    makeCertificates(context.scratchDir, '10.77.0.1');
    process.once('exit', leave);
    try {
      makeNamespaces();
      const server = inSpace(giver, ['iperf3', '-s', '-p', String(iperfPort)]);
      server.stdout!.resume();
      await new Promise((resolve) => setTimeout(resolve, 500));
      const limitStreams = bestStreams(context);
      const figures: Figure[] = [];
      for (const one of cases) figures.push(...(await measure(context, limitStreams, one)));
      return figures;
    } finally {
      leave();
      process.off('exit', leave);
    }
  },
};
export default suite;
