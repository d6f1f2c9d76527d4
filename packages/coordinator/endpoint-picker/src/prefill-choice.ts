/**
 * Which pod computes a prompt for the pod that a gateway is told, by the rules of the coordinator's own API (`TwoLegs` there); the leg
 * itself is the sidecar's of the chosen pod.
 */
import type { Choice } from '@kvtier/dispatch';
import { type HandOffReason, NotPrefilled, type PodHandOff, type Routed } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import { noWorker } from './refusal.ts';

/** A prefill pod is taken if one has room soon; else the pod computes the prompt itself, where it may. */
const prefillWaitMs = 200;
const noPrefillers: ReadonlySet<string> = new Set();
/** By the names that the coordinator's own API has for them: what the body leaves no choice about, and who has no sidecar to tell. */
const byOnePod = { split: false, reason: 'client', prefillers: noPrefillers } as const;
const noDecode = { ...byOnePod, reason: 'no_decode', why: 'no decode pod takes requests' } as const;

export interface PrefillChoiceParts {
  /** undefined: all pods do both. */
  readonly pods?: PodHandOff | undefined;
  readonly logger: Logger;
}

export class PrefillChoice {
  readonly #parts: PrefillChoiceParts;

  constructor(parts: PrefillChoiceParts) {
    this.#parts = parts;
  }

  /**
   * The pod that computes the prompt, counted from now on; undefined: the chosen one does. `unsplit`: why it has to. `admit` is asked before
   * anything is counted. @throws what `admit` does, Refusal: none does, and the chosen one may not; the reason of `signal`
   */
  async choose(
    routed: Routed,
    unsplit: string | undefined,
    choice: Choice,
    admit: (splitS: number | undefined) => void,
    signal: AbortSignal,
  ): Promise<Choice | undefined> {
    const { pods, logger } = this.#parts;
    const isConcerned = pods?.concerns(routed.model) ?? false;
    const isWhole = unsplit !== undefined || hasNoSidecar(choice.worker);
    // The leg is the sidecar's, which cuts none by our time.
    const planned = isConcerned && !isWhole ? pods!.plan(routed, choice, undefined, uncutMs) : undefined;
    admit(planned?.thereS);
    if (pods === undefined || !isConcerned) return undefined;
    const { split, reason, why, prefillers } =
      planned ?? (hasNoSidecar(choice.worker) ? noDecode : { ...byOnePod, why: unsplit! });
    pods.metrics.decided(split, reason);
    logger.debug({ request: routed.id, split, why }, 'prefill and decode apart');
    if (reason === 'nobody') return fallBack(pods, reason, why);
    if (!split) return undefined;
    const { fallback, prefillMs } = pods.config;
    // The prompt is not its to compute; where it may have to be after all, it is known soon.
    if (!fallback) choice.firstToken();
    try {
      const prefill = await within(fallback ? prefillWaitMs : prefillMs, signal, (soon) =>
        pods.choosePrefill(routed, prefillers, noPrefillers, soon),
      );
      if (fallback) choice.firstToken();
      return prefill;
    } catch (error) {
      if (!(error instanceof NotPrefilled)) throw error;
      return fallBack(pods, error.reason, `${why}; ${error.message}`);
    }
  }
}

/** @throws Refusal: the chosen pod may not compute the prompt either */
function fallBack({ config, metrics }: PodHandOff, reason: HandOffReason, why: string): undefined {
  if (!config.fallback) throw noWorker(`Prefill and decode apart: ${why}; podHandOff.fallback is off, try again.`);
  metrics.fellBack(reason);
}

async function within<T>(ms: number, signal: AbortSignal, act: (soon: AbortSignal) => Promise<T>): Promise<T> {
  const soon = new AbortController();
  const leave = (): void => soon.abort(signal.reason);
  signal.addEventListener('abort', leave, { once: true });
  const timer = setTimeout(() => soon.abort(new NotPrefilled('busy', 'no pod has room')), ms);
  try {
    return await act(soon.signal);
  } finally {
    clearTimeout(timer);
    signal.removeEventListener('abort', leave);
  }
}

const uncutMs = Number.POSITIVE_INFINITY;

/** It only prefills: nobody there would read whom we name. One of both roles has a sidecar, whatever it leans to. */
const hasNoSidecar = ({ record }: Worker): boolean => record.role === 'prefill';
