/**
 * The two legs of one request for pods, around its decode leg (forwarding.ts): before it goes to its decode pod a prefill pod may compute
 * the prompt, and its answer may say that the decode pod holds too little (`cache_hit_threshold`).
 *
 *     before ─► decision ─► prefill leg ─► the body with `kv_transfer_params`
 *     after  ─► finish reason cache_threshold? ─► prefill leg ─► once more, without a threshold
 *
 * Invariants: at most one prefill leg a request, whatever becomes of its decode pods; what it answered goes to pods of its revision alone,
 * never to the pod that answered it, and what it lends (transfer.ts) to one pod, once; what is not split goes on byte by byte as it came.
 */
import type { Choice } from '@kvtier/dispatch';
import type { HandedOff } from '@kvtier/handoff';
import { type HandOffReason, isPrefillOnly, NotPrefilled, type PodHandOff, type Routed } from '@kvtier/pod-handoff';
import { leave } from '@kvtier/registry';
import type { ToPass } from './body-reader.ts';
import type { Forwarded } from './engines.ts';
import { HttpError } from './errors.ts';
import { withMembers } from './json-members.ts';
import type { Placed } from './placed.ts';
import { belowThreshold } from './threshold-answer.ts';
import { isLoan } from './transfer.ts';

/** As vLLM's connectors read it: this pod computes the prompt, and another one will ask for it. */
const prefillParams = JSON.stringify({
  do_remote_decode: true,
  do_remote_prefill: false,
  remote_engine_id: null,
  remote_block_ids: null,
  remote_host: null,
  remote_port: null,
});
/** Names of the limit on an answer's tokens; the first one is always there. */
const tokenLimits = ['max_tokens', 'max_completion_tokens', 'max_output_tokens'] as const;

const noDecode: HandedOff = {
  line: 'none; why=no decode pod takes requests',
  ...{ prefill: undefined, degraded: 'handoff-no-decode-worker' },
};
const itself: HandedOff = {
  line: 'none; why=the pod that computed the prompt gives the answer',
  ...{ prefill: undefined, degraded: undefined },
};

export interface TwoLegsParts {
  readonly pods: PodHandOff;
  readonly routed: Routed;
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: ToPass;
  readonly placed: Placed;
  /** Of the header x-prefiller-host-port. */
  readonly named: string | undefined;
  readonly signal: AbortSignal;
}

export class TwoLegs {
  readonly #parts: TwoLegsParts;
  /** What became of the prefill leg, once it is over: `#changes` is the decode leg's part of it, `#revision` whom it is for. */
  #over: HandedOff | undefined;
  #changes: Readonly<Record<string, string | undefined>> = {};
  #revision: string | undefined;
  /** Some decode pod may have what prefill answered. */
  #isGiven = false;

  constructor(parts: TwoLegsParts) {
    this.#parts = parts;
  }

