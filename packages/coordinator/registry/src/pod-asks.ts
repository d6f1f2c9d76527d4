/**
 * What a pod with OpenAI's API says of itself when it is asked: that it is well, which model it serves, its metrics.
 *
 * Invariant: every wait has a deadline, every body that is read whole a bound.
 */
import { KvError } from '@kvtier/errors';
import { firstOf } from '@kvtier/runtime';
import { Pool } from 'undici';
import * as z from 'zod';
import { checked } from './facts.ts';
import { livingTimeout, type Patience } from './living-timeout.ts';
import { authorizationOf, connectorOf, gone, keepsToken, type PodAddress } from './pod-connection.ts';
import { type Scrape, scrapeOf } from './scrape.ts';
import type { OtherName, WorkerFacts } from './worker.ts';

const [mostModelsBytes, mostMetricsBytes] = [1 << 20, 8 << 20];

const modelSchema = z.object({
  id: z.string().min(1).max(1024),
  max_model_len: z
    .number()
    .int()
    .min(1)
    .max(2 ** 40)
    .nullish(),
});
/** Names beyond are not looked at, however many there are. */
const mostNames = 64;
const modelsSchema = z.object({
  data: z.preprocess((all) => (Array.isArray(all) ? all.slice(0, mostNames) : all), z.array(z.unknown()).min(1)),
});
/** As vLLM and SGLang tell of what a name stands for: an adapter has a parent, an alias the same root. */
const namedSchema = z.object({
  id: modelSchema.shape.id,
  root: z.unknown().optional(),
  parent: z.unknown().optional(),
});

export class PodAsks {
  readonly #pod: PodAddress;
  readonly #impatience: Patience;
  readonly #pool: Pool;
  readonly #closing = new AbortController();

  constructor(pod: PodAddress, askMs: number) {
    this.#pod = pod;
    this.#impatience = { silentMs: askMs, mostMs: askMs, heardAtMs: () => Number.NEGATIVE_INFINITY };
    const connect = connectorOf(pod.access, askMs);
    this.#pool = new Pool(pod.origin.origin, { connections: 1, pipelining: 1, connect });
  }

  /** What is asked now fails at once. */
  async close(): Promise<void> {
    this.#closing.abort();
    await this.#pool.destroy();
  }

  /** @throws KvError DISCONNECTED; PROTOCOL: it is no server of OpenAI's API */
  async describe(): Promise<WorkerFacts> {
    const { name, origin } = this.#pod;
    await this.health();
    let models: unknown;
    const text = await this.#ask('/v1/models', mostModelsBytes);
    try {
      models = JSON.parse(text);
    } catch {
      throw new KvError(
        'PROTOCOL',
        `worker ${name}: /v1/models is no JSON; give the address of an OpenAI-compatible server`,
      );
    }
    const { data } = checked(name, '/v1/models', modelsSchema, models);
    const model = checked(name, '/v1/models', modelSchema, data[0]);
    const otherNames = otherNamesIn(data);
    const scrape = await this.scrape();
    return {
      model: model.id,
      ...(otherNames.length > 0 && { otherNames }),
      modelDigest: '',
      modelDir: '',
      maxModelTokens: model.max_model_len ?? 0,
      vocabSize: 0,
      stopTokenIds: [],
      ...cacheOf(scrape, { blockTokens: 0, totalBlocks: 0, hashAlgorithm: '' }),
      hashSeed: '',
      blockBytes: 0,
      maxRunning: undefined,
      namespaces: undefined,
      bootEpoch: epochOf(origin, scrape),
    };
  }

  /** `patience`: how late the answer may be; default: as any other. @throws KvError DISCONNECTED: it is not well, or does not say */
  async health(patience?: Patience): Promise<void> {
    await this.#ask('/health', mostModelsBytes, patience);
  }

  /** `patience`: as of `health`. */
  async scrape(patience?: Patience): Promise<Scrape> {
    return await scrapeOf(this.#pod.name, await this.#ask('/metrics', mostMetricsBytes, patience));
  }

  /** A short body, whole. @throws KvError DISCONNECTED: no 200 in time; PROTOCOL: longer than `mostBytes` */
  async #ask(path: string, mostBytes: number, patience = this.#impatience): Promise<string> {
    const { name } = this.#pod;
    const beganMs = performance.now();
    const limit = livingTimeout(patience); // who stood still ourselves blames no pod
    const first = firstOf([limit.signal, this.#closing.signal]);
    try {
      const { statusCode, body } = await this.#pool.request({
        path,
        method: 'GET',
        headers: authorizationOf(this.#pod),
        signal: first.signal,
      });
      const parts: Buffer[] = [];
      let bytes = 0;
      for await (const part of body) {
        bytes += (part as Buffer).length;
        if (bytes > mostBytes)
          throw new KvError('PROTOCOL', `worker ${name}: ${path} is longer than ${mostBytes} bytes; check the address`);
        parts.push(part as Buffer);
      }
      if (statusCode === 200) return Buffer.concat(parts).toString('utf8');
      if (statusCode >= 400 && statusCode < 500) {
        throw new KvError(
          'PROTOCOL',
          `worker ${name}: ${path} answers ${statusCode}; ${remedyOf(this.#pod, path, statusCode)}`,
        );
      }
      throw new Error(`${path} answers ${statusCode}`);
    } catch (error) {
      if (error instanceof KvError) throw error;
      throw gone(
        this.#pod,
        (error as Error).name === 'TimeoutError'
          ? `${path}: no answer within ${Math.round(performance.now() - beganMs)} ms`
          : (error as Error).message,
      );
    } finally {
      limit.end();
      first.end();
    }
  }
}

/** Those behind the first. What is no name is left out: the pod serves its model all the same. */
function otherNamesIn([first, ...others]: readonly unknown[]): OtherName[] {
  const known = namedSchema.parse(first);
  const names = new Map<string, OtherName>();
  for (const other of others) {
    const { success, data } = namedSchema.safeParse(other);
    if (!success || data.id === known.id) continue;
    const isAdapter = (data.parent ?? null) !== null || data.root !== known.root;
    names.set(data.id, { name: data.id, isAdapter });
  }
  return [...names.values()];
}

function remedyOf(pod: PodAddress, path: string, status: number): string {
  if (status === 401 || status === 403)
    return keepsToken(pod)
      ? 'its token is not sent in the clear: use https, or say "access": {"tokenInClear": true}'
      : 'configure its token';
  // It has answered what it serves; vLLM always has metrics.
  if (status === 404 && path === '/metrics') return 'start SGLang with --enable-metrics';
  return 'serve vLLM’s or SGLang’s API there';
}

/** Of one life of the pod's process, as far as its metrics tell. */
export const epochOf = ({ origin }: URL, { startedAt }: Scrape): string =>
  startedAt === '' ? '' : `${origin} ${startedAt}`;

type CacheFacts = Pick<WorkerFacts, 'blockTokens' | 'totalBlocks' | 'hashAlgorithm' | 'engines'>;

/** What a scrape says of the blocks; what it does not say is as before: engines know some of it only after they began to answer. */
export function cacheOf(scrape: Scrape, before: CacheFacts): CacheFacts {
  const engines = Math.max(scrape.engines, before.engines ?? 1);
  return {
    blockTokens: scrape.blockTokens ?? before.blockTokens,
    totalBlocks: scrape.totalBlocks ?? before.totalBlocks,
    hashAlgorithm: scrape.hashAlgorithm || before.hashAlgorithm,
    ...(engines > 1 && { engines }),
  };
}
