/**
 * The line to a worker of ours: it is asked what it is, then it streams its load. That stream is its sign of life: when it breaks, or
 * says nothing for `silentMs`, the worker is silent, what runs there ends with DISCONNECTED (to be tried elsewhere), and the line looks for
 * it until it is back.
 *
 * Invariant: every wait ends by a deadline; nothing the worker says counts before it was checked.
 */
import { KvError } from '@kvtier/errors';
import { Watch } from '@kvtier/runtime';
import type { EngineLoad, GenerateEvent, GenerateRequest, TlsFiles } from '@kvtier/wire/grpc';
import { believedRate } from './believed-rate.ts';
import { EngineCalls, type OnEvent } from './engine-calls.ts';
import { factsOf } from './facts.ts';
import { type Link, type LinkHost, type LinkTimes, noLoad, Pause } from './link.ts';
import { expectedLoads } from './load-rates.ts';
import { type Entry, SentLedger, type Share } from './sent-ledger.ts';
import { loadOf, type ToldLoad } from './told-load.ts';
import type { Sent, WorkerLoad } from './worker.ts';

/** Within `silentMs`. */
const looksForSilence = 16;

export interface KvtierLinkOptions {
  readonly name: string;
  /** "unix:/path" or "host:port" */
  readonly address: string;
  readonly tls?: TlsFiles | undefined;
  /** Who we are, among all that send to this worker. */
  readonly sender: string;
  readonly host: LinkHost;
  readonly times: LinkTimes;
  /** Names of the KV index's media, by their numbers. */
  readonly media: readonly string[];
}

export class KvtierLink implements Link {
  readonly calls: EngineCalls;
  readonly #options: KvtierLinkOptions;
  readonly #ledger = new SentLedger();
  readonly #pause = new Pause();
  #told: ToldLoad | undefined;
  #blockTokens = 1;
  #toldAtMs = 0;
  /** When its prefill rate was another one last: a worker that computes prompts measures anew with each step. */
  #ratedAtMs = 0;
  #measuredLoads: readonly number[] = noLoad.loadBlocksPerS;
  /** When tokens came last: a step ended, and the next one began. */
  #tokensAtMs = 0;
  /** What `load` gives, until something changes. */
  #load: { -readonly [K in keyof WorkerLoad]: WorkerLoad[K] } | undefined;
  #running: Promise<void> | undefined;
  #stopWatch: (() => void) | undefined;

  constructor(options: KvtierLinkOptions) {
    this.#options = options;
    const { address, tls, times } = options;
    this.calls = new EngineCalls({ address, tls, describeDeadlineMs: times.askMs });
  }

  start(): void {
    this.#running ??= this.#run();
  }

  async close(): Promise<void> {
    this.#pause.stop();
    this.#stopWatch?.();
    const { name } = this.#options;
    this.calls.cut(new KvError('DISCONNECTED', `worker ${name}: has left; try again`, { retry: true }));
    this.calls.close();
    await this.#running;
  }

  get open(): number {
    return this.#ledger.open + this.calls.running;
  }

  get measuredPrefillTokensPerS(): number {
    return this.#told?.rates?.prefillTokensPerS ?? 0;
  }

  get measuredLoadBlocksPerS(): readonly number[] {
    return this.#measuredLoads;
  }