  get #whole(): Uint8Array {
    return this.#parts.body.held.bytes;
  }

  /**
   * The body for this decode pod. `admit` is asked before anything is sent, with the seconds until its first token as they are predicted;
   * where whoever sent it has chosen the pods, nothing is. @throws what `admit` does; HttpError 503: prefill failed, and fallback is off;
   * the reason of the signal
   */
  async before(choice: Choice, admit: (predictedS: number) => void): Promise<Uint8Array> {
    const { pods, body, placed, routed, named } = this.#parts;
    if (this.#over !== undefined) {
      const state = this.#insteadOf(this.#over, choice);
      placed.handedOff(choice, state ?? this.#over);
      return this.#decodeBody(state === undefined);
    }
    const none = (reason: string, why: string): Uint8Array => {
      admit(choice.firstTokenS);
      pods.metrics.decided(false, reason);
      placed.handedOff(choice, { line: `none; why=${why}`, prefill: undefined, degraded: undefined });
      return this.#whole;
    };
    if (isPrefillOnly(choice.worker)) {
      pods.metrics.decided(false, 'no_decode');
      placed.handedOff(choice, noDecode);
      return this.#whole;
    }
    if (body.unsplit !== undefined) return none('client', body.unsplit);
    if (body.members === undefined) return none('client', 'more parameters than can be changed');
    if (body.cacheHitThreshold !== undefined)
      return none('threshold', 'the decode pod is asked first, for cache_hit_threshold');
    const { split, reason, why, prefillers, thereS } = pods.plan(routed, choice, named);
    if (reason === 'nobody') {
      admit(choice.firstTokenS);
      pods.metrics.decided(false, reason);
      placed.handedOff(choice, this.#fallBack('nobody', why));
      return this.#whole;
    }
    if (!split) return none(reason, why);
    if (thereS !== undefined) admit(thereS);
    await this.#prefill(choice, prefillers, reason, why);
    return this.#decodeBody(true);
  }

  /**
   * What the client gets, of the answer that this decode pod gave; undefined: the pod holds too little, a prefill leg has run unless none may, and
   * it is to be asked once more, with `before`'s body. @throws as `before`
   */
  async after(answer: Forwarded, choice: Choice): Promise<Forwarded | undefined> {
    const { pods, body, routed, named } = this.#parts;
    if (
      this.#over !== undefined ||
      body.cacheHitThreshold === undefined ||
      body.isTransfer ||
      body.members === undefined
    )
      return answer;
    const { isBelow, rest } = await belowThreshold(answer);
    if (!isBelow) return rest;
    await leave(rest);
    if (body.unsplit !== undefined) {
      this.#changes = { cache_hit_threshold: '0' };
      this.#over = { line: `none; why=${body.unsplit}`, prefill: undefined, degraded: undefined };
      return undefined;
    }
    const { prefillers } = pods.plan(routed, choice, named);
    await this.#prefill(choice, prefillers, 'threshold', 'the decode pod held less than cache_hit_threshold');
    return undefined;
  }

  async #prefill(choice: Choice, prefillers: ReadonlySet<string>, reason: string, why: string): Promise<void> {
    const { pods, routed, path, headers, body, placed, signal } = this.#parts;
    // Whatever the threshold, nobody is to refuse any more.
    const threshold = body.cacheHitThreshold === undefined ? {} : { cache_hit_threshold: '0' };
    // The prompt is not this pod's to compute: it has a place there, and nothing ahead.
    choice.firstToken();
    pods.metrics.decided(true, reason);
    this.#changes = threshold;
    try {
      const prefilled = await pods.prefill(
        { routed, path, headers, body: this.#prefillBody(threshold) },
        prefillers,
        signal,
      );
      this.#over = { line: `split P=${prefilled.worker}; why=${why}`, prefill: prefilled.worker, degraded: undefined };
      this.#revision = prefilled.revision;
      if (prefilled.params !== undefined) this.#changes = { ...threshold, kv_transfer_params: prefilled.params };
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      if (!(error instanceof NotPrefilled)) throw error;
      this.#over = this.#fallBack(error.reason, `${why}; ${error.message}`);
    }
    placed.handedOff(choice, this.#over);
  }

  #fallBack(reason: HandOffReason, why: string): HandedOff {
    const { pods } = this.#parts;
    if (!pods.config.fallback) {
      throw new HttpError(503, `Prefill and decode apart: ${why}; podHandOff.fallback is off, try again.`, {
        code: `handoff_${reason}`,
        retryAfterSeconds: 1,
      });
    }
    pods.metrics.fellBack(reason);
    return { line: `none; why=${why}`, prefill: undefined, degraded: `handoff-${reason}` };
  }

  /** Why this pod computes the prompt though prefill is over; undefined: it gets what prefill answered. @throws HttpError 503 */
  #insteadOf({ prefill }: HandedOff, { worker }: Choice): HandedOff | undefined {
    const { name, revision } = worker.record;
    if (isPrefillOnly(worker)) return noDecode;
    if (prefill === name) return itself;
    if (this.#revision !== undefined && this.#revision !== revision)
      return this.#fallBack('revision', `prefill was of revision ${this.#revision}, the decode pod is of ${revision}`);
    const { kv_transfer_params: params } = this.#changes;
    // Whether a pod that failed has read them nobody can tell.
    if (this.#isGiven && params !== undefined && isLoan(JSON.parse(params)))
      return this.#fallBack('spent', 'what prefill lent went to a decode pod that failed');
    return undefined;
  }

  /** `takesParams`: with what prefill has to say. */
  #decodeBody(takesParams: boolean): Uint8Array {
    const { kv_transfer_params: params, ...rest } = this.#changes;
    const isGiven = takesParams && params !== undefined;
    this.#isGiven ||= isGiven;
    const changes = isGiven ? this.#changes : rest;
    return Object.keys(changes).length === 0
      ? this.#whole
      : withMembers(this.#whole, this.#parts.body.members!, changes);
  }

  #prefillBody(threshold: Readonly<Record<string, string>>): Uint8Array {
    const members = this.#parts.body.members!;
    const changes: Record<string, string | undefined> = { stream_options: undefined, ...threshold };
    for (const [at, name] of tokenLimits.entries()) if (at === 0 || members.names.includes(name)) changes[name] = '1';
    // More than one token at least cannot be asked for beside one at most.
    if (members.names.includes('min_tokens')) changes.min_tokens = '0';
    return withMembers(this.#whole, members, { ...changes, stream: 'false', kv_transfer_params: prefillParams });
  }
}
