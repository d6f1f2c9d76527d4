/**
 * What an administrator asks of workers goes to all of them at once: of one model, or of all. Each answers for itself; the answer as a
 * whole is what holds for every one, and names each where there are several. One alone is told to drain.
 */
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import type { PinPrefixRequest } from '@kvtier/wire/grpc';
import type { EngineControl, Engines } from './engines.ts';
import { HttpError } from './errors.ts';

interface Told<T> {
  readonly name: string;
  readonly value: T;
}

export class Admin {
  readonly #engines: Pick<Engines, 'workers' | 'engine'>;

  constructor(engines: Pick<Engines, 'workers' | 'engine'>) {
    this.#engines = engines;
  }

  /** @throws KvError: the first worker's failure */
  async resetPrefixCache(): Promise<object> {
    const told = await this.#ask(undefined, (engine) => engine.resetPrefixCache());
    return { done: told.every(({ value }) => value), ...byName(told) };
  }

  /**
   * On each worker what it has cached, in place of what it held under this name: after a failure it is asked for again.
   * @throws HttpError 409 (no room for pins, or a worker without them), KvError
   */
  async pinPrefix(model: string, request: PinPrefixRequest): Promise<object> {
    try {
      const told = await this.#ask(model, (engine) => engine.pinPrefix(request));
      return { pinned_tokens: Math.max(...told.map(({ value }) => value)), ...byName(told) };
    } catch (error) {
      if (!(error instanceof KvError) || error.code !== 'CONFIG') throw error;
      throw new HttpError(409, error.message, { code: 'pin_refused' });
    }
  }

  async unpinPrefix(model: string, name: string): Promise<object> {
    const told = await this.#ask(model, (engine) => engine.unpinPrefix(name));
    return { done: told.some(({ value }) => value), ...byName(told) };
  }

  /**
   * It gets nothing new, from any coordinator, until it is started anew. Asked again, it says how many requests it still has.
   * @throws HttpError 404, 409: not one of ours; KvError DISCONNECTED: it does not answer now
   */
  async drain(name: string): Promise<object> {
    const worker = this.#engines.workers().find((each) => each?.record.name === name);
    if (!worker)
      throw new HttpError(404, `The worker '${name}' does not exist; GET /health names all.`, {
        ...{ param: 'worker', code: 'worker_not_found' },
      });
    if (worker.record.kind !== 'kvtier')
      throw new HttpError(409, `The worker '${name}' is a pod: take it out of discovery, and it drains.`, {
        ...{ param: 'worker', code: 'not_ours' },
      });
    if (!answersNow(worker))
      throw new KvError('DISCONNECTED', `engine: ${name} does not answer; try again`, { retry: true });
    return { left: await this.#engines.engine(worker.number).drain() };
  }

  /** All workers that answer now and can be asked. @throws KvError DISCONNECTED: there is none; the first failure when all have failed */
  async #ask<T>(model: string | undefined, ask: (engine: EngineControl) => Promise<T>): Promise<readonly Told<T>[]> {
    const asked: Worker[] = [];
    for (const worker of this.#engines.workers()) {
      if (worker?.record.kind !== 'kvtier' || !answersNow(worker)) continue;
      if (model === undefined || worker.facts?.model === model) asked.push(worker);
    }
    if (asked.length === 0) throw new KvError('DISCONNECTED', 'engine: no worker answers; try again', { retry: true });
    const outcomes = await Promise.allSettled(asked.map(async ({ number }) => ask(this.#engines.engine(number))));
    const told: Told<T>[] = [];
    for (const [i, outcome] of outcomes.entries())
      if (outcome.status === 'fulfilled') told.push({ name: asked[i]!.record.name, value: outcome.value });
    const failed = outcomes.find((outcome) => outcome.status === 'rejected');
    if (failed !== undefined) throw failed.reason;
    return told;
  }
}

const answersNow = ({ state }: Worker): boolean => state === 'ready' || state === 'draining';

const byName = <T>(told: readonly Told<T>[]): object =>
  told.length < 2 ? {} : { workers: Object.fromEntries(told.map(({ name, value }) => [name, value])) };
