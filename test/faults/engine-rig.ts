/**
 * Real processes for the fault tests of the engine worker: a cache node and two workers of the demo model, one with the
 * tier and one without, as the judge of what is right.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { loadTokenizer } from '@kvtier/api-server';
import { DemoTable, type Program, program } from '@kvtier/cli';
import { KvError } from '@kvtier/errors';
import { greedy } from '@kvtier/registry/testing';
import { Watch } from '@kvtier/runtime';
import { TurnWatch } from '@kvtier/telemetry/testing';
import {
  type CacheUse,
  channelOptions,
  clientCredentials,
  type Description,
  deadlineAfter,
  EngineClient,
  fromFailure,
  fromStatus,
  type GenerateEvent,
} from '@kvtier/wire/grpc';
import { stopProcess } from '../../infra/stopped.ts';
import { CpuWaits } from '../e2e/cpu-waits.ts';
import { liveBytes } from './live-bytes.ts';

const root = fileURLToPath(new URL('../..', import.meta.url));
export const modelDir = join(root, 'models/demo/model');

export interface Answer {
  readonly tokenIds: number[];
  readonly finishReason: string;
  readonly cache: CacheUse | undefined;
}

/** By where they listen. */
const workers = new Map<unknown, Service>();

/** A service process; killed with the test run whatever happens. */
export class Service {
  readonly #name: Program;
  #config: object;
  readonly #env: NodeJS.ProcessEnv;
  readonly #prefix: readonly string[];
  #child: ChildProcess | undefined;
  #watch: TurnWatch | undefined;
  said = '';
  /** What it said when it was ready, at each start. */
  readonly ready: Record<string, unknown>[] = [];
  /** When it did not serve because it was killed, ended or stopped: from the signal until it was ready again, or went on. */
  readonly #outages: { readonly fromMs: number; toMs: number }[] = [];

  /** `prefix`: what it is started by, and becomes: a host's namespace. */
  constructor(name: Program, config: object, env: NodeJS.ProcessEnv = {}, prefix: readonly string[] = []) {
    this.#name = name;
    // Also where there is a GPU: tests share it with others, and compare bits.
    this.#config = name === 'engine-worker' ? { backend: 'cpu', ...config } : config;
    this.#env = env;
    this.#prefix = prefix;
  }

  /** More, or other, settings for its next start. */
  configure(settings: object): void {
    this.#config = { ...this.#config, ...settings };
  }

  get pid(): number | undefined {
    return this.#child?.pid;
  }

  /** Of one whose environment has `answersLiveBytes`. */
  liveBytes(): Promise<number> {
    return liveBytes(this.#child!);
  }

  /** Resolves when it is ready. */
  async start(): Promise<void> {
    const [file, ...args] = [...this.#prefix, process.execPath, ...program(this.#name)];
    const child = spawn(file!, args, {
      stdio: ['ignore', 'ignore', 'pipe', 'ipc'],
      env: { ...process.env, ...this.#env, KVTIER_CONFIG: JSON.stringify(this.#config) },
    });
    this.#child = child;
    if (this.#name === 'engine-worker') workers.set((this.#config as { listen?: string }).listen, this);
    this.#watch = new TurnWatch(child);
    child.stderr!.setEncoding('utf8').on('data', (text: string) => {
      this.said = (this.said + text).slice(-20_000);
    });
    const message = await Promise.race([once(child, 'message'), once(child, 'exit').then(() => undefined)]);
    if (message === undefined) throw new Error(`${this.#name} did not start: ${this.said}`);
    this.ready.push((message as [{ ready: Record<string, unknown> }])[0].ready);
    this.#isBack();
  }

  /** It was killed, ended or stopped at some time between the two. */
  wasOutBetween(fromMs: number, toMs: number): boolean {
    return this.#outages.some((outage) => outage.fromMs <= toMs && outage.toMs >= fromMs);
  }

  #isBack(): void {
    const last = this.#outages.at(-1);
    if (last?.toMs === Number.POSITIVE_INFINITY) last.toMs = performance.now();
  }

  /** Resolves with the exit code when it has ended by itself, or null after `limitMs`. */
  async ended(limitMs: number): Promise<number | null> {
    const child = this.#child!;
    if (child.exitCode !== null) return child.exitCode;
    await once(child, 'exit', { signal: AbortSignal.timeout(limitMs) }).catch(() => {});
    return child.exitCode;
  }

  /**
   * Send a signal; SIGSTOP is in effect when this resolves, after SIGKILL or SIGTERM wait for the end and return the exit code.
   * @throws Error when it ended in order and its event loop had a turn above 50 ms
   */
  async signal(signal: NodeJS.Signals): Promise<number | null> {
    const child = this.#child;
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return null;
    if (signal === 'SIGCONT') this.#isBack();
    else this.#outages.push({ fromMs: performance.now(), toMs: Number.POSITIVE_INFINITY });
    if (signal === 'SIGSTOP') await stopProcess(child.pid!);
    else child.kill(signal);
    if (signal !== 'SIGKILL' && signal !== 'SIGTERM') return null;
    await once(child, 'exit');
    this.#watch!.check(this.#name);
    return child.exitCode;
  }
}

export class EngineRig {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-engine-'));
  readonly node: Service;
  readonly worker = this.#worker('worker', join(this.folder, 'n/s'));
  readonly judge = this.#worker('judge', null);
  readonly #clients: EngineClient[] = [];
  readonly #tokenizer = loadTokenizer(modelDir);
  readonly #right = new Map<string, number[]>();

  /** `nodeConfig`: what the cache node has besides, or instead. */
  constructor(nodeConfig: object = {}) {
    this.node = new Service('cache-node', {
      socketPath: join(this.folder, 'n/s'),
      dataDir: join(this.folder, 'data'),
      arena: { bytes: 96 << 20 },
      disk: { bytes: 256 << 20 },
      logLevel: 'warn',
      ...nodeConfig,
    });
  }

  #worker(name: string, cacheNodeSocket: string | null): Service {
    return new Service('engine-worker', {
      modelDir,
      servedName: 'demo',
      listen: `unix:${join(this.folder, name)}`,
      cacheNodeSocket,
      // Small, so that prefixes leave the pool and come back from the tier.
      kvBytes: 32 << 20,
      maxSequences: 8,
      threads: 1,
      loadDeadlineMs: 2_000,
      logLevel: 'warn',
    });
  }

  client(name: 'worker' | 'judge'): EngineClient {
    const address = `unix:${join(this.folder, name)}`;
    const client = new EngineClient(address, clientCredentials(address), channelOptions);
    this.#clients.push(client);
    return client;
  }

  /** Question `row` about table `table`, as token ids. */
  prompt(table: number, row: number, rows = 40): number[] {
    return this.#tokenizer.encode(new DemoTable(rows, 1_000 + table).question(row, 'age').prompt, {
      addSpecialTokens: false,
    });
  }

