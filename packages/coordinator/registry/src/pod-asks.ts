/**
 * What a pod with OpenAI's API says of itself when it is asked: that it is well, which model it serves, its metrics.
 *
 * Invariant: every wait has a deadline, every body that is read whole a bound.
 */
import { KvError } from '@kvtier/errors';
import { Pool } from 'undici';
import * as z from 'zod';
import { checked } from './facts.ts';
import { livingTimeout, type Patience } from './living-timeout.ts';
import { authorizationOf, connectorOf, gone, type PodAddress } from './pod-connection.ts';
import { type Scrape, scrapeOf } from './scrape.ts';
import type { WorkerFacts } from './worker.ts';

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
/** Of the models the first; others are not looked at, however many there are. */
const modelsSchema = z.object({
  data: z.preprocess((all) => (Array.isArray(all) ? all.slice(0, 1) : all), z.array(modelSchema).min(1)),
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
    await this.#ask('/health', mostModelsBytes);
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
    const [model] = checked(name, '/v1/models', modelsSchema, models).data;
    const scrape = await this.scrape();
    return {
      model: model!.id,
      modelDigest: '',
      modelDir: '',
      maxModelTokens: model!.max_model_len ?? 0,
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

  /** `patience`: how late the answer may be; default: as any other. */
  async scrape(patience?: Patience): Promise<Scrape> {
    return await scrapeOf(this.#pod.name, await this.#ask('/metrics', mostMetricsBytes, patience));
  }

  /** A short body, whole. @throws KvError DISCONNECTED: no 200 in time; PROTOCOL: longer than `mostBytes` */
  async #ask(path: string, mostBytes: number, patience = this.#impatience): Promise<string> {
    const { name } = this.#pod;
    const beganMs = performance.now();
    const limit = livingTimeout(patience); // who stood still ourselves blames no pod
    const signal = AbortSignal.any([limit.signal, this.#closing.signal]);
    try {
      const { statusCode, body } = await this.#pool.request({
        path,
        method: 'GET',
        headers: authorizationOf(this.#pod),
        signal,
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
        const remedy =
          statusCode === 401 || statusCode === 403 ? 'configure its token' : 'serve vLLM’s or SGLang’s API there';
        throw new KvError('PROTOCOL', `worker ${name}: ${path} answers ${statusCode}; ${remedy}`);
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
    }
  }
}

/** Of one life of the pod's process, as far as its metrics tell. */
export const epochOf = ({ origin }: URL, { startedAt }: Scrape): string =>
  startedAt === '' ? '' : `${origin} ${startedAt}`;

type CacheFacts = Pick<WorkerFacts, 'blockTokens' | 'totalBlocks' | 'hashAlgorithm'>;

/** What a scrape says of the blocks; what it does not say is as before: engines know some of it only after they began to answer. */
export const cacheOf = ({ blockTokens, totalBlocks, hashAlgorithm }: Scrape, before: CacheFacts): CacheFacts => ({
  blockTokens: blockTokens ?? before.blockTokens,
  totalBlocks: totalBlocks ?? before.totalBlocks,
  hashAlgorithm: hashAlgorithm || before.hashAlgorithm,
});
