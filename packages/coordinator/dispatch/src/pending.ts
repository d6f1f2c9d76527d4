/** A request from being asked for to its choice: what the policy looks at, and who waits for it. */
import type { Keys } from '@kvtier/kv-index';
import type { Worker } from '@kvtier/registry';
import type { RoutedRequest } from '@kvtier/routing';
import type { Choice, DispatchRequest } from './choice.ts';
import { Numbers } from './numbers.ts';
import type { Held } from './ports.ts';

/** What a request that waits was told of the index is looked up again after so long. */
const matchedMs = 100;

export class Pending implements RoutedRequest {
  readonly request: DispatchRequest;
  readonly tokens: number;
  readonly blockTokens: number;
  /** Of its answer, as long as answers are expected to be. */
  readonly maxTokens: number;
  readonly keys: Keys;
  readonly session: string;
  /** Seconds of work at best. */
  needsS = 0;
  matches: readonly Held[] = [];
  /** The workers that it may have, and of how many changes of them that is known (`waiters.ts`). */
  readonly allowed = new Numbers();
  checkedAt = -1;
  /** While it waits. */
  settle: ((outcome: Choice | Error) => void) | undefined;
  #version = -1;
  #matchedAtMs = 0;

  constructor(request: DispatchRequest, answerTokens: number) {
    this.request = request;
    this.tokens = request.tokens;
    this.blockTokens = Math.max(request.blockTokens, 1);
    this.maxTokens = answerTokens;
    this.keys = request.keys;
    this.session = request.session;
  }

  allows(worker: Worker): boolean {
    return this.names(worker) && this.isReadBy(worker) && this.fits(worker);
  }

  /** It is not forbidden to go there. */
  names({ record: { name } }: Worker): boolean {
    const { among, except } = this.request;
    return !except.has(name) && (among === undefined || among.has(name));
  }

  /** Its tokens are the same words there, and what has begun goes on as it began. What somebody does not say is taken for equal. */
  isReadBy({ facts }: Worker): boolean {
    const { textDigest, begunAt } = this.request;
    if (begunAt?.modelDigest && facts?.modelDigest && facts.modelDigest !== begunAt.modelDigest) return false;
    if (begunAt?.tokenDigest && facts?.tokenDigest) return facts.tokenDigest === begunAt.tokenDigest;
    return textDigest === undefined || facts?.textDigest === undefined || facts.textDigest === textDigest;
  }

  /** Its pool holds it, with one token of the answer at least. Who does not say how much that is holds all. */
  fits({ facts }: Worker): boolean {
    return this.tokens + (this.request.wantedTokens ?? 1) <= (facts?.maxTotalTokens ?? Number.POSITIVE_INFINITY);
  }

  isMatched(version: number, nowMs: number): boolean {
    return version === this.#version && nowMs - this.#matchedAtMs < matchedMs;
  }

  matched(version: number, nowMs: number, matches: readonly Held[]): void {
    this.#version = version;
    this.#matchedAtMs = nowMs;
    this.matches = matches;
  }
}
