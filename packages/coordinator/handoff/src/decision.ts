/**
 * Whether another worker computes a request's prompt, which one, and how much of it. Pure: all figures are arguments, so that the same
 * moment is decided the same way in service, in tests and in the simulation.
 *
 * For the decode side alone, and for each worker that takes prefill, times are predicted (times.ts) and priced (cost.ts). What misses
 * fewest targets is taken; of equals, what costs all least. The prefill side computes all whole blocks; only where the link is the
 * bottleneck, or they would not be there while the decode side waits for them, 16 shares of them are looked at, at the best workers: fewer
 * blocks travel, and the decode side computes the rest meanwhile. What it would not wait for is no way at all.
 * A split has to cost a twentieth less than none: it can fail in more ways. Where all prompts are to be split, it is as much of this one as
 * is there while the decode side waits; a part of it only where that is no worse than none.
 */
import { type Cost, costOf, ownCostOf } from './cost.ts';
import type { Question, Side } from './question.ts';
import { aloneTimes, type SplitTimes, splitTimes, stepS } from './times.ts';

/** Why a request is split, or is not. */
export const handOffReasons = [
  /** split: its first token is there sooner */
  'sooner',
  /** split: streams that run at the decode side keep their time between tokens */
  'spares-streams',
  /** split: the configuration says always */
  'always',
  /** none: the configuration says never */
  'never',
  /** none: no full block before the last token */
  'short',
  /** none: the decode side has all full blocks at hand */
  'held',
  /** none: no other worker takes prefill */
  'no-prefill-worker',
  /** none: all that do are of another revision, or name blocks otherwise */
  'other-revision',
  /** none: the decode side, or all that take prefill, have no cache node */
  'no-node',
  /** none: the decode side's node is no peer of theirs */
  'no-link',
  /** none: of those that take prefill no pool holds the prompt */
  'prefill-too-small',
  /** none: all that take prefill have as many legs as they may, or the coordinator has */
  'prefill-busy',
  /** none: nobody's blocks would all be there while the decode side waits, nor a sixteenth of them from the best */
  'prefill-late',
  /** none: the worker alone serves all best; where all prompts are to be split: no part that is in time is as good */
  'alone',
] as const;
export type HandOffReason = (typeof handOffReasons)[number];

/** What is expected of one way to serve the request. */
export interface Expected extends Cost {
  /** Seconds to the decode side's first token, from now on; and without what is learned of how late they come. */
  readonly ttftS: number;
  readonly plainS: number;
}

export interface Decision {
  readonly reason: HandOffReason;
  /** undefined: the decode side computes all. */
  readonly split: Split | undefined;
  /** Of what was decided. */
  readonly expected: Expected;
  readonly alone: Expected;
  /** A decode worker computes what an idle worker like it should have: no prefill worker could be asked. */
  readonly isLacking: boolean;
}

export interface Split extends Expected, SplitTimes {
  /** The blocks are all: the prefill side computes the rest of the prompt, too, and gives the first token. */
  readonly draws: boolean;
}

const parts = 16;
/** Workers of which shares are looked at: a decision is one turn of the event loop, also where a thousand could compute. */
const mostShared = 16;
const margin = 0.95;

export function decide(question: Question): Decision {
  const { mode, tokens, blockTokens, decode } = question;
  const alone = aloneOf(question);
  const none = (reason: HandOffReason): Decision => ({
    ...{ reason, split: undefined, expected: alone, alone },
    isLacking: decode.role === 'decode' && lacks.has(reason) && isWanted(question, alone),
  });
  if (mode === 'never') return none('never');
  const full = Math.floor((tokens - 1) / blockTokens);
  if (full < 1) return none('short');
  const held = Math.min(decode.match.blocks, full);
  if (held >= full) return none('held');
  const [candidates, why] = candidatesOf(question);
  if (candidates.length === 0) return none(why);
  const wholes = candidates.map((prefill) => splitOf(question, prefill, full, held));
  const inTime = [...wholes, ...sharesOf(question, wholes, full, held)].filter((split) => isInTime(question, split));
  if (inTime.length === 0) return none('prefill-late');
  const ways = mode === 'always' ? inTime.filter((split) => isWorthIt(split, full, alone)) : inTime;
  if (ways.length === 0) return none('alone');
  const isTaken = mode === 'always' ? isMore : isBetter;
  const best = ways.reduce((best, split) => (isTaken(split, best) ? split : best));
  const chosen = drawing(question, best, full);
  if (mode === 'always') return { reason: 'always', split: chosen, expected: chosen, alone, isLacking: false };
  if (!pays(chosen, alone)) return none('alone');
  const isSooner = chosen.ttftS < alone.ttftS && chosen.slowed >= alone.slowed;
  const reason = isSooner ? 'sooner' : 'spares-streams';
  return { reason, split: chosen, expected: chosen, alone, isLacking: false };
}

