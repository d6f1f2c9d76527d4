/**
 * All hand-offs of a coordinator: decides for each request, refuses what cannot be in time, bounds what is under way, and learns from how
 * it turned out.
 *
 *     chosen decode worker ─► sides ─► decision ─┬─ none ──► its stream, as without hand-offs
 *                                                └─ split ─► HandOff: two legs
 *
 * Invariants: at most `maxLegs` prompts are computed for others at once, `maxLegsPerWorker` by one worker; a request is refused (429) only
 * before anything was sent for it.
 */
import { type Choice, type Holdings, Saturated } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { OnEvent, Worker } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import type { Asked } from './asked.ts';
import { type CameBlocks, OthersCame } from './came-blocks.ts';
import type { Copies } from './copies.ts';
import { type Decision, decide, holdsToken, lineOf, type Split } from './decision.ts';
import { HandOff, type HandOffEngines, type Shortfall, type Took } from './hand-off.ts';
import { Lateness, LatestOfWorkers, type Whose } from './late.ts';
import { LinkRate } from './link-rate.ts';
import { HandOffMetrics } from './metrics.ts';
import { NodeLinks, type Nodes } from './node-links.ts';
import type { Question, Side, SplitMode } from './question.ts';
import { sidesOf } from './sides.ts';
import { stepS } from './times.ts';

export interface HandOffsOptions {
  readonly engines: HandOffEngines;
  readonly holdings: Holdings;
  readonly logger: Logger;
  readonly limits?: Partial<HandOffLimits>;
  /** Told of each request. */
  readonly copies?: Pick<Copies, 'came'>;
}

export interface HandOffLimits {
  readonly split: SplitMode;
  /** Where nobody can compute the prompt for a decode worker, it does so itself; false: such a request is refused (503). */
  readonly fallback: boolean;
  /** Targets: to the first token, and between two tokens. */
  readonly ttftMs: number;
  readonly itlMs: number;
  /** So long without another block, a prefill worker is given up; more where its queue is longer. */
  readonly stallMs: number;
  readonly deadlineMs: number;
  readonly tries: number;
  readonly maxLegs: number;
  readonly maxLegsPerWorker: number;
}

export const handOffDefaults: HandOffLimits = {
  split: 'predicted',
  fallback: true,
  ttftMs: 2_000,
  itlMs: 50,
  stallMs: 1_000,
  deadlineMs: 60_000,
  tries: 2,
  maxLegs: 1_024,
  maxLegsPerWorker: 64,
};

/** For the answer's headers, as of now. */
export interface HandedOff {
  readonly line: string;
  readonly prefill: string | undefined;
  /** Why it is less than was wanted, a word; undefined: it is not. */
  readonly degraded: string | undefined;
  /** Known with the first token of a split, or a moment later. */
  readonly took?: Took | undefined;
}

interface Link {
  readonly rate: LinkRate;
  readonly come: CameBlocks;
}

/** Medium `peer` of the KV index. */
const peer = 3;
const maxLinks = 1_024;
/** Somebody has the role all the same: the decode side serves the request, now as at any later try. */
const served: ReadonlySet<Decision['reason']> = new Set([
  ...(['prefill-busy', 'prefill-late', 'prefill-too-small', 'no-link'] as const),
]);
const noNodes: Nodes = [];
const [firstLateS, mostLateS] = [0.004, 0.5];
/** Of nobody's coming for so many targets, half of what was learned of lateness is forgotten. */
const believedTargets = 4;
/** No estimate of a queue is taken for exact: a prefill worker gets so many times as long. */
const patience = 3;

