/**
 * A cluster of real processes on this machine: coordinators, engine workers of the demo model and cache nodes that are each other's
 * peers, known to the coordinators by configuration. Members are killed and stopped, and started again; clients go from a coordinator
 * that does not answer to the other one, as they would behind a load balancer.
 */
import { randomBytes } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { loadTokenizer } from '@kvtier/api-server';
import { DemoTable, waitUntil } from '@kvtier/cli';
import { RawClient } from '@kvtier/session/testing';
import { channelOptions, clientCredentials, EngineClient } from '@kvtier/wire/grpc';
import { freePort } from '../../infra/ports.ts';
import { metricsText, modelDir, Service } from '../faults/engine-rig.ts';
import type { Stage } from './cpu-waits.ts';

export interface Request {
  readonly prompt: readonly number[];
  readonly max_tokens: number;
  readonly temperature: number;
  readonly seed?: number;
  /** Other blocks, the same answer. */
  readonly cache_salt?: string;
}

export interface Answer {
  readonly tokenIds: readonly number[];
  readonly startMs: number;
  readonly endMs: number;
  /** Coordinators that did not answer, or not to the end. */
  readonly turnedAway: number;
  /** Those of them that were neither killed nor stopped meanwhile, and what they did: each is a failure that the next try hides. */
  readonly failures: readonly string[];
  /** Header `x-kvtier-handoff`; empty: none. */
  readonly handOff: string;
  /** Header `x-kvtier-degraded`; empty: none. */
  readonly degraded: string;
}

export interface ClusterSize {
  readonly workers: number;
  /** The first of them, of role prefill; the others are of role decode then. Absent: all do both. */
  readonly prefill?: number;
  /** Of the coordinators' configuration: hand-offs. */
  readonly handoff?: object;
  /** Of servers that hold both the list of members and a tier which nodes share; absent: coordinators know all by configuration. */
  readonly redis?: object;
  /** Of each worker's own blocks; absent: 24 MiB. */
  readonly kvBytes?: number;
  /** A client leaves a coordinator that says nothing for so long, if there is another one; absent: 1,000. */
  readonly silentMs?: number;
  /** 0: no tier. */
  readonly nodes: number;
  readonly coordinators: number;
}

const usualSilentMs = 1_000;
/** If there is no other coordinator: leaving, a client would only have its prompt computed again, behind those of all others. */
const patientMs = 60_000;
const mostTries = 20;
/** A node that lives answers in no time. */
const answerMs = 10_000;
const nodeSocket = (folder: string, node: number): string => join(folder, `n${node}`, 's');
const host = '127.0.0.1';

export class ClusterRig {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvc-'));
  readonly workers: readonly Service[];
  readonly nodes: readonly Service[];
  readonly coordinators: readonly Service[];
  readonly #urls: readonly string[];
  readonly #silentMs: number;
  /** Workers that do nothing else. */
  readonly #prefill: number;
  #next = 0;

