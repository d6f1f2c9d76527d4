/**
 * The planner of a coordinator: what comes, what workers do, and so how many of each role the load needs; and, where roles are live, what
 * workers of both roles lean to.
 *
 *     Dispatch ──each request, each choice──▶ sums of a window ─┐
 *     fleet    ──loads, each `tickMs`───────▶ tokens given      ├─► plan (plan.ts) ─► metrics, /admin/planner, KEDA
 *                                           └ rates ────────────┘      └► leanings (leaning.ts) ─► fleet, for new requests
 *
 * Requests count when they come, whether or not a worker has room, and once, however often they are tried: a queue hides no demand. Tokens
 * of answers are what workers give (streams ÷ time of a step); where answers end slower than requests come, as many as those that come
 * will need: as long each as whole answers were that told their length. Where none does, answers count as what was given by those that
 * have ended and those that run: an answer that is under way is longer than that, but nobody knows by how much. What other coordinators send is seen in the answers alone.
 *
 * What one worker gives is the mean of those that do it: of prompts those of role prefill or both, of streams those of role decode or both;
 * all, only where a role has nobody. A worker of a role is another machine than one of the other.
 *
 * Streams of a worker, and the blocks of each, are means over the window, as the demand is: a lull is no slower worker. Of pods it has to be
 * known what a stream adds to a step: from how long one step takes nothing follows for more streams or fewer. Until it is, decode is
 * not known, unless steps are too long already.
 */
import type { PlannerConfig } from '@kvtier/config';
import type { Choice, Dispatch, DispatchRequest } from '@kvtier/dispatch';
import type { Leaning, Worker, WorkerLoad } from '@kvtier/registry';
import { type Level, leanWorkers } from './leaning.ts';
import { type LoadFigures, type Plan, planWorkers, type Targets, type WorkerRates } from './plan.ts';
import { SlidingSums } from './sliding-sums.ts';

/** The registry's fleet is this. */
export interface PlannedWorkers {
  workers(): readonly (Worker | undefined)[];
  lean(number: number, leaning: Leaning | undefined): void;
}

export interface PlannerOptions {
  readonly workers: PlannedWorkers;
  readonly config: PlannerConfig;
  /** Milliseconds that only grow. */
  readonly now?: () => number;
}

/** What is planned for one model. */
export interface ModelPlan extends Plan {
  readonly model: string;
  readonly load: LoadFigures;
  readonly rates: WorkerRates;
  /** Requests that came within the window or wait now. */
  readonly isActive: boolean;
  /** For so long has been looked that what did not come says something, too. */
  readonly isSettled: boolean;
  /** false: nobody can say yet what one worker gives; `decode` is a guess that more workers would not make smaller. */
  readonly isDecodeKnown: boolean;
  /** Workers that are ready, by what they do now. */
  readonly present: Readonly<Record<'prefill' | 'decode' | 'mixed', number>>;
}

const names = [
  'requests',
  'tokens',
  'chosenTokens',
  'cachedTokens',
  'ended',
  'outputTokens',
  'whole',
  'wholeTokens',
  'busy',
  'streams',
  'streamBlocks',
] as const;
/** Models beyond are not planned for. */
const maxModels = 64;
const tickMs = 500;
/** A gap in ticks is no time of which anything is known. */
const mostTickS = 2;
const assumedRates: WorkerRates = {
  prefillTokensPerS: 4_000,
  ...{ stepS: 0.02, stepPerRequestS: 0, streams: 0, maxStreams: 64 },
};
/** Of the window, before a plan is one: a coordinator that has just started has seen nothing, whatever there is to do. */
const settlingShare = 0.25;
/** What a level has to differ by, in workers. */
const band = 0.6;

/** A worker at one look: its load is summed up anew each time that it is read. */
interface Seen {
  readonly worker: Worker;
  readonly load: WorkerLoad;
}

interface Entry {
  readonly sums: SlidingSums<(typeof names)[number]>;
  rates: WorkerRates;
  plan: ModelPlan | undefined;
  level: Level | undefined;
}

export class Planner {
  readonly #options: PlannerOptions;
  readonly #now: () => number;
  readonly #entries = new Map<string, Entry>();
  readonly #listeners = new Set<() => void>();
  #timer: NodeJS.Timeout | undefined;
  #tickedMs: number | undefined;

  constructor(options: PlannerOptions) {
    this.#options = options;
    this.#now = options.now ?? (() => performance.now());
  }

  /** Looks by itself from now on. */
  start(): void {
    this.#timer ??= setInterval(() => this.tick(), tickMs).unref();
  }

