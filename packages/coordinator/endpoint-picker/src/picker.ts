/**
 * From what a gateway tells of one request to an endpoint: its body is read elsewhere (`BodyReader`), and Dispatch chooses.
 *
 *   body ─► BodyReader ─► model, tokens, block hashes ─┐
 *   no body, too large, not understood ─► by load alone ┴─► Dispatch.choose among those the gateway allows ─► "IP:PORT"
 *
 * A body that cannot be read is no reason to refuse it: the pod judges it. Refused is what nobody can serve now, and what would go to
 * any of several models: a pod of another one would say that there is no such model.
 */
import { type Choice, type Dispatch, type DispatchRequest, Saturated, targetsIn } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { Keys } from '@kvtier/kv-index';
import { endpointOf, type PodHandOff, type Routed } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import type { Asked } from './asked.ts';
import { type Candidate, candidatesOf, fallbacksOf, whyNone } from './endpoints.ts';
import { joined } from './held-body.ts';
import type { PickerMetrics } from './metrics.ts';
import { modelIn } from './named-model.ts';
import { PrefillChoice } from './prefill-choice.ts';
import { noWorker, Refusal } from './refusal.ts';
import { Share } from './share.ts';
import { guess, isModelWanted, type NotRead, type Target, targetOf, thoseKnowing } from './unread.ts';
import { mayTellTransfers, whyNotUnread } from './unread-transfers.ts';

/** What routing has to know of a request's body. */
export interface BodyFacts {
  /** As the body names it; undefined: it names none. */
  readonly model: string | undefined;
  readonly tokens: number;
  readonly blockTokens: number;
  readonly maxTokens: number;
  /** Names of the only workers that know the name that it has for its model; undefined: all of the model do. */
  readonly among?: ReadonlySet<string> | undefined;
  /** Hashes of the prompt's full blocks. */
  readonly keys: Keys;
  /** Empty: none. */
  readonly session: string;
  /** Why one pod has to serve all of it; undefined: one may compute the prompt for another. */
  readonly unsplit?: string | undefined;
  /** Why it is refused, unless clients may say to pods where blocks come from or go to (`PodHandOffConfig.clientParams`). */
  readonly whyNoTransfer?: string;
  /** It brings a loan of blocks that is good once: no second pod gets it. */
  readonly isLoan?: true;
}

export interface BodyReader {
  /**
   * `body`: the bytes of a POST to `path`; they are the reader's from now on, and may move to a thread. Takes no long turn of the event
   * loop. @throws anything: the request is then routed by load alone
   */
  read(path: string, body: ArrayBuffer, signal: AbortSignal): Promise<BodyFacts>;
}

/** What a request's client wants. */
interface Wanted {
  readonly model: string;
  readonly arrivedMs: number;
  readonly ttftMs: number | undefined;
  /** Others are answered by no model, and say nothing of whether one answers. */
  readonly isPost: boolean;
}

/** A choice, and those that could have been chosen. */
interface Found {
  readonly choice: Choice;
  readonly candidates: readonly Candidate[];
}

/** Who is told what becomes of requests at pods, by number: the registry's fleet is this. */
export interface Outcomes {
  /** A request goes there. */
  went(number: number): void;
  /** Something of an answer has just come. */
  heard(number: number): void;
  /** An answer is good. */
  succeeded(number: number): void;
  /** A request failed there. `why`: a few words. */
  failed(number: number, why: string): void;
  /** A request failed, there or on its way. */
  doubted(number: number): void;
}

/** Which requests would be answered too late; the coordinator has one for both ways in. */
export interface Deadlines {
  /** @throws Saturated: its first token would come too late */
  admit(wanted: Wanted, worker: string, predictedS: number): void;
  came(predictedS: number, seenS: number, of: { readonly model: string; readonly worker: string }): void;
}

export interface PickerParts {
  readonly dispatch: Dispatch;
  /** As `Fleet.workers`. */
  readonly workers: () => readonly (Worker | undefined)[];
  readonly outcomes: Outcomes;
  readonly reader: BodyReader;
  /** undefined: all pods do both. */
  readonly pods?: PodHandOff | undefined;
  readonly inTime: Deadlines;
  /** Until the first token of a request that does not say so itself; undefined: as late as it comes. */
  readonly ttftMs: number | undefined;
  readonly metrics: PickerMetrics;
  readonly logger: Logger;
  /** Endpoints that are named after the chosen one. */
  readonly fallbacks: number;
}

export interface Picked {
  /** "IP:PORT"; several with commas. */
  readonly endpoints: string;
  /** The first of them. */
  readonly endpoint: string;
  readonly share: Share;
  /** "HOST:PORT" of the pod that computes the prompt; undefined: the chosen one does. */
  readonly prefiller: string | undefined;
  /** Its first token came, in a stream. */
  readonly came: () => void;
  /** As `Outcomes`, of the chosen pod. */
  readonly heard: () => void;
  readonly judgement: Judgement;
  /** The gateway was named no other endpoint. */
  readonly isAlone: boolean;
}

