/**
 * One request inside the engine.
 *
 *     waiting ──admit──▶ running ──▶ finished
 *      ▲  │                 │ └─▶ storing ─▶ finished         of a prompt that is computed for another worker
 *      │  └─admit─▶ loading │
 *      │               │    │        finished is reached from every state (abort, failure)
 *      └────done───────┴────┘ preempt
 *
 * Of a request that computes the head of a hit ('running', `head`) the rest is being loaded: it is never preempted, for it began when nobody
 * else was there, and has room for all of its prompt.
 *
 * Invariant: blocks are held in 'running', in 'loading', in 'waiting' after a load and in 'storing' until all are offered
 * (`holdsBlocks`), and in 'finished' only while a step or a load still uses them (`executing`, or an entry of `Loads`).
 */
import type { ChainHasher } from '@kvtier/identity';
import type { GroupBlocks, PrefixCacheRequest, RequestDescription } from '@kvtier/prefix-cache';
import { AwaitedPrompt } from './awaited-prompt.ts';
import { CheckedHashes } from './checked-hashes.ts';
import type { Head } from './head.ts';
import type { Offers } from './offers.ts';
import { PrefillOnly } from './prefill-only.ts';
import type { GenerateRequest, OnOutput } from './types.ts';

export type RequestState = 'waiting' | 'loading' | 'running' | 'storing' | 'finished';

/** For the one token that `append` hands over: hashes keep no reference to it. */
const oneToken = new Uint32Array(1);

export class EngineRequest implements PrefixCacheRequest {
  /** Names the request to the block pool and the connector; never used twice, unlike the caller's id. */
  id: string;
  readonly requestId: string;
  /** First come, first served; the latest is preempted first. */
  readonly arrival: number;
  /** Of a request that is prefilled for another worker: no more than the blocks that this one wants, unless it draws a token. */
  readonly promptTokens: number;
  /** Prompt and answer together never get longer here. */
  readonly maxTotalTokens: number;
  readonly params: GenerateRequest;
  readonly stopTokenIds: ReadonlySet<number>;
  readonly seed: bigint;
  readonly hashes: CheckedHashes;
  /** What KV events say of its blocks. */
  readonly description: RequestDescription;
  readonly extraKey: string;
  readonly reportMode?: 'full';
  readonly onOutput: OnOutput;
  readonly prefillOnly: PrefillOnly | undefined;
  readonly handOff: AwaitedPrompt | undefined;

  state: RequestState = 'waiting';
  computedTokens = 0;
  holdsBlocks = false;
  /** In the step that runs now. */
  executing = false;
  /** Of a hit that is computed from the front while the rest is loaded; undefined once the request has passed over that. */
  head: Head | undefined;
  /** Blocks before this one came from the tier or have been offered to it. */
  offeredBlocks = 0;
  /** What became of the offers of the blocks that it has, or had last. */
  offers: Offers | undefined;
  /** false once the tier has let this request down: it is not asked again. */
  mayLoad = true;
  /** Since it was let in, of its tokens some came from the cache or a tier. */
  hasHit = false;
  /** It has drawn no token over a hit, and computes all of its tokens itself. */
  skipReadingPrefixCache = false;
  /**
   * Blocks that it had then, in its tables. Until it draws a token, nothing that it computes is findable, or offered: only then are these
   * known to be at fault.
   */
  suspects: GroupBlocks | undefined;
  /** Loads that came short of every prefix that the request could go on from. */
  lostLoads = 0;
  /** It was passed over because as many as may load from the tier, or wait for other workers. */
  waitsBehind: 'loads' | 'hand-offs' | undefined;
  cancelMatchDeadline: (() => void) | undefined;

  readonly submittedUs: number;
  /** Start of the first step; undefined until then. */
  startedUs: number | undefined;
  loadUs = 0;
  /** After its first step, when the head of its hit was computed and the rest had not come. */
  headWaitUs = 0;
  /** Of the prompt, at first admission. */
  engineHitTokens = 0;
  loadedByTier: Readonly<Record<string, number>> = {};
  /** Of these, in tokens; no more than the prompt. */
  loadedTokens = 0;
  firstOutputDone = false;
  /** The first token, from the worker that computed the prompt: not told by this engine yet. */
  givenToken: number | undefined;
  /** Tokens that it will not have to compute, as far as is known while it waits: cached here, or being loaded. */
  expectedTokens = 0;
  /** What it has added to the engine's load (`EngineLoad.settle`). */
  readonly counted = { waiting: 0, running: 0, ahead: 0, blocks: 0 };

  /** Prompt and answer together, wherever it is given. */
  readonly #endTokens: number;
  #tokens: Int32Array;
  #tokenCount: number;

