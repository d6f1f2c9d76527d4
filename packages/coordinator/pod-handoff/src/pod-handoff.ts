/**
 * Prefill and decode of one request at two pods with OpenAI's API, as vLLM's routers do it:
 *
 *     decode pod chosen ─► decision ─► prefill pod chosen ─► prefill leg: one token, its `kv_transfer_params` kept ─► decode leg
 *                            └ none                            └ failed, late: the decode pod computes the prompt itself
 *
 * What links both legs is the store behind both pods: blocks are found by what they hold, so the parameters may be empty, and a block
 * that did not come is a miss. The decode leg is the caller's, like any other request to a pod.
 *
 * Invariants: no leg outlives `prefillMs` or its caller's signal; a prefill pod is counted from its choice to the leg's end, once; a pod is
 * asked only if discovery names it as one that prefills, of decode's model and revision; what it answers is bounded and checked.
 */
import { type PodHandOffConfig, podHandOffSchema } from '@kvtier/config';
import type { Choice, Dispatch, DispatchRequest } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { type Forwarded, leave, type Worker } from '@kvtier/registry';
import { type Decision, decideSplit } from './decision.ts';
import { type HandOffReason, PodHandOffMetrics } from './metrics.ts';
import { hasPrefill, leastAhead, type PodList, prefillersFor, workOf } from './pods.ts';

/** Of an answer to the prefill leg: block ids of a million tokens fit. */
const mostAnswerBytes = 1 << 20;
/** Statuses that another pod may not have. */
const elsewhere: ReadonlySet<number> = new Set([429, 500, 502, 503, 504]);

/** The registry's fleet is this. */
export interface PodCalls {
  workers(): PodList;
  forward(
    number: number,
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded>;
}

export interface PodHandOffOptions {
  readonly dispatch: Dispatch;
  readonly pods: PodCalls;
  /** What is left out is as its default. */
  readonly config?: Partial<PodHandOffConfig>;
  readonly metrics?: PodHandOffMetrics;
}

export type Routed = Omit<DispatchRequest, 'except' | 'role'>;

/** The decision for one request at one decode pod. */
export interface Planned extends Omit<Decision, 'reason'> {
  /** named: whoever sent the request has chosen the pods. unknown: and named none that may. */
  readonly reason: Decision['reason'] | 'named' | 'unknown';
  /** Names of the pods that may prefill. */
  readonly prefillers: ReadonlySet<string>;
}

export interface PrefillRequest {
  readonly routed: Routed;
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Uint8Array;
}

/** A prefill leg that was answered. */
export interface Prefilled {
  readonly worker: string;
  /** Of the roll-out: what it computed is of use to pods of the same one. */
  readonly revision: string;
  /** `kv_transfer_params` as JSON; undefined: it answered none. */
  readonly params: string | undefined;
}

/** No prefill leg was answered: the decode pod has to compute the prompt. */
export class NotPrefilled extends KvError {
  readonly reason: HandOffReason;

  constructor(reason: HandOffReason, why: string) {
    super('DISCONNECTED', `prefill: ${why}; try again`, { retry: true });
    this.reason = reason;
  }
}

export class PodHandOff {
  readonly config: PodHandOffConfig;
  readonly metrics: PodHandOffMetrics;
  readonly #dispatch: Dispatch;
  readonly #pods: PodCalls;

  constructor({ dispatch, pods, config, metrics }: PodHandOffOptions) {
    this.#dispatch = dispatch;
    this.#pods = pods;
    this.config = podHandOffSchema.parse(config ?? {});
    this.metrics = metrics ?? new PodHandOffMetrics();
  }

