/**
 * Cache nodes and engine workers on hosts of their own (infra/hosts), for the suite that measures what sharing is worth. Workers are
 * asked over their Unix sockets, which are the machine's, so that the way between the hosts carries blocks and nothing else.
 */
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Program, program, waitUntil } from '@kvtier/cli';
import type { CacheNodeInput, EngineWorkerInput } from '@kvtier/config';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import { greedy } from '@kvtier/registry/testing';
import {
  channelOptions,
  clientCredentials,
  deadlineAfter,
  EngineClient,
  fromFailure,
  fromStatus,
  type GenerateEvent,
} from '@kvtier/wire/grpc';
import type { Hosts } from '../infra/hosts/hosts.ts';
import { onProcessor } from './pinning.ts';

const peerPort = 7400;
const answerMs = 120_000;

export interface Answer {
  /** From the request to the first token. */
  readonly ms: number;
  readonly tokenIds: readonly number[];
  /** Of the prompt, by the tier that they came from. */
  readonly byTier: Readonly<Record<string, number>>;
  /** Of its first token, as the worker tells it: waited, loaded, computed. */
  readonly partsMs: readonly [queue: number, load: number, prefill: number];
}

export class SharingHosts<Name extends string> {
  readonly #hosts: Hosts<Name>;
  readonly #folder: string;
  readonly #processorOf: (host: Name) => number | undefined;
  readonly #dataDirs: string[] = [];

  /** `folder`: for sockets, a secret and data; its path is short. `processorOf`: the one that all of a host runs on; undefined: any. */
  constructor(hosts: Hosts<Name>, folder: string, processorOf: (host: Name) => number | undefined = () => undefined) {
    this.#hosts = hosts;
    this.#folder = folder;
    this.#processorOf = processorOf;
    writeFileSync(join(folder, 'secret'), randomBytes(48).toString('base64'), { mode: 0o600 });
  }

  /** A cache node on this host that gives to all and fetches from `peers`; `more`: of its configuration. */
  async node(
    host: Name,
    peers: readonly Name[],
    arenaBytes: number,
    more: Partial<CacheNodeInput> = {},
  ): Promise<string> {
    const dataDir = join(this.#folder, `data-${host}`);
    const socketPath = join(this.#folder, `node-${host}`, 's');
    mkdirSync(dataDir);
    this.#dataDirs.push(dataDir);
    await this.#start(host, 'cache-node', {
      socketPath,
      dataDir,
      arena: { bytes: arenaBytes },
      disk: null,
      peers: {
        listen: { host: this.#hosts.address(host), port: peerPort },
        peers: peers.map((peer) => ({ host: this.#hosts.address(peer), port: peerPort })),
        security: { encryption: 'none', secretFile: join(this.#folder, 'secret'), trustedNetwork: true },
      },
      logLevel: 'warn',
      ...more,
    } satisfies CacheNodeInput);
    return socketPath;
  }

  /** `socketPath`: of the node beside it; null: it has none. */
  async worker(host: Name, model: string, socketPath: string | null, more: Partial<EngineWorkerInput> = {}) {
    const name = randomBytes(4).toString('hex');
    const listen = more.listen ?? `unix:${join(this.#folder, name)}`;
    const stop = await this.#start(host, 'engine-worker', {
      ...{ modelDir: model, servedName: 'model', listen, cacheNodeSocket: socketPath },
      ...{ kvBytes: 512 << 20, backend: 'cpu' as const, logLevel: 'warn' as const },
      ...more,
    } satisfies EngineWorkerInput);
    const worker = new Worker(listen, stop);
    if (socketPath !== null) await worker.attached();
    return worker;
  }

  /** What nodes leave that were killed with their hosts. */
  sweep(): void {
    for (const dataDir of this.#dataDirs) removeStaleArenas(dataDir, '/dev/shm');
  }

  async #start(host: Name, service: Program, config: object): Promise<() => Promise<void>> {
    const processor = this.#processorOf(host);
    const pinned = processor === undefined ? [] : onProcessor(processor);
    const child = this.#hosts.spawn(host, [...pinned, process.execPath, ...program(service)], {
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
      env: { ...process.env, KVTIER_CONFIG: JSON.stringify(config) },
    });
    const ended = once(child, 'exit');
    const said = await Promise.race([once(child, 'message'), ended.then(() => undefined)]);
    if (said === undefined) throw new KvError('SETUP', `${service} on ${host}: did not start; see the lines above`);
    return async () => {
      child.kill('SIGTERM');
      await ended;
    };
  }
}

export class Worker {
  readonly #client: EngineClient;
  readonly stop: () => Promise<void>;

  constructor(address: string, stop: () => Promise<void>) {
    this.#client = new EngineClient(address, clientCredentials(address), channelOptions);
    this.stop = async () => {
      this.#client.close();
      await stop();
    };
  }

  ask(promptTokenIds: readonly number[], maxTokens = 1): Promise<Answer> {
    const request = greedy({ requestId: 'bench', promptTokenIds: [...promptTokenIds], maxTokens, ignoreEos: true });
    return new Promise((resolve, reject) => {
      const begin = performance.now();
      let ms = 0;
      let byTier: Answer['byTier'] = {};
      let partsMs: Answer['partsMs'] = [0, 0, 0];
      const tokenIds: number[] = [];
      const call = this.#client.generate(request, undefined, { deadline: deadlineAfter(answerMs) });
      call.on('data', (event: GenerateEvent) => {
        if (event.failure) reject(fromFailure(event.failure));
        ms ||= performance.now() - begin;
        if (event.cache) {
          const { tokensByTier, queueUs, loadUs, prefillUs } = event.cache;
          byTier = tokensByTier;
          partsMs = [queueUs / 1_000, loadUs / 1_000, prefillUs / 1_000];
        }
        tokenIds.push(...event.tokenIds);
      });
      call.on('error', (error) => reject(fromStatus(error)));
      call.on('end', () => resolve({ ms, tokenIds, byTier, partsMs }));
    });
  }

  /** One of its metrics, by name and labels as written; 0 where it is not there. */
  async metric(name: string): Promise<number> {
    const text = await new Promise<string>((resolve, reject) =>
      this.#client.metrics({}, (error, answer) => (error ? reject(fromStatus(error)) : resolve(answer.prometheus))),
    );
    const line = text.split('\n').find((each) => each.startsWith(`${name} `));
    return Number(line?.slice(name.length) ?? 0);
  }

  attached(): Promise<void> {
    const describe = (): Promise<boolean> =>
      new Promise((resolve, reject) =>
        this.#client.describe({}, (error, answer) =>
          error ? reject(fromStatus(error)) : resolve(answer.tierAttached),
        ),
      );
    return waitUntil('a worker attached to its node', 60_000, describe);
  }

  /** Drops the engine's own prefix cache, not the tiers. */
  resetPrefixCache(): Promise<void> {
    const reset = (): Promise<boolean> =>
      new Promise((resolve, reject) =>
        this.#client.resetPrefixCache({}, (error, answer) =>
          error ? reject(fromStatus(error)) : resolve(answer.done),
        ),
      );
    return waitUntil('the reset of a prefix cache', 30_000, reset);
  }
}