  constructor(options: {
    params: GenerateRequest;
    arrival: number;
    maxTotalTokens: number;
    seed: bigint;
    stopTokenIds: ReadonlySet<number>;
    hasher: ChainHasher;
    /** Where the hasher's hashes can collide. */
    digester?: ChainHasher | undefined;
    submittedUs: number;
    onOutput: OnOutput;
  }) {
    const { params } = options;
    this.params = params;
    this.requestId = params.requestId;
    this.arrival = options.arrival;
    this.id = `${params.requestId}#${options.arrival}`;
    const { prefillOnly, handOff } = params;
    this.prefillOnly = prefillOnly && new PrefillOnly(prefillOnly);
    this.handOff = handOff && new AwaitedPrompt(handOff);
    const prompt =
      prefillOnly && !prefillOnly.draws
        ? params.promptTokenIds.subarray(0, prefillOnly.blocks * options.hasher.blockTokens)
        : params.promptTokenIds;
    this.promptTokens = prompt.length;
    this.maxTotalTokens = prefillOnly ? prompt.length : options.maxTotalTokens;
    this.#endTokens = options.maxTotalTokens;
    this.seed = options.seed;
    this.stopTokenIds = options.stopTokenIds;
    this.submittedUs = options.submittedUs;
    this.onOutput = options.onOutput;
    this.#tokens = new Int32Array(prompt);
    this.#tokenCount = this.promptTokens;
    const { cacheSalt } = params;
    this.hashes = new CheckedHashes(options.hasher, options.digester, cacheSalt ? { cacheSalt } : {});
    this.description = {
      loraId: null,
      loraName: params.loraName || null,
      isPlain: !params.loraName && !cacheSalt,
      tokenIds: (first, end) => this.#tokens.subarray(first, end),
      copyTokens: (first, count, target, at) => copyWords(this.#tokens, first, count, target, at),
      extraKeys: (first) => (cacheSalt && first === 0 ? [cacheSalt] : null),
    };
    this.extraKey = params.cacheSalt || params.loraName ? JSON.stringify([params.loraName, params.cacheSalt]) : '';
    if (params.kvCacheReportMode === 'full') this.reportMode = 'full';
    this.hashes.append(prompt instanceof Uint32Array ? prompt : new Uint32Array(prompt));
  }

  get tokenCount(): number {
    return this.#tokenCount;
  }

  get running(): boolean {
    return this.state === 'running';
  }

  /** Tokens that its steps may compute now. */
  get openTokens(): number {
    return this.head?.endTokens ?? this.#tokenCount;
  }

  /** Tokens first..end-1: a view. */
  tokenIds(first: number, end: number): Int32Array {
    return this.#tokens.subarray(first, end);
  }

  /** Tokens first..first+count-1 to `target`, from `at` on: without a view for the one token of a decode. */
  copyTokens(first: number, count: number, target: Int32Array, at: number): void {
    for (let i = 0; i < count; i++) target[at + i] = this.#tokens[first + i]!;
  }

  /** A generated token; the chain of hashes grows with it, so that the next turn of a conversation hits it. */
  append(tokenId: number): void {
    if (this.#tokenCount === this.#tokens.length) {
      const grown = new Int32Array(Math.min(this.maxTotalTokens, Math.max(16, this.#tokens.length * 2)));
      grown.set(this.#tokens);
      this.#tokens = grown;
    }
    this.#tokens[this.#tokenCount++] = tokenId;
    oneToken[0] = tokenId;
    this.hashes.append(oneToken);
  }

  /**
   * The answer's first token, as another worker drew it. False: this one is drawing its own, or has, or the answer ends with it. What is
   * drawn follows from seed and position, so it is the one that would be drawn here; and should it not be, the answer goes on from what
   * its reader has been given, as one does that is moved to another worker.
   */
  takeFirstToken(tokenId: number): boolean {
    const isOpen = this.state !== 'finished' && this.handOff !== undefined && !this.firstOutputDone;
    if (!isOpen || this.executing || this.#tokenCount !== this.promptTokens) return false;
    if (this.finishReasonWith(tokenId) !== '') return false;
    this.append(tokenId);
    this.givenToken = tokenId;
    return true;
  }

  /** A token is drawn after the last one: nobody wants one after the blocks that another worker waits for, unless it says so. */
  get draws(): boolean {
    return this.prefillOnly?.draws ?? true;
  }

  /** Why the answer ends after its last token; '' when it does not. */
  finishReason(): '' | 'stop' | 'length' {
    return this.#reasonOf(this.#tokens[this.#tokenCount - 1]!, this.#tokenCount);
  }

  /** The same if this token came next. */
  finishReasonWith(tokenId: number): '' | 'stop' | 'length' {
    return this.#reasonOf(tokenId, this.#tokenCount + 1);
  }

  #reasonOf(last: number, count: number): '' | 'stop' | 'length' {
    if (this.stopTokenIds.has(last)) return 'stop';
    return count >= this.#endTokens ? 'length' : '';
  }
}

/** A loop is faster than making a view, up to some length. */
function copyWords(from: Int32Array, first: number, count: number, to: Uint32Array, at: number): void {
  if (count > 128) to.set(from.subarray(first, first + count), at);
  else for (let i = 0; i < count; i++) to[at + i] = from[first + i]!;
}
