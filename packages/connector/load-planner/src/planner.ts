/**
 * The load planner: how much of a hit to load, how long to wait for it, and when to give it up.
 *
 * Loading is worth it only where it is faster than computing: disk and network tiers of today's systems are often
 * slower than the GPU they serve (docs/lessons.md, "Slower than without a cache"). The planner weighs the
 * node's estimate, corrected by how true such estimates turned out (experience.ts), plus our own copy rate, against what our
 * own steps say of computing (compute-model.ts). Pure: time is an argument.
 *
 *     cost(k) = round trip + load(k) + compute(k to held)        → the k with the least cost
 *     load(k) = copy × blocks in the arena + max(correction × bring, copy) × others + copy × last of those
 *
 * Blocks are copied while others are brought: the slower of the two decides, and the last ones are copied when all came. Behind a hit
 * that is loaded whole there is still a step to take: it costs what a step costs itself.
 *
 * Where nothing else is computed, the front of a hit can be computed while the rest of it is loaded (both-ends.ts).
 *
 * Invariant: by its own numbers a plan never costs more than computing everything. Until prefill has been measured,
 * everything is loaded. But for probes (probes.ts): an engine that imports everything would never learn that it computes faster.
 */
import { Asking } from './asking.ts';
import { BelievedRate } from './believed-rate.ts';
import { BothEnds } from './both-ends.ts';
import { ComputeModel, leastTokens } from './compute-model.ts';
import { besideSteps, Experiences } from './experience.ts';
import { FadingRate } from './fading-rate.ts';
import { type Hit, type LoadChoice, nothingAway, type Plan, type Span } from './plan.ts';
import { Probes } from './probes.ts';

/** Blocks in this tier are in the arena already: bringing them costs nothing. */
const arenaTier = 'arena';
/** What other hosts' nodes hold, and the disks below them. */
const peerTier = 'peer';
/** A load may fall behind computing by this much before it is given up: both are only estimated. By more before many blocks came. */
const patience = 1.1;
const firstPatience = 2;
/** What a load that was given up says of the node's estimate at most. */
const mostGuessed = 2;
/** A load is judged when it has used this share of the time to compute it, and no sooner than after this time. */
const judgeShare = 0.05;
const judgeMs = 3;
/**
 * What is under way at a time, side by side: it counts as there, because it comes together. So many blocks, or this share of a long
 * load: a device's first batch is large, and how long it takes says little of what follows.
 */
const leastAbreast = 4;
const abreastShare = 1 / 16;
/** What usually passes before the first block comes says nothing of the rest; but for more than this share of the time to compute. */
const startShare = 0.25;
/** Blocks that are copied when the last one has come. */
const lastCopied = 4;
const abreastOf = (blocks: number): number => Math.max(leastAbreast, blocks * abreastShare);
/** Experience with models of several attention groups, whose blocks come from tiers of each. */
const severalGroups = 'groups';
/** A deadline shorter than this only cuts loads because of a hiccup of the machine. */
const minDeadlineMs = 250;
/** A lookup may cost this share of the time to compute what it asks for, within bounds. */
const lookupShare = 0.2;
const minLookupMs = 100;
const maxLookupMs = 500;

/** planned: what is faster; always: all that is held; halves: a head whenever one can be, the half of the hit. */
export type Loads = 'planned' | 'always' | 'halves';

type EndTime = 'besideUs' | 'copyUs' | 'first' | 'held' | 'nowMs';

export class LoadPlanner {
  readonly #blockTokens: number;
  readonly #loadDeadlineMs: number;
  readonly #loads: Loads;
  readonly #always: boolean;
  readonly #compute = new ComputeModel();
  readonly #copy = new BelievedRate(0.8);
  readonly #roundTrip = new BelievedRate(0.9);
  readonly #start = new FadingRate(0.8);
  readonly #experiences = new Experiences();
  readonly #bothEnds = new BothEnds(this.#experiences);
  readonly #asking = new Asking();
  readonly #probes: Probes;

  /**
   * @param loadDeadlineMs no load waits longer, whatever it saves
   * @param loads always: nothing is known to be faster than loading; halves: how long it is waited is planned all the same
   */
  constructor(blockTokens: number, loadDeadlineMs: number, loads: Loads = 'planned') {
    this.#blockTokens = blockTokens;
    this.#loads = loads;
    this.#always = loads === 'always';
    this.#loadDeadlineMs = loadDeadlineMs;
    this.#probes = new Probes(this.#compute, blockTokens);
  }