  /** What an engine without a tier answers. */
  async right(judge: EngineClient, prompt: number[]): Promise<number[]> {
    const name = prompt.join();
    const known = this.#right.get(name) ?? (await ask(judge, prompt)).tokenIds;
    this.#right.set(name, known);
    return known;
  }

  /** Arena files of all lives of the node that are there now. */
  arenas = (): string[] => this.node.ready.map(({ arenaPath }) => String(arenaPath)).filter(existsSync);

  async close(): Promise<void> {
    for (const client of this.#clients) client.close();
    await this.node.signal('SIGCONT');
    await Promise.all([this.worker.signal('SIGTERM'), this.judge.signal('SIGTERM'), this.node.signal('SIGTERM')]);
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/** A worker ends the connection of a client that answers no keepalive in time: so long the machine kept either of them from it. */
const lateMs = 1_000;

/** Its connection was ended: at once, or under a call. */
const isCut = (error: unknown): boolean =>
  error instanceof KvError &&
  (error.code === 'DISCONNECTED' || error.message.startsWith('Received RST_STREAM with code 0'));

/** It was not begun: its connection was being ended for what had been before. */
const isRefused = (error: unknown): boolean => error instanceof KvError && error.message === 'Stream refused by server';

/** One greedy request; once more where its connection was ended for a standstill that is the machine's, at a worker that lives. @throws KvError */
export async function ask(client: EngineClient, promptTokenIds: number[], maxTokens = 6): Promise<Answer> {
  const worker = workers.get(client.getChannel().getTarget());
  const waits = new CpuWaits(() => [[worker?.pid]]);
  const watch = new Watch(50, () => {});
  const lostMs = (): number => performance.now() - watch.nowMs();
  const [beganMs, beforeMs] = [performance.now(), lostMs()];
  try {
    return await askOnce(client, promptTokenIds, maxTokens);
  } catch (error) {
    const isLate = waits.ms + lostMs() - beforeMs > lateMs;
    if (!isCut(error) || !(isLate || isRefused(error))) throw error;
    if (worker === undefined || worker.wasOutBetween(beganMs, performance.now())) throw error;
    await new Promise<void>((resolve, reject) =>
      client.waitForReady(deadlineAfter(20_000), (late) => (late === undefined ? resolve() : reject(late))),
    );
    return await askOnce(client, promptTokenIds, maxTokens);
  } finally {
    watch.stop();
  }
}

function askOnce(client: EngineClient, promptTokenIds: number[], maxTokens: number): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const call = client.generate(greedy({ requestId: 'test', promptTokenIds, maxTokens }), undefined, {
      deadline: deadlineAfter(60_000),
    });
    const tokenIds: number[] = [];
    let finishReason = '';
    let cache: CacheUse | undefined;
    call.on('data', (event: GenerateEvent) => {
      if (event.failure) reject(fromFailure(event.failure));
      tokenIds.push(...event.tokenIds);
      finishReason = event.finishReason;
      cache ??= event.cache;
    });
    call.on('error', (error) => reject(fromStatus(error)));
    call.on('end', () => resolve({ tokenIds, finishReason, cache }));
  });
}

export function describe(client: EngineClient): Promise<Description> {
  return new Promise((resolve, reject) =>
    client.describe({}, (error, answer) => (error ? reject(fromStatus(error)) : resolve(answer))),
  );
}

export function resetPrefixCache(client: EngineClient): Promise<boolean> {
  return new Promise((resolve, reject) =>
    client.resetPrefixCache({}, (error, answer) => (error ? reject(fromStatus(error)) : resolve(answer.done))),
  );
}

export function metricsText(client: EngineClient): Promise<string> {
  return new Promise((resolve, reject) =>
    client.metrics({}, (error, answer) => (error ? reject(fromStatus(error)) : resolve(answer.prometheus))),
  );
}

/** Ask again until `condition` holds. */
export async function until(condition: () => Promise<boolean>, what: string, deadlineMs = 20_000): Promise<void> {
  const end = performance.now() + deadlineMs;
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`still waiting after ${deadlineMs} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