  close(): void {
    clearInterval(this.#timer);
    this.#listeners.clear();
  }

  /** The same Dispatch, with what goes through it counted. */
  watch(dispatch: Dispatch): Dispatch {
    return { choose: (request, signal) => this.#choose(dispatch, request, signal) };
  }

  /** As of the last tick. */
  plans(): readonly ModelPlan[] {
    return [...this.#entries.values()].flatMap(({ plan }) => plan ?? []);
  }

  /** Told after each tick. Returns what ends it. */
  onPlan(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  tick(): void {
    const nowMs = this.#now();
    const passedS = Math.min((nowMs - (this.#tickedMs ?? nowMs)) / 1_000, mostTickS);
    this.#tickedMs = nowMs;
    const byModel = new Map<string, Seen[]>();
    for (const worker of this.#options.workers.workers()) {
      const model = worker?.facts?.model;
      if (worker === undefined || model === undefined || worker.state !== 'ready') continue;
      const seen = { worker, load: worker.load };
      const others = byModel.get(model);
      if (others === undefined) byModel.set(model, [seen]);
      else others.push(seen);
    }
    for (const model of byModel.keys()) this.#entryOf(model, nowMs);
    for (const [model, entry] of this.#entries) this.#plan(model, entry, byModel.get(model) ?? [], passedS, nowMs);
    for (const listener of this.#listeners) listener();
  }

  async #choose(dispatch: Dispatch, request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
    // A prefill leg is a part of a request that has been counted; so is one that is tried again. A list of models is no work.
    if (request.role !== undefined || request.hasAnswer === false) return dispatch.choose(request, signal);
    const entry = this.#entryOf(request.model, this.#now());
    const isFirst = request.except.size === 0 && !request.isAgain;
    if (isFirst) entry?.sums.add('requests', 1, this.#now());
    if (isFirst) entry?.sums.add('tokens', request.tokens, this.#now());
    const choice = await dispatch.choose(request, signal);
    if (entry === undefined || !isFirst) return choice;
    const { blocks, remoteBlocks = 0, isUnknown } = choice.match;
    if (!isUnknown) {
      const held = Math.min((blocks + remoteBlocks) * request.blockTokens, request.tokens);
      entry.sums.add('chosenTokens', request.tokens, this.#now());
      entry.sums.add('cachedTokens', held, this.#now());
    }
    const { worker, policy, why, firstTokenS, match, isGuessed, share } = choice;
    let hasEnded = false;
    return {
      worker,
      policy,
      why,
      firstTokenS,
      match,
      isGuessed,
      share,
      firstToken: (isTimed) => choice.firstToken(isTimed),
      ended: (answerTokens) => {
        if (!hasEnded) {
          entry.sums.add('ended', 1, this.#now());
          if (answerTokens !== undefined) entry.sums.add('whole', 1, this.#now());
          entry.sums.add('wholeTokens', answerTokens ?? 0, this.#now());
        }
        hasEnded = true;
        choice.ended(answerTokens);
      },
    };
  }

  #entryOf(model: string, nowMs: number): Entry | undefined {
    let entry = this.#entries.get(model);
    if (entry !== undefined) return entry;
    // A name that no worker serves is a client's alone, and takes no place.
    if (this.#entries.size >= maxModels) return undefined;
    if (!this.#options.workers.workers().some((worker) => worker?.facts?.model === model)) return undefined;
    const sums = new SlidingSums(names, this.#options.config.windowMs, nowMs);
    entry = { sums, rates: assumedRates, plan: undefined, level: undefined };
    this.#entries.set(model, entry);
    return entry;
  }

  #plan(model: string, entry: Entry, workers: readonly Seen[], passedS: number, nowMs: number): void {
    const { config } = this.#options;
    const { sums } = entry;
    const decoding = ofEither('decode', workers);
    sums.add('outputTokens', passedS * outputTokensPerS(decoding), nowMs);
    for (const { load: now } of decoding) {
      if (!(now.running > 0)) continue;
      sums.add('busy', 1, nowMs);
      sums.add('streams', now.running, nowMs);
      sums.add('streamBlocks', now.usedBlocks, nowMs);
    }
    if (workers.length > 0) entry.rates = ratesOf(workers, sums, entry.rates, nowMs);
    const load = loadOf(sums, workers, nowMs);
    const isWaiting = workers.some(({ load: { waiting, running } }) => waiting + running > 0);
    const isActive = load.requestsPerS > 0 || isWaiting;
    if (!isActive && workers.length === 0) {
      this.#entries.delete(model); // nobody serves it, and nobody asks for it
      return;
    }
    const { firstTokenMs, betweenTokensMs, ceiling } = config;
    const targets = { firstTokenS: firstTokenMs / 1_000, betweenTokensS: betweenTokensMs / 1_000, ceiling };
    const plan = planWorkers(load, entry.rates, targets);
    const isDecodeKnown = isKnown(plan, entry.rates, targets, workers);
    if (config.roles === 'live' && isDecodeKnown) this.#lean(entry, plan, workers, nowMs);
    const present = { prefill: 0, decode: 0, mixed: 0 };
    for (const { worker } of workers) {
      const { record, leaning } = worker;
      present[record.role === 'both' ? (leaning ?? 'mixed') : record.role]++;
    }
    const isSettled = sums.forMs(nowMs) >= settlingShare * config.windowMs;
    entry.plan = { ...plan, model, load, rates: entry.rates, isActive, isSettled, isDecodeKnown, present };
  }

  #lean(entry: Entry, { prefill, decode }: Plan, workers: readonly Seen[], nowMs: number): void {
    const ofRole = (role: string): Seen[] => workers.filter(({ worker }) => worker.record.role === role);
    const { held, byNumber } = leanWorkers(
      {
        both: ofRole('both').map(({ worker: { number, leaning }, load: { running, tokensAhead } }) => {
          return { number, leaning, running, tokensAhead };
        }),
        prefillOnly: ofRole('prefill').length,
        decodeOnly: ofRole('decode').length,
        prefillNeeded: prefill.needed,
        decodeNeeded: decode.needed,
      },
      entry.level,
      nowMs,
      { holdMs: this.#options.config.holdMs, band },
    );
    entry.level = held;
    // Those that take whole requests first: so at no moment there is nobody.
    for (const wanted of ['decode', 'mixed', 'prefill'] as const)
      for (const [number, leaning] of byNumber) if (leaning === wanted) this.#options.workers.lean(number, leaning);
  }
}

function loadOf(sums: Entry['sums'], workers: readonly Seen[], nowMs: number): LoadFigures {
  const requestsPerS = sums.perS('requests', nowMs);
  const chosen = sums.sum('chosenTokens', nowMs);
  return {
    requestsPerS,
    promptTokensPerS: sums.perS('tokens', nowMs),
    hitRatio: chosen > 0 ? sums.sum('cachedTokens', nowMs) / chosen : 0,
    outputTokensPerS: Math.max(
      sums.perS('outputTokens', nowMs),
      requestsPerS * perAnswerOf(sums, ofEither('decode', workers), nowMs),
    ),
  };
}

/** Tokens; 0: not known. One whose client left says nothing of how long answers are. What runs at prefill workers is a part of no answer. */
function perAnswerOf(sums: Entry['sums'], decoding: readonly Seen[], nowMs: number): number {
  const whole = sums.sum('whole', nowMs);
  if (whole > 0) return sums.sum('wholeTokens', nowMs) / whole;
  const ended = sums.sum('ended', nowMs);
  if (ended === 0) return 0;
  const running = decoding.reduce((all, { load }) => all + load.running, 0);
  return sums.sum('outputTokens', nowMs) / (ended + running);
}

function outputTokensPerS(workers: readonly Seen[]): number {
  let sum = 0;
  for (const { load } of workers) {
    const stepS = load.stepS + load.stepPerRequestS * load.running;
    if (stepS > 0) sum += load.running / stepS;
  }
  return sum;
}

/** Our own workers tell what a stream adds; where they measure nothing, it adds nothing. */
function isKnown(
  { decode }: Plan,
  { stepS, stepPerRequestS }: WorkerRates,
  { betweenTokensS }: Targets,
  workers: readonly Seen[],
): boolean {
  if (decode.needed === 0 || stepPerRequestS > 0 || stepS > betweenTokensS) return true;
  return workers.every(({ worker }) => worker.record.kind !== 'openai');
}

/** Of this role or both; all, where there is none. */
function ofEither(role: 'prefill' | 'decode', workers: readonly Seen[]): readonly Seen[] {
  const found = workers.filter(({ worker: { record } }) => record.role === role || record.role === 'both');
  return found.length > 0 ? found : workers;
}

/** Of the mean worker of each role; what none has measured stays as it was. */
function ratesOf(workers: readonly Seen[], sums: Entry['sums'], before: WorkerRates, nowMs: number): WorkerRates {
  const [prefilling, decoding] = [ofEither('prefill', workers), ofEither('decode', workers)];
  const mean = (of: readonly Seen[], read: (seen: Seen) => number, otherwise: number): number => {
    const known = of.map(read).filter((value) => value > 0 && Number.isFinite(value));
    return known.length === 0 ? otherwise : known.reduce((all, one) => all + one, 0) / known.length;
  };
  const stepS = mean(decoding, ({ load }) => load.stepS, before.stepS);
  const [busy, streams] = [sums.sum('busy', nowMs), sums.sum('streams', nowMs)];
  const blocks = streams > 0 ? sums.sum('streamBlocks', nowMs) / streams : 0;
  return {
    prefillTokensPerS: mean(prefilling, ({ load }) => load.prefillTokensPerS, before.prefillTokensPerS),
    stepS,
    stepPerRequestS: mean(decoding, ({ load }) => load.stepPerRequestS, before.stepPerRequestS),
    streams: busy > 0 ? streams / busy : before.streams,
    maxStreams: mean(decoding, ({ worker }) => placesOf(worker, blocks), before.maxStreams),
  };
}

/** Streams at once: places, and as many as have room if each has as many blocks as those that run. 0: not known. */
function placesOf({ facts }: Worker, blocks: number): number {
  const { totalBlocks = 0, maxRunning } = facts ?? {};
  const room = blocks > 0 && totalBlocks > 0 ? totalBlocks / blocks : 0;
  if (maxRunning === undefined) return room;
  return room > 0 ? Math.min(maxRunning, room) : maxRunning;
}