  /** As `EngineCalls.generate`; the worker's load names it, when it was sent (`send`) under its id. */
  async *generate(request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, void> {
    const sentNumber = this.#ledger.numberOf(request.requestId);
    const { sender } = this.#options;
    try {
      const asked = sentNumber === undefined ? request : { ...request, sender, sentNumber };
      for await (const event of this.calls.generate(asked, signal)) {
        this.#stepEnded();
        if (event.finishReason !== '') this.#over(sentNumber);
        yield event;
      }
    } finally {
      this.#options.host.ended();
    }
  }

  /** As `EngineCalls.follow`; the worker's load names it, when it was sent (`send`) under its id. */
  async follow(request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void> {
    const sentNumber = this.#ledger.numberOf(request.requestId);
    const { sender } = this.#options;
    try {
      const asked = sentNumber === undefined ? request : { ...request, sender, sentNumber };
      await this.calls.follow(asked, signal, (event) => {
        this.#stepEnded();
        if (event.finishReason !== '') this.#over(sentNumber);
        return onEvent(event);
      });
    } finally {
      this.#options.host.ended();
    }
  }

  /** Tokens come at the end of a step. For each of them: what else is known of the load stays as it is. */
  #stepEnded(): void {
    this.#tokensAtMs = performance.now();
    if (this.#load?.stepTokens === 0) this.#load.stepBegunAtMs = this.#tokensAtMs;
  }

  /** Before anybody hears of it: the choice that its end brings about knows of it. */
  #over(number: number | undefined): void {
    if (number === undefined) return;
    this.#ledger.over(number);
    this.#load = undefined;
  }

  send(share: Share): Sent {
    const entry: Entry = this.#ledger.send(share);
    this.#load = undefined;
    return {
      firstToken: () => {
        this.#ledger.begun(entry);
        this.#load = undefined;
      },
      ended: () => {
        this.#ledger.ended(entry);
        this.#load = undefined;
        this.#options.host.ended();
      },
    };
  }

  load(): WorkerLoad {
    this.#load ??= this.#sum();
    return this.#load;
  }

  #sum(): WorkerLoad {
    const told = this.#told;
    const { host } = this.#options;
    const { waiting, running, tokensAhead, blocks, loadAheadS } = this.#ledger;
    const rates = told?.rates;
    const usual = (): number => host.usualPrefillTokensPerS();
    const oldMs = performance.now() - this.#ratedAtMs;
    const prefillTokensPerS = believedRate(rates?.prefillTokensPerS ?? 0, usual, oldMs);
    const computedBlocksPerS = prefillTokensPerS / this.#blockTokens;
    return {
      // Below 0 only of an older worker, which does not name what has ended.
      waiting: Math.max((told?.waiting ?? 0) + waiting, 0),
      running: Math.max((told?.running ?? 0) + running, 0),
      tokensAhead: (told?.tokensAhead ?? 0) + tokensAhead,
      stepTokens: told?.step?.tokens ?? 0,
      stepBegunAtMs: told?.step === undefined ? this.#tokensAtMs : this.#toldAtMs - told.step.forS * 1_000,
      usedBlocks: told?.usedBlocks ?? 0,
      waitingBlocks: (told?.waitingBlocks ?? 0) + blocks,
      freedBlocksPerS: rates?.freedBlocksPerS ?? 0,
      loadAheadS: (told?.loadAheadS ?? 0) + loadAheadS,
      prefillTokensPerS,
      prefillStepS: rates?.prefillStepS ?? 0,
      pacingTrust: rates?.pacingTrust ?? 0,
      stepS: rates?.stepS ?? 0,
      stepPerRequestS: rates?.stepPerRequestS ?? 0,
      loadBlocksPerS: expectedLoads(this.#measuredLoads, host.usualLoadBlocksPerS(), computedBlocksPerS),
      toldAtMs: this.#toldAtMs,
    };
  }

  async #run(): Promise<void> {
    const { name, host, times } = this.#options;
    let pauseMs = times.firstPauseMs;
    while (!this.#pause.stopped) {
      let refused = false;
      try {
        const facts = factsOf(name, await this.calls.describe());
        this.#blockTokens = Math.max(facts.blockTokens, 1);
        const why = host.described(facts);
        if (why !== undefined) throw new KvError('CONFIG', why);
        await this.#watch(facts.bootEpoch, () => {
          pauseMs = times.firstPauseMs;
        });
      } catch (thrown) {
        if (this.#pause.stopped) return;
        const error = KvError.from(thrown);
        refused = error.code === 'CONFIG' || error.code === 'PROTOCOL';
        if (refused) host.refused(error.message);
        else this.#lost(error);
      }
      await this.#pause.wait(refused ? times.refusedPauseMs : pauseMs);
      if (!refused) pauseMs = Math.min(times.pauseMs, pauseMs * 2);
    }
  }

  /** Until the stream of its load breaks, is silent, or says nonsense. @throws KvError: which of these */
  #watch(bootEpoch: string, onAnswer: () => void): Promise<never> {
    const { name, sender, host, times } = this.#options;
    return new Promise((_, reject) => {
      let stop = (): void => {};
      const end = (why: KvError): void => {
        watch.stop();
        stop();
        reject(why);
      };
      // By a clock that stands still with us: what came meanwhile is read before a worker counts as silent.
      const watch: Watch = new Watch(times.silentMs / looksForSilence, (nowMs) => {
        if (nowMs - heardMs <= times.silentMs) return;
        const silent = `says nothing for ${times.silentMs} ms; see its process`;
        end(new KvError('DISCONNECTED', `worker ${name}: ${silent}`, { retry: true }));
      });
      let heardMs = watch.nowMs();
      let isFirst = true;
      const onLoad = (load: EngineLoad): void => {
        try {
          const told = loadOf(name, load);
          if (told.bootEpoch !== bootEpoch)
            throw new KvError('DISCONNECTED', `worker ${name}: was started anew; asked again`, { retry: true });
          heardMs = watch.nowMs();
          this.#hear(told, isFirst);
          isFirst = false;
          onAnswer();
          host.answers(told.draining);
        } catch (error) {
          end(KvError.from(error));
        }
      };
      try {
        stop = this.calls.watchLoad({ sender, minIntervalMs: times.loadMs }, onLoad, end);
      } catch (error) {
        end(KvError.from(error)); // the line was closed meanwhile
      }
      this.#stopWatch = () => end(new KvError('CANCELLED', `worker ${name}: its line is closed`));
    });
  }

  #hear(told: ToldLoad, isFirst: boolean): void {
    if (isFirst) this.#tokensAtMs = 0;
    this.#ledger.hear(told, isFirst);
    const before = this.measuredPrefillTokensPerS;
    this.#told = told;
    if (this.measuredPrefillTokensPerS !== before) this.#ratedAtMs = performance.now();
    const { rates } = told;
    const { media } = this.#options;
    this.#measuredLoads = rates ? media.map((name) => rates.loadBlocksPerS[name] ?? 0) : noLoad.loadBlocksPerS;
    this.#toldAtMs = performance.now();
    this.#load = undefined;
  }

  /** What runs there is tried elsewhere; the next look opens another connection. */
  #lost(why: KvError): void {
    this.#options.host.lost(why);
    this.calls.cut(new KvError('DISCONNECTED', why.message, { retry: true, cause: why }));
  }
}