  static async start(size: ClusterSize): Promise<ClusterRig> {
    const ports = await freePorts(size.coordinators + size.nodes);
    const rig = new ClusterRig(size, ports);
    try {
      await Promise.all([...rig.workers, ...rig.nodes].map((service) => service.start()));
      await Promise.all(rig.coordinators.map((service) => service.start()));
      for (const url of rig.#urls)
        await waitUntil(`${url}: all workers ready`, 60_000, async () => (await readyWorkers(url)) === size.workers);
      return rig;
    } catch (error) {
      await rig.close();
      throw error;
    }
  }

  private constructor(size: ClusterSize, ports: readonly number[]) {
    const { folder } = this;
    this.#prefill = size.prefill ?? 0;
    this.#silentMs = size.silentMs ?? (size.coordinators > 1 ? usualSilentMs : patientMs);
    const peerPorts = ports.slice(size.coordinators);
    const secretFile = join(folder, 'secret');
    writeFileSync(secretFile, randomBytes(48).toString('base64'), { mode: 0o600 });
    const source = (name: string) => ({
      endpoint: `ipc://${join(folder, `${name}.events`)}`,
      replayEndpoint: `ipc://${join(folder, `${name}.replay`)}`,
    });
    const count = (n: number): number[] => Array.from({ length: n }, (_, i) => i);
    const address = (i: number): string => `unix:${join(folder, `w${i}`)}`;
    const nodeOf = (i: number): number | null => (size.nodes === 0 ? null : i % size.nodes);
    const roleOf = (i: number): string =>
      size.prefill === undefined ? 'both' : i < size.prefill ? 'prefill' : 'decode';
    const membership = (name: string, more: object): object =>
      size.redis === undefined ? {} : { membership: { redis: size.redis, name, ...more } };
    this.nodes = count(size.nodes).map(
      (i) =>
        new Service('cache-node', {
          socketPath: nodeSocket(folder, i),
          dataDir: join(folder, `data${i}`),
          arena: { bytes: 48 << 20 },
          disk: { bytes: 128 << 20 },
          peers: {
            listen: { host, port: peerPorts[i]! },
            peers: peerPorts.flatMap((port, other) => (other === i ? [] : [{ host, port }])),
            security: { encryption: 'none', secretFile },
          },
          ...(size.redis && { redis: { ...size.redis, bytes: 64 << 20 }, placement: { redis: { write: 'through' } } }),
          ...membership(`node-${i}`, {}),
          kvEvents: source(`n${i}`),
          logLevel: 'warn',
        }),
    );
    this.workers = count(size.workers).map(
      (i) =>
        new Service('engine-worker', {
          modelDir,
          servedName: 'demo',
          listen: address(i),
          cacheNodeSocket: nodeOf(i) === null ? null : nodeSocket(folder, nodeOf(i)!),
          kvBytes: size.kvBytes ?? 24 << 20,
          maxSequences: 8,
          threads: 1,
          ...membership(`worker-${i}`, { node: nodeOf(i) === null ? null : `node-${nodeOf(i)}`, role: roleOf(i) }),
          kvEvents: source(`w${i}`),
          logLevel: 'warn',
        }),
    );
    const discovery = size.redis
      ? { kind: 'redis', redis: size.redis }
      : {
          kind: 'static',
          workers: count(size.workers).map((i) => ({
            name: `worker-${i}`,
            role: roleOf(i),
            address: address(i),
            node: nodeOf(i) === null ? null : `node-${nodeOf(i)}`,
            events: source(`w${i}`),
          })),
          nodes: count(size.nodes).map((i) => ({
            name: `node-${i}`,
            peer: { host, port: peerPorts[i]! },
            events: source(`n${i}`),
          })),
        };
    this.coordinators = count(size.coordinators).map(
      (i) =>
        new Service('coordinator', {
          ...{ host, port: ports[i]!, discovery, logLevel: 'warn' },
          ...(size.handoff && { handoff: size.handoff }),
        }),
    );
    this.#urls = count(size.coordinators).map((i) => `http://${host}:${ports[i]!}`);
  }

  url(coordinator: number): string {
    return this.#urls[coordinator]!;
  }

  /** All that can die, by name. */
  get members(): ReadonlyMap<string, Service> {
    return new Map([
      ...this.workers.map((service, i) => [`worker-${i}`, service] as const),
      ...this.nodes.map((service, i) => [`node-${i}`, service] as const),
      ...this.coordinators.map((service, i) => [`coordinator-${i}`, service] as const),
    ]);
  }

  /** What a request passes, of those that run now: prefill and decode workers where they are apart; each node, for they read from each other. */
  get stages(): Stage[] {
    const pidsOf = (services: readonly Service[]): Stage => services.map(({ pid }) => pid);
    const workers = [this.workers.slice(0, this.#prefill), this.workers.slice(this.#prefill)];
    return [this.coordinators, ...workers, ...this.nodes.map((node) => [node])].map(pidsOf);
  }

  /** `signal`: the client leaves. @throws Error with the answer of a coordinator that refuses it, or when none answers */
  async ask(request: Request, signal?: AbortSignal): Promise<Answer> {
    const startMs = performance.now();
    const first = this.#next++;
    const failures: string[] = [];
    let last: unknown;
    for (let tries = 0; tries < mostTries; tries++) {
      const at = (first + tries) % this.#urls.length;
      const triedMs = performance.now();
      try {
        const streamed = await stream(this.#urls[at]!, request, this.#silentMs, signal);
        return { ...streamed, startMs, endMs: performance.now(), turnedAway: tries, failures };
      } catch (error) {
        if (error instanceof Refused || signal?.aborted) throw error;
        last = error;
        if (!this.coordinators[at]!.wasOutBetween(triedMs, performance.now()))
          failures.push(`coordinator-${at} after ${(performance.now() - triedMs).toFixed(0)} ms: ${told(error)}`);
      }
    }
    throw new Error(`no coordinator answers: ${String(last)}`);
  }

  /** A coordinator's metrics with those of all workers that it reaches, by name and labels as written. */
  async metrics(coordinator = 0): Promise<ReadonlyMap<string, number>> {
    return samplesOf(await (await fetch(`${this.#urls[coordinator]}/metrics`)).text());
  }

  /** Of a worker and its node, asked straight. */
  async workerMetrics(worker: number): Promise<ReadonlyMap<string, number>> {
    const at = `unix:${join(this.folder, `w${worker}`)}`;
    const client = new EngineClient(at, clientCredentials(at), channelOptions);
    try {
      return samplesOf(await metricsText(client));
    } finally {
      client.close();
    }
  }

  /** What a node counts, asked straight. */
  async nodeCounters(node: number): Promise<ReadonlyMap<string, number>> {
    const client = await RawClient.connect(nodeSocket(this.folder, node));
    const limit = setTimeout(() => client.socket.destroy(), answerMs);
    try {
      await client.attach();
      const { counters } = await client.call({ $case: 'stats', value: {} }, 'stats');
      return new Map(Object.entries(counters).map(([name, count]) => [name, Number(count)]));
    } finally {
      clearTimeout(limit);
      client.socket.destroy();
    }
  }

  async close(): Promise<void> {
    const members = [...this.members.values()];
    for (const service of members) await service.signal('SIGCONT');
    await Promise.all(this.coordinators.map((service) => service.signal('SIGKILL')));
    await Promise.all(this.workers.map((service) => service.signal('SIGKILL')));
    await Promise.all(this.nodes.map((service) => service.signal('SIGTERM')));
    rmSync(this.folder, { recursive: true, force: true });
  }
}

function samplesOf(text: string): ReadonlyMap<string, number> {
  const samples = text.split('\n').map((line) => /^([^#\s]\S*(?: [^}]*})?) (\S+)$/.exec(line));
  return new Map(samples.flatMap((match) => (match ? [[match[1]!, Number(match[2])] as const] : [])));
}

async function readyWorkers(url: string): Promise<number> {
  const { workers = [] } = (await (await fetch(`${url}/health`)).json()) as { workers?: { state: string }[] };
  return workers.filter(({ state }) => state === 'ready').length;
}

/** With its cause, which `fetch` keeps apart. */
function told(error: unknown): string {
  const { message, cause } = error as Error;
  return cause instanceof Error ? `${message}: ${cause.message}` : message;
}

/** A coordinator answered, and not with what was asked: that is a failed request. */
class Refused extends Error {}

interface Chunk {
  readonly choices?: readonly { readonly token_ids?: readonly number[]; readonly finish_reason: string | null }[];
  readonly error?: { readonly message: string };
}

type Streamed = Pick<Answer, 'tokenIds' | 'handOff' | 'degraded'>;

async function stream(url: string, request: Request, limitMs: number, signal?: AbortSignal): Promise<Streamed> {
  const abort = new AbortController();
  const leave = (): void => abort.abort(signal?.reason);
  signal?.addEventListener('abort', leave);
  let silence: NodeJS.Timeout | undefined;
  const heard = (): void => {
    clearTimeout(silence);
    silence = setTimeout(() => abort.abort(new Error(`${url} says nothing`)), limitMs);
  };
  heard();
  try {
    const response = await fetch(`${url}/v1/completions`, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify({ ...request, ignore_eos: true, stream: true, return_token_ids: true }),
      signal: abort.signal,
    });
    // One that has just started and reached no worker yet: as a client of OpenAI's, and a load balancer, go on to the next.
    if (response.status === 503) throw new Error(await response.text());
    if (response.status !== 200) throw new Refused(`${response.status} ${await response.text()}`);
    const tokenIds: number[] = [];
    let ended = false;
    let rest = '';
    const decoder = new TextDecoder();
    for await (const bytes of response.body!) {
      heard();
      const lines = (rest + decoder.decode(bytes, { stream: true })).split('\n');
      rest = lines.pop()!;
      for (const line of lines) {
        if (!line.startsWith('data: {')) continue;
        const chunk = JSON.parse(line.slice(6)) as Chunk;
        if (chunk.error) throw new Refused(chunk.error.message);
        tokenIds.push(...(chunk.choices?.[0]?.token_ids ?? []));
        ended ||= (chunk.choices?.[0]?.finish_reason ?? null) !== null;
      }
    }
    if (!ended) throw new Error(`${url}: the stream broke off`);
    const headerOf = (name: string): string => response.headers.get(name) ?? '';
    return { tokenIds, handOff: headerOf('x-kvtier-handoff'), degraded: headerOf('x-kvtier-degraded') };
  } finally {
    clearTimeout(silence);
    signal?.removeEventListener('abort', leave);
  }
}

async function freePorts(count: number): Promise<number[]> {
  const ports = new Set<number>();
  while (ports.size < count) ports.add(await freePort());
  return [...ports];
}

const tokenizer = loadTokenizer(modelDir);

/** `count` different requests over a few tables, so that most of each prompt is shared; every second one drawn with a seed. */
export function sharedPrompts(count: number, tables: number, rows = 40): Request[] {
  return Array.from({ length: count }, (_, i) => {
    const table = new DemoTable(rows, 3_000 + (i % tables));
    const field = table.fields[Math.floor(i / tables) % table.fields.length]!;
    const { prompt } = table.question(Math.floor(i / tables / table.fields.length) % rows, field);
    const ids = tokenizer.encode(prompt, { addSpecialTokens: false });
    const drawn = i % 2 === 0 ? { temperature: 0 } : { temperature: 0.8, seed: i };
    return { prompt: ids, max_tokens: 8 + (i % 17), ...drawn };
  });
}
