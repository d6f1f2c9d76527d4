/**
 * What a coordinator adds to streams: the same clients ask fake engines straight (gRPC), through a bare proxy and through one coordinator, in
 * processes of their own all.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { started as startedAs } from '@kvtier/cli';
import { checkWhole, type Streams, stillMsAt } from './whole.ts';

const root = fileURLToPath(new URL('../..', import.meta.url));
const modelDir = join(root, 'models/demo/model');
const tsx = import.meta.resolve('tsx');

export interface StreamsOptions {
  /** For sockets. */
  readonly folder: string;
  readonly clients: number;
  readonly engines: number;
  /** Of each answer. */
  readonly tokensPerS: number;
  readonly answerTokens: number;
  readonly promptTokens: number;
  readonly seconds: number;
  /** The coordinator, and the proxy, have the first core alone; clients and engines share the others, asked straight, too. */
  readonly isApart: boolean;
}

export const memoryLooks = 20;
/** The look at which what is in use is asked for first; the other time is right after the end, while all streams run yet. */
const liveLook = memoryLooks / 4;
/** Nothing of them changes with time: they are asked no longer. */
const peerSeconds = 60;

export interface StreamsCost {
  readonly straight: Streams;
  readonly proxied: Streams;
  readonly through: Streams;
  /** CPU seconds of the bare proxy. */
  readonly proxyCpuS: number;
  /** CPU seconds of the coordinator, all threads, and its memory at the end of each of `memoryLooks` equal parts of the time. */
  readonly coordinatorCpuS: number;
  readonly residentMiB: readonly number[];
  /** What is in use after a full collection: after a quarter of the time, and at its end. */
  readonly liveMiB: readonly [first: number, last: number];
}