  /** A step that computed nothing but `tokens` tokens of prompts, which looked at `positions` positions together. */
  observePrefill(tokens: number, positions: number, elapsedUs: number): void {
    this.#compute.observe(tokens, positions, elapsedUs);
  }

  /**
   * The same of the head of a hit, while the rest was loaded. How long such a step takes without that, it does not tell, but that it takes
   * no longer: an engine that has become faster is seen by it.
   */
  observeHead(tokens: number, positions: number, elapsedUs: number, nowMs: number): void {
    if (!(tokens >= leastTokens) || !(positions > 0) || !(elapsedUs >= 0)) return;
    const from = Math.max(0, positions / tokens - (tokens + 1) / 2);
    const thoughtUs = this.#compute.us(from, from + tokens) ?? 0;
    this.#bothEnds.observeStep(thoughtUs, elapsedUs, nowMs);
    if (elapsedUs < thoughtUs) this.#compute.observe(tokens, positions, elapsedUs);
  }

  /** Blocks that were copied arena → KV cache, and the time that it took, without any wait for other copies. */
  observeCopy(blocks: number, elapsedUs: number, nowMs: number): void {
    this.#copy.observe(blocks, elapsedUs, nowMs);
  }

  observeRoundTrip(elapsedUs: number, nowMs: number): void {
    this.#roundTrip.observe(1, elapsedUs, nowMs);
  }

  /** The first block of a load of which nothing lay in the arena came so long after its beginning. */
  observeStart(elapsedUs: number): void {
    this.#start.observe(1, elapsedUs);
  }

