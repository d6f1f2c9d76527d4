/** What a request is taken for whose prompt nobody has read: so much work, for such a model, at those who know its name. */
import type { Keys } from '@kvtier/kv-index';
import type { Worker } from '@kvtier/registry';
import type { Asked } from './asked.ts';
import type { Candidate } from './endpoints.ts';
import type { Unread } from './metrics.ts';
import { noWorker } from './refusal.ts';

/** Why the prompt is not known; and the model, if it is all the same (`Picker.modelIn`). */
export interface NotRead {
  readonly why: Unread;
  readonly model?: string | undefined;
}

/** Bytes of text that make a token, tokens of an answer and of a block. */
const [bytesPerToken, someTokens, someBlockTokens] = [4, 256, 16];
const noKeys: Keys = new Int32Array(0);

/** Of its text, by its bytes. */
export function guess(asked: Asked, candidates: readonly Candidate[], bytes: number) {
  const told = candidates.find(({ worker }) => worker.facts !== undefined)?.worker.facts;
  const blockTokens = told?.blockTokens || someBlockTokens;
  const tokens = Math.max(1, Math.ceil(bytes / bytesPerToken));
  return { tokens, blockTokens, maxTokens: someTokens, keys: noKeys, session: asked.session };
}

/** Whom a request may go to, and by which model's name. */
export interface Target {
  readonly model: string;
  readonly candidates: readonly Candidate[];
  /** Another name of the model, which these alone know; undefined: it is asked for by its own. */
  readonly alias?: string;
}

/** By the first name told that some candidate knows: the body's own, then the header's. @throws Refusal: it may be for any of several */
export function targetOf(asked: Asked, read: Partial<NotRead>, candidates: readonly Candidate[]): Target {
  const told = knowing(read.model, candidates) ?? knowing(asked.model, candidates);
  if (told !== undefined) return told;
  const served = modelsOf(candidates);
  // A name that none of them knows is the pod's to refuse, unless another model's pod would, or one that may yet come to know it.
  if (asked.model !== undefined && (served.size > 1 || candidates.some(({ worker }) => worker.facts === undefined)))
    return { model: asked.model, candidates };
  // What has no body is as well served by one as by the other.
  if (read.why !== undefined && read.why !== 'no_body' && asked.method === 'POST' && served.size > 1)
    throw noWorker(
      `${served.size} models are served here, and of this request's body (${read.why}) it is not known which one it is for; ` +
        'name it in x-gateway-model-name, or try again in a moment.',
    );
  return { model: someModel(candidates), candidates };
}

/** Whether it matters which model a body names, beside what the header says. */
export const isModelWanted = (asked: Asked, candidates: readonly Candidate[]): boolean =>
  candidates.some(({ worker }) => (worker.facts?.otherNames?.length ?? 0) > 0) ||
  (asked.model === undefined && modelsOf(candidates).size > 1);

/** A model's own name first; of an alias or an adapter only those that list it: to others it is no model. undefined: nobody knows it. */
function knowing(name: string | undefined, candidates: readonly Candidate[]): Target | undefined {
  if (name === undefined) return undefined;
  if (modelsOf(candidates).has(name)) return { model: name, candidates };
  const who = candidates.filter(({ worker }) => lists(worker, name));
  if (who.length === 0) return undefined;
  const model = someModel(who);
  return { model, candidates: thoseKnowing({ model, alias: name }, who), alias: name };
}

/** Of these, whoever knows the name that it has for its model. */
export const thoseKnowing = (
  { model, alias }: Pick<Target, 'model' | 'alias'>,
  candidates: readonly Candidate[],
): readonly Candidate[] =>
  alias === undefined
    ? candidates
    : candidates.filter(({ worker }) => worker.facts?.model === model && lists(worker, alias));

const lists = ({ facts }: Worker, name: string): boolean =>
  facts?.otherNames?.some((other) => other.name === name) ?? false;

const modelsOf = (candidates: readonly Candidate[]): ReadonlySet<string> =>
  new Set(candidates.flatMap(({ worker }) => worker.facts?.model ?? []));

/** That of a ready worker; '' while there is none, which Dispatch refuses as any model that nobody serves. */
const someModel = (candidates: readonly Candidate[]): string =>
  (candidates.find(({ worker }) => worker.state === 'ready') ?? candidates[0])?.worker.facts?.model ?? '';