/** What an answer says of the chosen pod. */
export interface Judgement {
  readonly succeeded: () => void;
  readonly failed: (why: string) => void;
  readonly doubted: () => void;
}

/** The pieces of a body, or why there are none. */
export type BodyOrWhy = readonly Buffer[] | NotRead;

/** Endpoints at which a request may be too late before it is told so, and workers that it may not have. */
const maxTries = 5;

export class Picker {
  readonly #parts: PickerParts;
  readonly #prefill: PrefillChoice;

  constructor(parts: PickerParts) {
    this.#parts = parts;
    this.#prefill = new PrefillChoice(parts);
  }

  /**
   * Waits while all workers have enough to do. `bytes`: of the body, as far as it is known.
   * @throws Refusal, what Dispatch throws, or the reason of `signal`
   */
  async pick(asked: Asked, body: BodyOrWhy, bytes: number, signal: AbortSignal): Promise<Picked> {
    const { workers, ttftMs, pods } = this.#parts;
    const targets = targetsIn(asked.targets, ttftMs);
    const read = await this.#read(asked, body, signal);
    if (signal.aborted) throw signal.reason;
    const facts = 'why' in read ? undefined : read;
    if (facts?.whyNoTransfer !== undefined && !pods?.config.clientParams)
      throw new Refusal(400, 'refused', `${facts.whyNoTransfer}, or let all clients (podHandOff.clientParams).`);
    const mayGo = (): Candidate[] => {
      const allowed = candidatesOf(workers(), asked.subset);
      const knowing = facts?.among;
      return knowing ? allowed.filter(({ worker }) => knowing.has(worker.record.name)) : allowed;
    };
    const reachable = mayGo();
    if (reachable.length === 0) throw noWorker(whyNone(workers(), asked.subset));
    const target: Target =
      facts?.model === undefined
        ? targetOf(asked, 'why' in read ? read : {}, reachable)
        : { model: facts.model, candidates: reachable };
    const { model, candidates } = target;
    const {
      unsplit,
      isLoan,
      whyNoTransfer: _,
      ...prompt
    } = facts ?? {
      ...guess(asked, candidates, bytes),
      ...{ unsplit: undefined, isLoan: undefined, whyNoTransfer: undefined },
    };
    const { arrivedMs } = asked;
    const isPost = asked.method === 'POST';
    const request: DispatchRequest = {
      ...prompt,
      ...(!isPost && { hasAnswer: false }),
      id: asked.id,
      model,
      session: asked.session || (facts?.session ?? ''),
      // Where the body leaves out some, whoever comes meanwhile is not given it, only to give it back and queue anew.
      among:
        facts?.among === undefined && candidates.length === workers().filter((worker) => worker !== undefined).length
          ? undefined
          : namesOf(candidates),
      except: new Set(),
      firstTokenByMs: targets.ttftMs === undefined ? undefined : asked.arrivedMs + targets.ttftMs,
    };
    const wanted = { model: request.model, arrivedMs, ttftMs: targets.ttftMs, isPost };
    let late: Saturated | undefined;
    const those = { candidates, ofNow: () => thoseKnowing(target, mayGo()) };
    for (let except = new Set<string>(); ; ) {
      const found = await this.#choose({ ...request, except }, those, signal).catch((error: unknown) => {
        throw late ?? error;
      });
      const { choice } = found;
      try {
        return await this.#picked(request, { unsplit, isLoan }, wanted, found, signal);
      } catch (error) {
        choice.ended();
        if (!(error instanceof Saturated) || except.size + 1 >= maxTries) throw error;
        late ??= error;
        except = new Set([...except, choice.worker.record.name]);
      }
    }
  }

  /** One of those that it may go to: of `candidates`, or, as others may have come while it waited, of those that there are by then. */
  async #choose(
    request: DispatchRequest,
    { candidates, ofNow }: { readonly candidates: readonly Candidate[]; readonly ofNow: () => readonly Candidate[] },
    signal: AbortSignal,
  ): Promise<Found> {
    let asked = request;
    for (let left = maxTries; ; left--) {
      const choice = await chosen(this.#parts.dispatch, asked, signal);
      const those = isAmong(candidates, choice) ? candidates : ofNow();
      if (isAmong(those, choice)) return { choice, candidates: those };
      choice.ended();
      const { name } = choice.worker.record;
      if (left === 1) throw new Error(`dispatch chose ${name}, which this request may not go to`);
      asked = { ...asked, among: namesOf(those), except: new Set([...asked.except, name]) };
    }
  }

  /**
   * What a body names that is not read as a prompt; undefined, too, where that matters to nobody.
   * @throws the reason of `signal`
   */
  async modelIn(asked: Asked, pieces: readonly Buffer[], signal: AbortSignal): Promise<string | undefined> {
    const candidates = candidatesOf(this.#parts.workers(), asked.subset);
    return isModelWanted(asked, candidates) ? modelIn(pieces, signal) : undefined;
  }

  /** @throws Saturated: its first token would come too late there */
  async #picked(
    request: Routed,
    { unsplit, isLoan }: { readonly unsplit: string | undefined; readonly isLoan: true | undefined },
    wanted: Wanted,
    { choice, candidates }: Found,
    signal: AbortSignal,
  ): Promise<Picked> {
    const { inTime, outcomes, fallbacks } = this.#parts;
    const { number, record } = choice.worker;
    const { name } = record;
    const endpoint = endpointOf(record)!;
    let predictedS = choice.firstTokenS;
    const admit = (splitS: number | undefined): void => {
      predictedS = splitS ?? predictedS;
      inTime.admit(wanted, name, predictedS);
    };
    const prefill = await this.#prefill.choose(request, unsplit, choice, admit, signal);
    const pickedAtMs = performance.now();
    if (wanted.isPost) outcomes.went(number);
    const others = isLoan ? [] : fallbacksOf(choice.worker, candidates, fallbacks, prefill?.worker);
    return {
      came: () =>
        inTime.came(predictedS, (performance.now() - pickedAtMs) / 1_000, { model: wanted.model, worker: name }),
      heard: () => outcomes.heard(number),
      judgement: wanted.isPost ? judgementOf(outcomes, number, prefill?.worker.number) : untold,
      endpoint,
      endpoints: [endpoint, ...others].join(','),
      isAlone: others.length === 0,
      share: new Share(choice, prefill),
      prefiller: prefill && endpointOf(prefill.worker.record)!,
    };
  }

  async #read(asked: Asked, body: BodyOrWhy, signal: AbortSignal): Promise<BodyFacts | NotRead> {
    const { reader, metrics, logger } = this.#parts;
    let not: NotRead;
    if ('why' in body) not = body;
    else if (asked.method !== 'POST' || body.every((piece) => piece.length === 0)) not = { why: 'no_body' };
    else {
      try {
        return await reader.read(asked.path, await joined(body, signal), signal);
      } catch (error) {
        if (signal.aborted) throw signal.reason;
        if (!this.#parts.pods?.config.clientParams && (await this.#mayTellTransfers(body, error, signal)))
          throw new Refusal(400, 'refused', `${whyNotUnread}, or let all clients (podHandOff.clientParams).`);
        logger.debug({ request: asked.id, err: error }, 'a body was not understood: routed by load alone');
        not = { why: 'not_understood', model: await this.modelIn(asked, body, signal) };
      }
    }
    metrics.countUnread(not.why);
    return not;
  }

  /** `error`: why it was not read, a KvError where that says nothing of what is in it. */
  async #mayTellTransfers(body: readonly Buffer[], error: unknown, signal: AbortSignal): Promise<boolean> {
    // Once more: the first copy went to a thread.
    return mayTellTransfers(Buffer.from(await joined(body, signal)), !(error instanceof KvError));
  }
}