/**
 * The decode side waits from when it has its room, and until then the time is not won: what others are to send and compute first may wait
 * for theirs. From now on is never too short, as of what is known now: prompts that come meanwhile may go ahead of this one.
 */
const isInTime = ({ deadlineS }: Question, { arrivedS }: Split): boolean => arrivedS <= deadlineS;

/**
 * Where all prompts are to be split: all of this one, or a part that is no worse than none. The last step of a part travels before the
 * rest is begun with: alike is what takes a twentieth longer at most, and misses no more.
 */
const isWorthIt = ({ blocks, plainS, misses }: Split, full: number, alone: Expected): boolean =>
  blocks === full || (plainS * margin <= alone.plainS && misses <= alone.misses);

/** Parts of the prompt, at the best of those whose link keeps it waiting, or who cannot compute all in time. */
function sharesOf(question: Question, wholes: readonly Split[], full: number, held: number): Split[] {
  const shares: Split[] = [];
  const tooMuch = wholes.filter((whole) => whole.isLinkBound || !isInTime(question, whole));
  for (const { prefill } of tooMuch.sort((a, b) => (isBetter(a, b) ? -1 : 1)).slice(0, mostShared)) {
    for (let part = 1; part < parts; part++) {
      const blocks = Math.ceil((full * part) / parts);
      if (blocks > held) shares.push(splitOf(question, prefill, blocks, held));
    }
  }
  return shares;
}

/** Misses come first; of equals the one that is there sooner, then more blocks, then the smaller number: nothing is left to chance. */
function isBetter(a: Split, b: Split): boolean {
  if (a.misses !== b.misses) return a.misses < b.misses;
  if (a.costS !== b.costS) return a.costS < b.costS;
  if (a.blocks !== b.blocks) return a.blocks > b.blocks;
  return a.prefill.number < b.prefill.number;
}

/** More blocks come first; of equals the better one. */
const isMore = (a: Split, b: Split): boolean => (a.blocks === b.blocks ? isBetter(a, b) : a.blocks > b.blocks);

/** Whether an idle worker that is as fast as the decode side would have been asked, for all or a part. */
function isWanted(question: Question, alone: Expected): boolean {
  const { mode, tokens, blockTokens, decode } = question;
  const idle = { waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0, loadAheadS: 0 };
  const prefill: Side = { ...decode, ...idle, number: -1, role: 'prefill', node: '' };
  const full = Math.floor((tokens - 1) / blockTokens);
  const held = Math.min(decode.match.blocks, full);
  const whole = splitOf(question, prefill, full, held);
  return [whole, ...sharesOf(question, [whole], full, held)].some(
    (split) => isInTime(question, split) && (mode === 'always' ? isWorthIt(split, full, alone) : pays(split, alone)),
  );
}

/** It misses less, or as much and costs a twentieth less. */
const pays = (split: Expected, alone: Expected): boolean =>
  split.misses < alone.misses || (split.misses === alone.misses && split.costS < alone.costS * margin);

const lacks: ReadonlySet<HandOffReason> = new Set([
  ...([
    'no-prefill-worker',
    'other-revision',
    'no-node',
    'no-link',
    'prefill-too-small',
    'prefill-busy',
    'prefill-late',
  ] as const),
]);

/** Those that may compute for the decode side; the reason where there is none. */
function candidatesOf(question: Question): readonly [Side[], HandOffReason] {
  const { decode, others, links, legsPerWorker, legsLeft, tokens } = question;
  let found = others.filter(({ number, role, isReady }) => isReady && role !== 'decode' && number !== decode.number);
  if (found.length === 0) return [found, 'no-prefill-worker'];
  found = found.filter(({ revision, identity }) => revision === decode.revision && identity === decode.identity);
  if (found.length === 0) return [found, 'other-revision'];
  found = decode.node === null ? [] : found.filter(({ node }) => node !== null);
  if (found.length === 0) return [found, 'no-node'];
  // What no link brings would be awaited in vain, and computed twice.
  if (links !== undefined) found = found.filter(({ node }) => node === decode.node || links.has(node!));
  if (found.length === 0) return [found, 'no-link'];
  // As engines refuse it, also where the prompt alone is asked for: with room for a token behind it.
  found = found.filter(({ maxTotalTokens = Number.POSITIVE_INFINITY }) => tokens < maxTotalTokens);
  if (found.length === 0) return [found, 'prefill-too-small'];
  found = legsLeft < 1 ? [] : found.filter(({ legs }) => legs < legsPerWorker);
  return [found, 'prefill-busy'];
}