  /** `loaded` blocks of a plan came in this time: what the node says next is corrected by it. */
  observeLoad(plan: Plan, loaded: number, elapsedUs: number, nowMs: number): void {
    const { blocks, away } = plan;
    if (!(away.blocks > 0) || !(loaded >= 0) || !(elapsedUs >= 0)) return;
    const share = Math.min(1, (loaded < blocks ? loaded + abreastOf(blocks) / 2 : loaded) / blocks);
    const tookUs = Math.max(0, elapsedUs / share - this.#besidesUs(plan));
    // How long the rest would have taken is a guess: the node itself will know when it has come.
    const broughtUs = loaded < blocks ? Math.min(tookUs, mostGuessed * away.us) : tookUs;
    this.#experiences.observe(away.tiers, broughtUs / away.blocks, nowMs);
  }

  /** Of a plan's time what no tier takes, as it was seen: what is no longer believed enough to decide by would be laid to the tiers. */
  #besidesUs({ blocks, away }: Plan): number {
    const behind = Math.min(lastCopied, away.blocks);
    const copies = away.tiers === severalGroups ? away.blocks : blocks - away.blocks + behind;
    return (this.#roundTrip.seenUs ?? 0) + copies * (this.#copy.seenUs ?? 0);
  }

  /** Time to compute `blocks` blocks of a chain from block `first` on; undefined while no prefill has been measured. */
  computeUs(blocks: number, first = 0): number | undefined {
    if (this.#always) return undefined;
    return this.#compute.us(first * this.#blockTokens, (first + blocks) * this.#blockTokens);
  }

  /** What is left of a hit behind what is loaded; behind all of it, a step that computes next to nothing. */
  #restUs(blocks: number, first: number): number | undefined {
    if (blocks > 0 || this.#always || this.#compute.steps === 0) return this.computeUs(blocks, first);
    return this.#compute.stepUs(first * this.#blockTokens);
  }

  /**
   * @param first of the hit, in blocks of the chain: what lies further back takes longer to compute
   * @param isIdle nothing else is computed: the head of the hit may be, while the rest is loaded
   */
  plan(hit: Hit, nowMs: number, first = 0, isIdle = false): Plan {
    const held = hit.spans.reduce((sum, span) => sum + span.count, 0);
    const awaySpans = hit.spans.filter(({ tier }) => tier !== arenaTier);
    const away = awaySpans.reduce((sum, span) => sum + span.count, 0);
    const tiers = [...new Set(awaySpans.map(({ tier }) => tier))].sort().join();
    const saidUs = away === 0 ? 0 : Math.max(0, hit.estimatedUs) / away;
    const { aloneUs: bringUs, besideUs } = this.#experiences.timesOf(tiers, saidUs, nowMs);
    const copyUs = this.#copy.usPerUnit(nowMs) ?? 0;
    const isMeasured = this.computeUs(1) !== undefined;
    let best: Plan = { head: 0, blocks: 0, loadUs: 0, computeUs: this.computeUs(held, first) ?? 0, away: nothingAway };
    const eachAwayUs = Math.max(bringUs, copyUs);
    if (tiers === peerTier) this.#asking.told(eachAwayUs);
    let blocks = 0;
    let brought = 0;
    let loadUs = this.#roundTrip.usPerUnit(nowMs) ?? 0;
    for (const span of hit.spans) {
      // What is left takes longer to compute the further back it lies, so that an end of a span is the best of it, unless the
      // deadline cuts it.
      const each = span.tier === arenaTier ? copyUs : eachAwayUs;
      // The last of those before are copied while these come.
      const last = span.tier === arenaTier ? 0 : Math.max(0, Math.min(lastCopied - brought, span.count));
      const left = this.#loadDeadlineMs * 1_000 - loadUs - last * copyUs;
      const fits = left < 0 ? 0 : each > 0 ? Math.min(span.count, Math.floor(left / each)) : span.count;
      if (fits === 0) break;
      blocks += fits;
      loadUs += fits * each + last * copyUs;
      if (span.tier !== arenaTier) brought += fits;
      const computeUs = this.#restUs(held - blocks, first + blocks) ?? 0;
      if (blocks > best.blocks && (!isMeasured || loadUs + computeUs <= best.loadUs + best.computeUs)) {
        best = {
          head: 0,
          blocks,
          loadUs,
          computeUs,
          away: brought === 0 ? nothingAway : { tiers, blocks: brought, us: brought * eachAwayUs },
        };
      }
      if (fits < span.count) break;
    }
    const times = { besideUs, copyUs, first, held, nowMs };
    const ends = isIdle ? this.#endsOf(hit, tiers, best, times) : undefined;
    if (tiers === peerTier) {
      if ((ends ?? best).away.blocks > 0) this.#asking.paid();
      else if (isIdle) this.#asking.paidNot();
    }
    if (ends) return ends;
    const isWhole = best.blocks === held && best.away.blocks > 0;
    const plan = isWhole && !this.#always ? this.#probes.next(best, first, nowMs) : best;
    return plan.blocks === held ? plan : { ...plan, passed: passedOf(hit.spans, plan.blocks, copyUs, eachAwayUs) };
  }

  /** The plan that computes the head of a hit and loads the rest meanwhile; undefined: `best` is as good. */
  #endsOf({ spans }: Hit, tiers: string, best: Plan, times: Readonly<Record<EndTime, number>>): Plan | undefined {
    const { besideUs, copyUs, first, held, nowMs } = times;
    const isHalved = this.#loads === 'halves' && held > 1;
    if (this.#always || (this.#compute.steps === 0 && !isHalved) || tiers === '') return undefined;
    const restUs = this.#restUs(0, first + held) ?? 0;
    const costs = {
      roundTripUs: this.#roundTrip.usPerUnit(nowMs) ?? 0,
      copyUs,
      awayUs: Math.max(besideUs, copyUs),
      lastCopied,
      computeUs: (blocks: number) => this.computeUs(blocks, first) ?? 0,
      restUs,
      bestUs: best.loadUs + best.computeUs,
      mostLoadUs: this.#loadDeadlineMs * 1_000,
    };
    const ends = isHalved ? this.#bothEnds.at(held >> 1, spans, costs) : this.#bothEnds.plan(spans, costs, nowMs);
    if (ends === undefined) return undefined;
    const { head, headUs, loadUs, away } = ends;
    const computeUs = Math.max(0, headUs - loadUs) + restUs;
    return { head, blocks: held - head, loadUs, computeUs, away: { tiers: besideSteps(tiers), ...away } };
  }

  /** The best of some prefixes, shortest first; what the longest one has and a shorter one not is computed. */
  planAmong(choices: readonly LoadChoice[], nowMs: number, first = 0): Plan {
    const held = choices.at(-1)?.blocks ?? 0;
    const isMeasured = this.computeUs(1) !== undefined;
    let best: Plan = { head: 0, blocks: 0, loadUs: 0, computeUs: this.computeUs(held, first) ?? 0, away: nothingAway };
    for (const { blocks, copies, bringUs } of choices) {
      const roundTripUs = this.#roundTrip.usPerUnit(nowMs) ?? 0;
      const us = bringUs * this.#experiences.correction(severalGroups, bringUs / Math.max(1, copies), nowMs);
      const loadUs = roundTripUs + copies * (this.#copy.usPerUnit(nowMs) ?? 0) + us;
      if (loadUs > this.#loadDeadlineMs * 1_000) continue;
      const computeUs = this.#restUs(held - blocks, first + blocks) ?? 0;
      if (!isMeasured || loadUs + computeUs <= best.loadUs + best.computeUs) {
        best = {
          head: 0,
          blocks,
          loadUs,
          computeUs,
          away: { tiers: severalGroups, blocks: bringUs > 0 ? copies : 0, us },
        };
      }
    }
    return best;
  }

  /** Whether to ask for `blocks` blocks from block `first` on, which only peers hold. `isIdle` as for `plan`. */
  isWorthAsking(blocks: number, first: number, nowMs: number, isIdle = false): boolean {
    const computeUs = this.#comparedUs(blocks, first);
    return computeUs === undefined || this.#asking.isWorth(blocks, computeUs, nowMs, isIdle);
  }

  /** The same before their turn: they would be asked for only now and then. To ask this changes nothing. */
  isClearlySlower(blocks: number, first: number): boolean {
    const computeUs = this.#comparedUs(blocks, first);
    return computeUs !== undefined && this.#asking.isClearlySlower(blocks, computeUs);
  }

  /** What computing them takes; undefined: it does not matter, or is not known, and all is asked for. */
  #comparedUs(blocks: number, first: number): number | undefined {
    return this.#compute.steps === 0 || this.#loads === 'halves' ? undefined : this.computeUs(blocks, first);
  }

  /**
   * Whether a load of `blocks` blocks from block `first` of the chain should go on: `ready` of them are there after `elapsedMs`, and the
   * rest would come no sooner than it is computed. False: it is given up, and what came is used.
   */
  isWorthWaiting(ready: number, blocks: number, first: number, elapsedMs: number, nowMs: number): boolean {
    const wholeUs = this.computeUs(blocks, first);
    if (wholeUs === undefined || this.#compute.steps === 0) return true;
    if (elapsedMs < Math.max(judgeMs, (wholeUs / 1_000) * judgeShare)) return true;
    const startUs = Math.min(this.#start.usPerUnit ?? 0, wholeUs * startShare);
    const tookMs = Math.max(0, elapsedMs - Math.max(this.#roundTrip.usPerUnit(nowMs) ?? 0, startUs) / 1_000);
    const restMs = ((blocks - ready) * tookMs) / (ready + abreastOf(blocks));
    const computeMs = this.computeUs(blocks - ready, first + ready)! / 1_000;
    return restMs <= computeMs * (patience + firstPatience / (1 + ready));
  }

  /** When to look again, in ms from the beginning of the load, where nothing comes; undefined: never. */
  judgeAfterMs(blocks: number, first: number): number | undefined {
    const wholeUs = this.computeUs(blocks, first);
    if (wholeUs === undefined || this.#compute.steps === 0) return undefined;
    return Math.max(judgeMs, (wholeUs / 1_000) * judgeShare);
  }

  /** How long a load of `blocks` blocks may take: no longer than computing them, within reason. */
  deadlineMs(blocks: number, first = 0): number {
    const computeUs = this.computeUs(blocks, first);
    if (computeUs === undefined) return this.#loadDeadlineMs;
    return Math.min(this.#loadDeadlineMs, Math.max(minDeadlineMs, Math.ceil(computeUs / 1_000)));
  }

  /** How long a lookup of `blocks` blocks may take before it counts as a miss. */
  lookupDeadlineMs(blocks: number): number {
    if (this.#loads !== 'planned') return this.#loadDeadlineMs; // whoever wants all that is held waits for it
    const computeUs = this.computeUs(blocks);
    if (computeUs === undefined) return maxLookupMs; // a process that has just started is slow itself
    return Math.min(maxLookupMs, Math.max(minLookupMs, Math.ceil((computeUs * lookupShare) / 1_000)));
  }
}

function passedOf(
  spans: readonly Span[],
  from: number,
  copyUs: number,
  eachAwayUs: number,
): NonNullable<Plan['passed']> {
  const byTier: Record<string, number> = {};
  let us = 0;
  let at = 0;
  for (const { tier, count } of spans) {
    const passed = Math.min(count, Math.max(at + count - from, 0));
    at += count;
    if (passed === 0) continue;
    byTier[tier] = (byTier[tier] ?? 0) + passed;
    us += passed * (tier === arenaTier ? copyUs : eachAwayUs);
  }
  return { byTier, us };
}