const untold: Judgement = { succeeded: () => {}, failed: () => {}, doubted: () => {} };

/** The sidecar passes on what a prefill pod answers as if it were its pod's: which one of both failed is not known. */
function judgementOf(outcomes: Outcomes, number: number, prefill: number | undefined): Judgement {
  const doubted = (): void => {
    outcomes.doubted(number);
    if (prefill !== undefined) outcomes.doubted(prefill);
  };
  const failed = (why: string): void => (prefill === undefined ? outcomes.failed(number, why) : doubted());
  return { succeeded: () => outcomes.succeeded(number), failed, doubted };
}

const isAmong = (candidates: readonly Candidate[], { worker: { number } }: Choice): boolean =>
  candidates.some(({ worker }) => worker.number === number);

const namesOf = (candidates: readonly Candidate[]): ReadonlySet<string> =>
  new Set(candidates.map(({ worker }) => worker.record.name));

/** Whatever Dispatch does: when `signal` aborts, this has ended, and a choice that comes later is given back. */
function chosen(dispatch: Dispatch, request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
  return new Promise((resolve, reject) => {
    const leave = (): void => reject(signal.reason);
    signal.addEventListener('abort', leave, { once: true });
    const settled = (): void => signal.removeEventListener('abort', leave);
    new Promise<Choice>((begin) => begin(dispatch.choose(request, signal))).then(
      (choice) => {
        settled();
        if (signal.aborted) choice.ended();
        else resolve(choice);
      },
      (error: unknown) => {
        settled();
        reject(error);
      },
    );
  });
}