/** @throws KvError IO where an answer failed or hangs, or tokens are missing (whole.ts) */
export async function streamsCost(options: StreamsOptions, log: (line: string) => void): Promise<StreamsCost> {
  const { folder, engines, tokensPerS, clients, seconds, answerTokens, promptTokens, isApart } = options;
  mkdirSync(folder, { recursive: true, mode: 0o700 });
  const started: ChildProcess[] = [];
  const leave = (): void => {
    for (const child of started) child.kill('SIGKILL');
  };
  process.once('exit', leave);
  const run = (args: readonly string[], between: boolean, env: NodeJS.ProcessEnv = {}): ChildProcess => {
    const stdio = ['ignore', 'pipe', 'inherit', 'ipc'] as const;
    const others = `1-${Math.max(availableParallelism() - 1, 1)}`;
    const [command, ...before] = isApart
      ? ['taskset', '-c', between ? '0' : others, process.execPath]
      : [process.execPath];
    const child = spawn(command!, [...before, ...args], { stdio: [...stdio], env: { ...process.env, ...env } });
    started.push(child);
    return child;
  };
  const start = (file: string, args: readonly string[], between = false): ChildProcess =>
    run(['--import', tsx, join(root, file), ...args], between);
  const drive = async (
    way: string,
    target: string,
    between: ChildProcess | undefined,
    forSeconds: number,
    counting: (clients: ChildProcess) => void,
    ended?: () => Promise<void>,
  ): Promise<Streams> => {
    const args = [target, clients, forSeconds, answerTokens, promptTokens, engines, stillMsAt(tokensPerS)].map(String);
    const process = start('bench/streams/clients.ts', args);
    const driven = linesOf(process);
    await driven();
    counting(process);
    const pids = [process.pid!, fakes.pid!, ...(between ? [between.pid!] : [])];
    const before = pids.map(coreTimesOf);
    const told = JSON.parse(await driven()) as Streams;
    const [ofClients, ofEngines, ofBetween] = pids.map((pid, i) => waitedIn(before[i]!, coreTimesOf(pid)));
    await ended?.();
    log(`${way} (${target}): ${JSON.stringify(told)}`);
    log(`  for a core waited: clients ${ofClients}, engines ${ofEngines}${between ? `, in between ${ofBetween}` : ''}`);
    checkWhole(way, told, { clients, tokensPerS, seconds: forSeconds });
    return told;
  };
  let fakes: ChildProcess;
  try {
    fakes = start('bench/streams/fake-engines.ts', [folder, String(engines), String(tokensPerS), modelDir]);
    await linesOf(fakes)();
    const straight = await drive('asked straight', folder, undefined, Math.min(seconds, peerSeconds), () => {});
    const proxy = start('bench/streams/bare-proxy.ts', [folder, String(engines)], true);
    const proxyUrl = await linesOf(proxy)();
    let proxyCpuS = 0;
    const proxied = await drive('through a bare proxy', proxyUrl, proxy, Math.min(seconds, peerSeconds), () => {
      proxyCpuS = -cpuSecondsOf(proxy.pid!);
    });
    proxyCpuS += cpuSecondsOf(proxy.pid!);
    proxy.kill('SIGKILL');
    const workers = Array.from({ length: engines }, (_, i) => ({ name: `e${i}`, address: `unix:${folder}/e${i}` }));
    const config = { port: 0, discovery: { kind: 'static', workers }, logLevel: 'error' };
    const coordinator = run(startedAs('coordinator'), true, {
      KVTIER_CONFIG: JSON.stringify(config),
      NODE_OPTIONS: `${process.env.NODE_OPTIONS ?? ''} --require ${join(root, 'bench/streams/live-memory.cjs')}`,
    });
    const [message] = (await once(coordinator, 'message')) as [{ ready: { url: string } }];
    const { pid } = coordinator;
    let before = 0;
    const residentMiB: number[] = [];
    let looks: NodeJS.Timeout | undefined;
    let first: Promise<number> | undefined;
    let last = 0;
    let coordinatorCpuS = 0;
    const look = (clients: ChildProcess): void => {
      residentMiB.push(residentMiBOf(pid!));
      if (residentMiB.length !== liveLook) return;
      clients.send('it stands still');
      first = liveMiBOf(coordinator);
    };
    const counting = (clients: ChildProcess): void => {
      before = cpuSecondsOf(pid!);
      looks = setInterval(() => look(clients), (seconds * 1_000) / memoryLooks);
    };
    const { url } = message.ready;
    const through = await drive('through the coordinator', url, coordinator, seconds, counting, async () => {
      clearInterval(looks);
      coordinatorCpuS = cpuSecondsOf(pid!) - before;
      last = await liveMiBOf(coordinator);
    });
    const liveMiB = [(await first)!, last] as const;
    return { straight, proxied, through, proxyCpuS, coordinatorCpuS, residentMiB, liveMiB };
  } finally {
    leave();
    process.off('exit', leave);
  }
}

/** Gives its lines one after another. @throws Error when it ended instead */
function linesOf(child: ChildProcess): () => Promise<string> {
  const lines = createInterface({ input: child.stdout! })[Symbol.asyncIterator]();
  return async () => {
    const { value, done } = await lines.next();
    if (done) throw new Error('a process of the bench ended by itself');
    return value;
  };
}

/** The process collects, and tells (live-memory.cjs): once in a while, for it stands still for so long. */
async function liveMiBOf(process: ChildProcess): Promise<number> {
  const told = once(process, 'message');
  process.send('live memory');
  const [{ liveBytes }] = (await told) as [{ liveBytes: number }];
  return Math.round(liveBytes / 2 ** 20);
}

/** Ticks of 10 ms. */
function cpuSecondsOf(pid: number): number {
  const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  return (Number(fields[11]) + Number(fields[12])) / 100;
}

interface CoreTimes {
  readonly ranS: number;
  readonly waitedS: number;
}

/** Of its main thread: how long it ran, and how long it could have run and had no core. */
function coreTimesOf(pid: number): CoreTimes {
  const [ran, waited] = readFileSync(`/proc/${pid}/schedstat`, 'utf8').split(' ').map(Number);
  return { ranS: ran! / 1e9, waitedS: waited! / 1e9 };
}

const waitedIn = (from: CoreTimes, to: CoreTimes): string =>
  `${(to.waitedS - from.waitedS).toFixed(2)} s beside ${(to.ranS - from.ranS).toFixed(2)} s`;

const residentMiBOf = (pid: number): number =>
  Math.round(Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))![1]) / 1_024);
