/**
 * The line to a pod with OpenAI's API (vLLM, SGLang): it is asked what it serves, then its metrics are scraped again and again, and
 * requests go there as they came, their answers back as they come.
 *
 * A scrape that fails makes it silent: it gets nothing new. One that is late does when nothing of any answer comes either; while answers come, its
 * metrics may be late for a while, as the load that they tell of is known but for what others have there. Answers under way go on
 * (pod-requests.ts: how long).
 *
 * A request that fails there makes it doubted: before its metrics count again it is asked whether it is well, and is silent when it is not. When
 * requests fail though it says that it is well, it rests (request-failures.ts). Of requests that gateways send there they tell.
 */
import { KvError } from '@kvtier/errors';
import { type Link, type LinkHost, type LinkTimes, noLoad, Pause } from './link.ts';
import { expectedLoads } from './load-rates.ts';
import { cacheOf, epochOf, PodAsks } from './pod-asks.ts';
import type { PodAddress } from './pod-connection.ts';
import { PodLoad } from './pod-load.ts';
import { type Forwarded, PodRequests } from './pod-requests.ts';
import { RequestFailures } from './request-failures.ts';
import type { Share } from './sent-ledger.ts';
import type { StepLine } from './step-line.ts';
import type { Sent, WorkerFacts, WorkerLoad } from './worker.ts';

export interface OpenaiLinkOptions extends PodAddress {
  readonly host: LinkHost;
  readonly times: LinkTimes;
}

export class OpenaiLink implements Link {
  readonly #options: OpenaiLinkOptions;
  /** Connections of their own: neither waits for the other. */
  readonly #requests: PodRequests;
  readonly #asks: PodAsks;
  readonly #pod = new PodLoad();
  readonly #pause = new Pause();
  readonly #failures = new RequestFailures();
  /** A request has failed since it said that it was well. */
  #isDoubted = false;
  #totalBlocks = 0;
  #blockTokens = 0;
  #run: Promise<void> | undefined;

