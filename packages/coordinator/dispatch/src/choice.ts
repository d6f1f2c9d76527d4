/** What the API server and the endpoint picker ask of the coordinator's middle: a worker for a request, now. */
import type { Worker, WorkerFacts } from '@kvtier/registry';
import type { RoutedRequest } from '@kvtier/routing';
import type { Held, Share } from './ports.ts';

export interface DispatchRequest extends RoutedRequest {
  readonly id: string;
  readonly model: string;
  /** Names of the only workers that may be chosen (a gateway's subset); undefined: all. */
  readonly among: ReadonlySet<string> | undefined;
  /** Names of workers that failed on it already. */
  readonly except: ReadonlySet<string>;
  /**
   * Tokens of its answer that its client counts on: it goes to a worker whose pool holds all of them, as long as one is there. undefined: it
   * is as long as it can be.
   */
  readonly wantedTokens?: number | undefined;
  /** performance.now() until which its first token is wanted; undefined: whenever it comes. Nobody waits in the queue beyond it. */
  readonly firstTokenByMs?: number | undefined;
  /** A worker was asked for before, whether one was found or not: it is one request all the same. */
  readonly isAgain?: boolean;
  /**
   * Digest of the tokenizer and chat template that made its tokens (`WorkerFacts.textDigest`): a worker that loaded others beside its
   * weights would read other words, and is never chosen. undefined: nobody says.
   */
  readonly textDigest?: string | undefined;
  /**
   * Of an answer that has begun: what its worker said of its weights and of the meaning of token ids. It is tokens from here on, and goes on
   * where the same weights would go on, and the tokens are the same words, whatever chat template lies there.
   */
  readonly begunAt?: Pick<WorkerFacts, 'modelDigest' | 'tokenDigest'> | undefined;
  /** false: nothing is computed for it, as for a list of models: no answer of tokens ends it. undefined: it has an answer. */
  readonly hasAnswer?: false | undefined;
  /** Its answer is streamed: what comes of it first comes as soon as its prompt is computed. undefined: nobody says. */
  readonly isStreamed?: boolean | undefined;
  /** prefill: a worker that computes the prompt for another one; undefined: one that takes the whole request, or its decode. */
  readonly role?: 'prefill' | undefined;
}

/** A worker that the request is counted on from now on. `ended` must be called once, whatever happens. */
export interface Choice {
  readonly worker: Worker;
  /** Name of the policy, and its figures in one short line: for the answer's headers, logs and traces. */
  readonly policy: string;
  readonly why: string;
  /** Seconds from the choice to its first token there, as they are predicted whatever the policy: the worker computes all of its prompt. */
  readonly firstTokenS: number;
  /** What the KV index said that the worker has at hand of the prompt, and can have brought. */
  readonly match: Held;
  /** It was chosen among several by what they hold of its prompt, and of some that is guessed. */
  readonly isGuessed: boolean;
  /** What it adds to the worker's load until its end: `Worker.load` has it in it. */
  readonly share: Share;
  /** `isTimed` as of `Sent`. */
  firstToken(isTimed?: boolean): void;
  /** `answerTokens`: it gave a whole answer, of so many tokens; those that come are expected to be as long. */
  ended(answerTokens?: number): void;
}

export interface Dispatch {
  /**
   * Waits in the queue while all workers have enough to do.
   * @throws KvError DISCONNECTED: no worker serves this model (503), Outdated: none reads its tokens as they were meant; TOO_LONG:
   * no pool of them holds its prompt; BUSY: all are
   * saturated (429); the reason of `signal`
   */
  choose(request: DispatchRequest, signal: AbortSignal): Promise<Choice>;
}