export class HandOffs {
  readonly metrics: HandOffMetrics;
  readonly #options: HandOffsOptions;
  readonly #limits: HandOffLimits;
  readonly #late = new Lateness(firstLateS, mostLateS);
  /** The same of nine in ten, by the decode worker: whoever is let in is to be in time. `early`: of splits whose prefill side draws. */
  readonly #latest = {
    alone: new LatestOfWorkers(mostLateS),
    split: new LatestOfWorkers(mostLateS),
    early: new LatestOfWorkers(mostLateS),
  };
  /** The same of the pauses behind the first tokens that prefill sides give. */
  readonly #pauses = new LatestOfWorkers(mostLateS);
  readonly #legs = new Map<number, number>();
  /** Requests that wait for another worker's blocks, by the decode worker. */
  readonly #awaiting = new Map<number, number>();
  /** Blocks that have still to travel, by the decode side's node. */
  readonly #pending = new Map<string, number>();
  /** By the decode side's node. */
  readonly #links = new Map<string, Link>();
  readonly #nodeLinks: NodeLinks;
  #open = 0;

  constructor(options: HandOffsOptions) {
    this.#options = options;
    this.#nodeLinks = new NodeLinks(() => options.engines.nodes?.() ?? noNodes);
    this.#limits = { ...handOffDefaults, ...options.limits };
    this.metrics = new HandOffMetrics(() => this.#open);
  }

  /** Legs of prefill that are counted now, of all workers. */
  get legs(): number {
    return this.#open;
  }

  /** Requests that wait for another worker's blocks. */
  get awaiting(): number {
    let sum = 0;
    for (const count of this.#awaiting.values()) sum += count;
    return sum;
  }

  /** Blocks that have still to travel. */
  get pendingBlocks(): number {
    let sum = 0;
    for (const blocks of this.#pending.values()) sum += blocks;
    return sum;
  }

  /**
   * As `follow` of the chosen worker; another one may compute the prompt. `told` is called before the first event, and again when
   * something falls short. @throws Saturated: its first token would come too late; KvError DISCONNECTED: a role has nobody, and fallback
   * is off; as `follow`
   */
  async follow(
    choice: Choice,
    asked: Asked,
    request: GenerateRequest,
    signal: AbortSignal,
    onEvent: OnEvent,
    told: (state: HandedOff) => void,
  ): Promise<void> {
    const begunMs = performance.now();
    this.#options.copies?.came(asked, request);
    const question = this.#questionOf(choice, asked, begunMs, noneFailed);
    const decision = decide(question);
    const { split } = decision;
    this.#admit(decision, asked, choice.worker, question.waitedS, begunMs);
    this.metrics.decided(decision);
    const line = lineOf(question, decision);
    this.#options.logger.debug({ request: request.requestId, decode: choice.worker.record.name }, `hand-off: ${line}`);
    const { role } = choice.worker.record;
    const lacks = role === 'prefill' ? 'no-decode-worker' : decision.isLacking ? decision.reason : undefined;
    if (lacks !== undefined) this.metrics.fellShort(lacks);
    told({ line, prefill: split?.prefill.name, degraded: degradedOf(lacks) });
    const { number } = choice.worker;
    const seenS = (): number => (performance.now() - begunMs) / 1000;
    const whose = whoseOf(asked, choice.worker);
    let hasDecoded = false;
    const decoded = (): void => {
      hasDecoded = true;
      this.#learn(decision, whose, seenS());
    };
    let isFirst = true;
    const first = (): void => {
      if (!isFirst) return;
      isFirst = false;
      // What is decided weighs when the client has its first token: a split that gives it early is worth as much more.
      this.#late.came(split !== undefined, decision.expected.plainS, seenS());
      if (split === undefined) decoded();
      if (split?.draws) this.#latest.early.came(whose, split.earlyS, seenS(), performance.now());
      // One that was to be drawn early may come from the decode side all the same.
      this.metrics.came(decision, split === undefined || hasDecoded ? decision.expected.ttftS : split.earlyS, seenS());
    };
    let isAwaiting = split !== undefined;
    const awaited = (): void => {
      if (isAwaiting) this.#count(this.#awaiting, number, -1);
      isAwaiting = false;
    };
    const watched: OnEvent = (event) => {
      first();
      return onEvent(event);
    };
    const { engines } = this.#options;
    const paced = { ...request, betweenMs: this.#betweenMsOf(asked, choice.worker) };
    if (split === undefined) return engines.follow(number, paced, signal, watched);
    const node = question.decode.node!;
    let pending = 0;
    const others = new OthersCame(this.#linkOf(node).come);
    let prefill = split.prefill.name;
    let degraded: string | undefined;
    const handOff = new HandOff({
      engines,
      decode: number,
      request: paced,
      split,
      blockTokens: asked.blockTokens,
      times: this.#timesOf(split, asked.blockTokens),
      tries: this.#limits.tries,
      listener: {
        leg: ({ number }, began) => this.#countLeg(number, began ? 1 : -1),
        pending: (blocks) => {
          this.#count(this.#pending, node, blocks - pending);
          pending = blocks;
        },
        ready: () => others.begins(performance.now()),
        came: (blocks) => others.came(blocks, performance.now()),
        fellShort: (why, error) => {
          this.metrics.fellShort(why);
          const fields = { request: request.requestId, prefill, decode: choice.worker.record.name, why };
          this.#options.logger.info(fields, `hand-off fell short: ${error?.message ?? why}`);
          degraded = degradedOf(why);
          told({ line, prefill, degraded });
        },
        another: (failed) => {
          const next = decide({
            ...this.#questionOf(choice, asked, begunMs, failed),
            mode: 'always',
            deadlineS: unbounded,
          }).split;
          if (next === undefined) return undefined;
          prefill = next.prefill.name;
          told({ line, prefill, degraded });
          // The same blocks, whatever would be best now: what the decode side lacked at first travels, or nothing where both have one node.
          const travels = next.travels === 0 ? 0 : split.lacks;
          return {
            ...next,
            blocks: split.blocks,
            travels,
            draws: split.draws && holdsToken(next.prefill, asked.tokens),
          };
        },
        firstToken: (local, come, hidden) => {
          this.metrics.handedOff(split, local, come, hidden);
          decoded();
          awaited();
        },
        took: (took) => told({ line, prefill, degraded, took }),
        paused: (seconds, isGiven) => {
          // Behind a first token that the decode side draws, a step lies between it and the next.
          const seenS = seconds + (isGiven ? 0 : stepS(question.decode));
          if (isGiven) this.metrics.paused(split.pauseS, seconds);
          this.#pauses.came(whose, split.pauseS, seenS, performance.now());
        },
        travelled: (transfer, cameMs) => {
          const nowMs = performance.now();
          const allBlocks = transfer.blocks + others.until(cameMs, nowMs);
          this.#linkOf(node).rate.came({ ...transfer, allBlocks }, nowMs, ownPerS(question.decode));
        },
      },
    });
    if (asked.keys.length > 0) this.#options.holdings.sent?.(asked.model, split.prefill.number, asked.keys);
    this.#count(this.#awaiting, number, 1);
    try {
      await handOff.run(signal, watched);
    } finally {
      awaited();
    }
  }

  #questionOf(choice: Choice, asked: Asked, nowMs: number, failed: ReadonlySet<number>): Question {
    const { engines, holdings } = this.#options;
    const { split, deadlineMs, maxLegs, maxLegsPerWorker, ttftMs, itlMs } = this.#limits;
    const [decode, ...others] = sidesOf(
      ...([choice.worker, choice.share, engines.workers(), asked.keys, holdings] as const),
      (number) => this.#legs.get(number) ?? 0,
      (number) => this.#awaiting.get(number) ?? 0,
    );
    const link = this.#links.get(decode.node ?? '')?.rate;
    const own = ownPerS(decode);
    const otherwise = Math.max(own, link?.atLeast ?? 0);
    return {
      mode: split,
      tokens: asked.tokens,
      blockTokens: asked.blockTokens,
      maxTokens: asked.maxTokens,
      decode,
      others: failed.size === 0 ? others : others.filter(({ number }) => !failed.has(number)),
      waitedS: Math.max(nowMs - asked.arrivedMs, 0) / 1000,
      ttftS: (asked.ttftMs ?? ttftMs) / 1000,
      itlS: (asked.itlMs ?? itlMs) / 1000,
      links: this.#nodeLinks.of(decode.node),
      linkBlocksPerS: link?.perS(nowMs, own) || otherwise,
      pendingBlocks: this.#pending.get(decode.node ?? '') ?? 0,
      deadlineS: deadlineMs / 1000,
      legsPerWorker: maxLegsPerWorker,
      legsLeft: maxLegs - this.#open,
      late: this.#lateOf(asked, choice.worker, nowMs),
    };
  }

  #lateOf(asked: Asked, worker: Worker, nowMs: number): Question['late'] {
    const [late, whose] = [this.#late, whoseOf(asked, worker)];
    const halfMs = believedTargets * (asked.ttftMs ?? this.#limits.ttftMs);
    return {
      aloneS: (predictedS) => late.aloneS(predictedS),
      splitS: (predictedS) => late.splitS(predictedS),
      pauseS: (predictedS) => this.#pauses.s(whose, predictedS, nowMs, halfMs),
    };
  }

  /** What a worker that decodes for others keeps to: prompts wait for it. One of both roles only where the request says so itself. */
  #betweenMsOf({ itlMs }: Asked, { record }: Worker): number | undefined {
    const ms = itlMs ?? (record.role === 'decode' ? this.#limits.itlMs : undefined);
    return ms === undefined ? undefined : Math.ceil(ms);
  }

  /** @throws Saturated, KvError DISCONNECTED */
  #admit(
    { isLacking, reason, expected, split }: Decision,
    asked: Asked,
    worker: Worker,
    waitedS: number,
    nowMs: number,
  ) {
    if (asked.hasBegun) return;
    if (isLacking && !this.#limits.fallback && !served.has(reason)) {
      this.metrics.refused('no-prefill-worker');
      const line = `model ${asked.model}: no prefill worker can be asked (${reason}), and handoff.fallback is off; try again`;
      throw new KvError('DISCONNECTED', line, { retry: true });
    }
    const { ttftMs } = asked;
    if (ttftMs === undefined) return;
    // Its first token comes by then, nine times in ten.
    const firstS = split?.draws ? split.earlyS : expected.plainS;
    const latest = this.#latest[split?.draws ? 'early' : wayOf(split)];
    const lateS =
      waitedS + firstS + latest.s(whoseOf(asked, worker), firstS, nowMs, believedTargets * ttftMs) - ttftMs / 1000;
    if (lateS <= 0) return;
    this.metrics.refused('late');
    const comes = `its first token would come ${(lateS * 1000).toFixed(0)} ms after the ${ttftMs} ms that it may take`;
    throw new Saturated(`model ${asked.model}: ${comes} (worker ${worker.record.name}); try again later`, lateS);
  }

  #timesOf(
    { firstS, arrivedS, computes, stepBlocks, prefill }: Split,
    blockTokens: number,
  ): { stallMs: number; deadlineMs: number } {
    const { stallMs, deadlineMs } = this.#limits;
    const steps = Math.max(Math.ceil(computes / (stepBlocks * blockTokens || prefill.maxStepTokens)), 1);
    const blockS = Math.max(firstS, (arrivedS - firstS) / steps);
    const stall = Math.min(stallMs + patience * blockS * 1000, deadlineMs);
    return { stallMs: Math.ceil(stall), deadlineMs };
  }

  /** The decode side has its first token, whoever gave the client one before. */
  #learn({ expected: { plainS }, split }: Decision, whose: Whose, seenS: number): void {
    this.#latest[wayOf(split)].came(whose, plainS, seenS, performance.now());
  }

  #linkOf(node: string): Link {
    let link = this.#links.get(node);
    if (link !== undefined) return link;
    // Nodes come and go: the oldest is forgotten, and measured again.
    if (this.#links.size >= maxLinks) this.#links.delete(this.#links.keys().next().value!);
    link = { rate: new LinkRate(), come: { sum: 0 } };
    this.#links.set(node, link);
    return link;
  }

  #countLeg(number: number, by: 1 | -1): void {
    this.#open += by;
    this.#count(this.#legs, number, by);
  }

  #count<K>(counts: Map<K, number>, key: K, by: number): void {
    const now = (counts.get(key) ?? 0) + by;
    if (now === 0) counts.delete(key);
    else counts.set(key, now);
  }
}

/** What is left of the decode side's wait is used, however little can come of it. */
const unbounded = Number.POSITIVE_INFINITY;

const noneFailed: ReadonlySet<number> = new Set();

const wayOf = (split: Split | undefined): 'alone' | 'split' => (split === undefined ? 'alone' : 'split');

const whoseOf = ({ model }: Asked, { record }: Worker): Whose => ({ model, worker: record.name });

/** Blocks a second from other nodes, as its engine says; 0: it does not. */
const ownPerS = ({ loadBlocksPerS }: Side): number => loadBlocksPerS[peer] ?? 0;

const degradedOf = (why: Shortfall | string | undefined): string | undefined =>
  why === undefined ? undefined : `handoff-${why}`;