function aloneOf(question: Question): Expected {
  const { plainS, computes, computeS } = aloneTimes(question);
  const ttftS = plainS + question.late.aloneS(plainS);
  const work = [{ side: question.decode, tokens: computes, seconds: computeS }];
  return { ...costOf(question, ttftS, work), ttftS, plainS };
}

function splitOf(question: Question, prefill: Side, blocks: number, held: number): Split {
  const times = splitTimes(question, prefill, blocks, held, false);
  const { plainS, computes, computeS, tail, tailS } = times;
  const ttftS = plainS + question.late.splitS(plainS);
  const work = [
    { side: question.decode, tokens: tail, seconds: tailS },
    { side: prefill, tokens: computes, seconds: computeS },
  ];
  const { itlS, slowed, misses, costS } = costOf(question, ttftS, work);
  return {
    itlS,
    slowed,
    misses,
    costS,
    ttftS,
    plainS,
    computes,
    computeS,
    prefill,
    blocks,
    lacks: times.lacks,
    travels: times.travels,
    stepBlocks: times.stepBlocks,
    tail,
    tailS,
    firstS: times.firstS,
    arrivedS: times.arrivedS,
    isLinkBound: times.isLinkBound,
    earlyS: times.earlyS,
    pauseS: times.pauseS,
    draws: false,
  };
}

/**
 * The same, with the first token from the prefill side, where that is worth it to the request itself: its client has that one earlier, and
 * all others later, by the rest of the prompt that the prefill side computes first, or sooner, by the step that the decode side need
 * not take for it. Never where the next one does not follow within the target, nine times in ten: a stream that begins and stands still is
 * one that misses it.
 */
function drawing(question: Question, split: Split, full: number): Split {
  const { decode, maxTokens, itlS } = question;
  if (split.blocks !== full || maxTokens <= 1 || !holdsToken(split.prefill, question.tokens)) return split;
  const { earlyS, plainS, pauseS } = splitTimes(question, split.prefill, full, full - split.lacks, true);
  const asIs = { ...split, pauseS }; // what is learned of pauses is learned of this figure, whoever gives the token
  if (pauseS + question.late.pauseS(pauseS) > itlS) return asIs;
  const without = ownCostOf(question, split.plainS, split.plainS + stepS(decode));
  if (ownCostOf(question, earlyS, plainS) > without) return asIs;
  return { ...split, earlyS, pauseS, draws: true };
}

/**
 * Whether an answer may begin at the prefill side and go on elsewhere: where its pool is full with the first token, an engine ends the
 * answer there.
 */
export const holdsToken = ({ maxTotalTokens = Number.POSITIVE_INFINITY }: Side, tokens: number): boolean =>
  tokens + 1 < maxTotalTokens;

const ms = (seconds: number): string => `${(seconds * 1000).toFixed(0)} ms`;

/** One line of printable ASCII, for headers, logs and traces. */
export function lineOf({ decode, linkBlocksPerS }: Question, { reason, split, alone }: Decision): string {
  const without = `alone ${ms(alone.ttftS)}, between ${ms(alone.itlS)}, misses ${alone.misses}`;
  if (split === undefined) return `none; why=${reason}; held=${decode.match.blocks}; ${without}`;
  const link =
    split.travels === 0 ? 'same node' : linkBlocksPerS > 0 ? `${linkBlocksPerS.toFixed(0)} blocks/s` : 'not measured';
  return (
    `split P=${split.prefill.name}; blocks=${split.blocks}; why=${reason}; computes=${split.computes}; ` +
    (split.stepBlocks > 0 ? `steps of ${split.stepBlocks}; ` : '') +
    `travels=${split.travels}; link=${link}; first token ${ms(split.ttftS)}, between ${ms(split.itlS)}, ` +
    `misses ${split.misses}; ${without}`
  );
}