  constructor(options: OpenaiLinkOptions) {
    this.#options = options;
    const { times, host } = options;
    this.#requests = new PodRequests(
      options,
      times.askMs,
      () => host.ended(),
      (failure) => this.#came(failure),
    );
    this.#asks = new PodAsks(options, times.askMs);
  }

  start(): void {
    this.#run ??= this.#watch();
  }

  async close(): Promise<void> {
    this.#pause.stop();
    await Promise.all([this.#requests.close(), this.#asks.close()]);
    await this.#run;
  }

  get open(): number {
    return Math.max(this.#pod.open, this.#requests.size);
  }

  get measuredPrefillTokensPerS(): number {
    return this.#pod.prefillTokensPerS;
  }

  get stepLine(): StepLine {
    return this.#pod.stepLine;
  }

  /** No pod tells it. */
  get measuredLoadBlocksPerS(): readonly number[] {
    return noLoad.loadBlocksPerS;
  }

  get isFailing(): boolean {
    return this.#failures.inRow > 0;
  }

  load(): WorkerLoad {
    const { host } = this.#options;
    const usualRate = (): number => host.usualPrefillTokensPerS();
    const load = this.#pod.load(this.#totalBlocks, usualRate, () => host.usualStepPerRequestS());
    const usual = this.#blockTokens > 0 ? host.usualLoadBlocksPerS() : undefined;
    if (usual === undefined) return load;
    const computedBlocksPerS = load.prefillTokensPerS / this.#blockTokens;
    return { ...load, loadBlocksPerS: expectedLoads(load.loadBlocksPerS, usual, computedBlocksPerS) };
  }

  send(share: Share): Sent {
    return this.#pod.send(share, performance.now(), () => this.#options.host.ended());
  }

  went(): void {
    const restMs = this.#failures.sent(performance.now(), () => this.#options.host.maySpare());
    if (restMs > 0) this.#rest('others wait for what becomes of the next one');
  }

  heard(): void {
    this.#requests.heard();
  }

  succeeded(): void {
    this.#came(undefined);
  }

  failed(why: string): void {
    this.#came(why);
  }

  doubted(): void {
    this.#isDoubted = true;
  }

  /** One request (POST), as it came; `headers` without those of one hop. @throws KvError BUSY, DISCONNECTED, or the reason of `signal` */
  forward(
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded> {
    this.went();
    return this.#requests.forward(path, headers, body, signal);
  }

  /** What a request says of the pod: it has answered, or this failed. */
  #came(failure: string | undefined): void {
    const { host } = this.#options;
    if (failure === undefined) {
      this.#isWell();
      return;
    }
    this.#isDoubted = true;
    const restMs = this.#failures.failed(performance.now(), () => host.maySpare());
    if (restMs > 0) this.#rest(`the last with "${failure}", and it gets nothing new for ${restMs / 1_000} s`);
  }

  #rest(what: string): void {
    const { name, host } = this.#options;
    host.rests(`worker ${name}: ${this.#failures.inRow} requests in a row failed there, ${what}; see its log`);
  }

  #isWell(): void {
    this.#failures.succeeded();
    this.#options.host.rests(undefined);
  }

  async #watch(): Promise<void> {
    const { name, host, times } = this.#options;
    let pauseMs = times.firstPauseMs;
    let goodAtMs = performance.now();
    const heardAtMs = (): number => this.#requests.heardAtMs;
    const { podSilentMs: silentMs, podBlindMs } = times;
    const patience = { silentMs, mostMs: Math.max(podBlindMs, silentMs), heardAtMs };
    while (!this.#pause.stopped) {
      let refused = false;
      try {
        let facts = await this.#asks.describe();
        this.#described(facts);
        this.#isDoubted = false;
        this.#isWell();
        for (;;) {
          const isDoubted = this.#isDoubted;
          this.#isDoubted = false;
          if (isDoubted) await this.#asks.health(patience);
          const begunAtMs = performance.now();
          const openThen = this.#pod.open;
          const scrape = await this.#asks.scrape(patience);
          if (epochOf(this.#options.origin, scrape) !== facts.bootEpoch)
            throw new KvError('DISCONNECTED', `worker ${name}: was started anew; asked again`, { retry: true });
          goodAtMs = performance.now();
          const learned = { ...facts, ...cacheOf(scrape, facts) };
          const { blockTokens, totalBlocks, engines } = facts;
          if (
            learned.blockTokens !== blockTokens ||
            learned.totalBlocks !== totalBlocks ||
            learned.engines !== engines
          ) {
            this.#described(learned);
            facts = learned;
          }
          this.#pod.scraped(scrape, begunAtMs, openThen, goodAtMs);
          pauseMs = times.firstPauseMs;
          host.answers(scrape.asleep);
          this.#mayServe(goodAtMs);
          await this.#pause.wait(times.scrapeMs);
          if (this.#pause.stopped) return;
        }
      } catch (thrown) {
        if (this.#pause.stopped) return;
        const error = KvError.from(thrown);
        refused = error.code === 'CONFIG' || error.code === 'PROTOCOL';
        if (refused) host.refused(error.message);
        else {
          host.lost(error);
          this.#requests.silent(error, performance.now() - Math.max(goodAtMs, heardAtMs()));
        }
      }
      await this.#pause.wait(refused ? times.refusedPauseMs : pauseMs);
      if (!refused) pauseMs = Math.min(times.pauseMs, pauseMs * 2);
    }
  }

  /** Its rest ends with its time, and sooner when nobody else serves in its place. */
  #mayServe(nowMs: number): void {
    const { host } = this.#options;
    if (this.#failures.isResting(nowMs) && host.maySpare()) return;
    this.#failures.woken();
    host.rests(undefined);
  }

  /** @throws KvError CONFIG: it cannot be of this cluster */
  #described(facts: WorkerFacts): void {
    const why = this.#options.host.described(facts);
    if (why !== undefined) throw new KvError('CONFIG', why);
    this.#totalBlocks = facts.totalBlocks;
    this.#blockTokens = facts.blockTokens;
  }
}
