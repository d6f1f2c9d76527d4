/** What a request is taken for whose prompt nobody has read: so much work, for such a model. */
import type { Keys } from '@kvtier/kv-index';
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

/** @throws Refusal: it may be for any of several */
export function modelFor({ method }: Asked, read: Partial<NotRead>, candidates: readonly Candidate[]): string {
  const served = modelsOf(candidates);
  if (read.model !== undefined && served.has(read.model)) return read.model;
  // What has no body is as well served by one as by the other.
  if (read.why !== undefined && read.why !== 'no_body' && method === 'POST' && served.size > 1)
    throw noWorker(
      `${served.size} models are served here, and of this request's body (${read.why}) it is not known which one it is for; ` +
        'name it in x-gateway-model-name, or try again in a moment.',
    );
  return someModel(candidates);
}

export const modelsOf = (candidates: readonly Candidate[]): ReadonlySet<string> =>
  new Set(candidates.flatMap(({ worker }) => worker.facts?.model ?? []));

/** That of a ready worker; '' while there is none, which Dispatch refuses as any model that nobody serves. */
const someModel = (candidates: readonly Candidate[]): string =>
  (candidates.find(({ worker }) => worker.state === 'ready') ?? candidates[0])?.worker.facts?.model ?? '';