  /** Whether requests of this model may be split at all. */
  concerns(model: string): boolean {
    return hasPrefill(this.#pods.workers(), model);
  }

  /** `named`: of the header `x-prefiller-host-port`. `prefillMs`: after which the leg is cut. */
  plan(routed: Routed, decode: Choice, named?: string, prefillMs = this.config.prefillMs): Planned {
    const workers = this.#pods.workers();
    const known = named === undefined ? [] : prefillersFor(workers, decode.worker, routed.among, named);
    const prefillers = known.length > 0 ? known : prefillersFor(workers, decode.worker, routed.among);
    const names = new Set(prefillers.map(({ record }) => record.name));
    if (known.length > 0)
      return {
        ...{ split: true, reason: 'named', why: 'named by x-prefiller-host-port', thereS: undefined },
        prefillers: names,
      };
    const uncachedTokens = uncachedOf(routed, decode);
    const decision = decideSplit(
      {
        tokens: routed.tokens,
        uncachedTokens,
        // The request itself is counted there already.
        decode: { ...withoutOwn(decode.worker, uncachedTokens), running: decode.worker.load.running },
        prefill: leastAhead(prefillers, uncachedTokens),
      },
      { ...this.config, prefillMs },
    );
    const why = named === undefined ? decision.why : `${decision.why}; x-prefiller-host-port names no prefill pod`;
    return { ...decision, why, prefillers: names };
  }

  /** Chooses a prefill pod and asks it, and another one where it fails. @throws NotPrefilled, or the reason of `signal` */
  async prefill(request: PrefillRequest, among: ReadonlySet<string>, signal: AbortSignal): Promise<Prefilled> {
    const { prefillMs, prefillTries } = this.config;
    const late = new NotPrefilled('timeout', `no answer within ${prefillMs} ms`);
    const bound = new AbortController();
    const timer = setTimeout(() => bound.abort(late), prefillMs);
    const leave = (): void => bound.abort(signal.reason);
    signal.addEventListener('abort', leave, { once: true });
    if (signal.aborted) leave();
    const began = performance.now();
    try {
      const except = new Set<string>();
      let failure: NotPrefilled | undefined;
      for (let left = prefillTries - 1; ; left--) {
        try {
          return await this.#once(request, among, except, bound.signal);
        } catch (error) {
          if (bound.signal.aborted) throw bound.signal.reason;
          if (!(error instanceof NotPrefilled)) throw error;
          if (error.reason === 'nobody') throw failure ?? error;
          if (left === 0 || error.reason === 'refused') throw error;
          failure = error;
        }
      }
    } finally {
      clearTimeout(timer);
      signal.removeEventListener('abort', leave);
      this.metrics.prefillSeconds.observe((performance.now() - began) / 1_000);
    }
  }

  async #once(
    { routed, path, headers, body }: PrefillRequest,
    among: ReadonlySet<string>,
    except: Set<string>,
    signal: AbortSignal,
  ): Promise<Prefilled> {
    // It has answered as soon as the prompt is computed.
    const choice = await this.choosePrefill({ ...routed, isStreamed: true }, among, except, signal);
    const { name, revision } = choice.worker.record;
    except.add(name);
    try {
      const answer = await this.#pods.forward(choice.worker.number, path, headers, body, signal);
      if (answer.status !== 200) {
        await leave(answer);
        const reason = answer.status === 429 ? 'busy' : elsewhere.has(answer.status) ? 'failed' : 'refused';
        throw new NotPrefilled(reason, `worker ${name} answers ${answer.status}`);
      }
      const params = await paramsOf(name, answer);
      choice.firstToken(true); // it was asked for no more
      return { worker: name, revision, params };
    } catch (error) {
      if (signal.aborted || error instanceof NotPrefilled) throw error;
      const { code, message } = KvError.from(error);
      throw new NotPrefilled(code === 'BUSY' ? 'busy' : 'failed', message);
    } finally {
      choice.ended();
    }
  }

  /**
   * The pod is counted until `ended`. `routed.among` has been heeded in `among`; `routed.isStreamed`: somebody will tell when the prompt is
   * computed. @throws NotPrefilled, or the reason of `signal`
   */
  async choosePrefill(
    routed: Routed,
    among: ReadonlySet<string>,
    except: ReadonlySet<string>,
    signal: AbortSignal,
  ): Promise<Choice> {
    try {
      const id = `${routed.id}-prefill`;
      const leg = { ...routed, id, maxTokens: 1, among, except, role: 'prefill' as const };
      return await this.#dispatch.choose(leg, signal);
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      const { code, message } = KvError.from(error);
      throw new NotPrefilled(code === 'BUSY' ? 'busy' : 'nobody', message);
    }
  }
}

/** What the decode pod neither holds nor can have brought. */
export function uncachedOf({ tokens, blockTokens }: Pick<Routed, 'tokens' | 'blockTokens'>, { match }: Choice): number {
  return Math.max(tokens - (match.blocks + (match.remoteBlocks ?? 0)) * blockTokens, 1);
}

function withoutOwn(worker: Worker, tokens: number) {
  const work = workOf(worker);
  return { ...work, aheadS: Math.max(work.aheadS - tokens / work.prefillTokensPerS, 0) };
}

/** @throws NotPrefilled: no JSON object, or longer than any */
async function paramsOf(name: string, { body }: Forwarded): Promise<string | undefined> {
  const parts: Buffer[] = [];
  let bytes = 0;
  for await (const part of body) {
    bytes += part.length;
    if (bytes > mostAnswerBytes)
      throw new NotPrefilled('nonsense', `worker ${name} answers more than ${mostAnswerBytes} bytes`);
    parts.push(part);
  }
  let answer: unknown;
  try {
    answer = JSON.parse(Buffer.concat(parts).toString('utf8'));
  } catch {
    throw new NotPrefilled('nonsense', `worker ${name} answers what is no JSON`);
  }
  const params = isObject(answer) ? answer.kv_transfer_params : null;
  if (params === undefined || (params === null && isObject(answer))) return undefined;
  if (!isObject(params))
    throw new NotPrefilled('nonsense', `worker ${name} answers kv_transfer_params that are no object`);
  return JSON.stringify(params);
}

const isObject = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);
