/**
 * Whether another worker computes a request's prompt, which one, and how much of it. Pure: all figures are arguments, so that the same
 * moment is decided the same way in service, in tests and in the simulation.
 *
 *     begins(w)    = max(tokens ahead × token(w), rest of the step, loads ahead, room)
 *     chunk(w)     = tokens of a step; of one that keeps to its streams' target, what that leaves (engine/scheduler's pacing.ts)
 *     token(w)     = 1 ÷ prefill rate + step(w) ÷ chunk(w)                     the latter only while streams run there
 *     alone        = max(begins(D), loads ahead + bring) + uncached(D) × token(D) + step(D)
 *     computed(b)  = begins(P) + (b - held(P)) × token(P)                                  0 where P holds all b blocks
 *     stepped(b)   = √((b - held(P)) × link × step without tokens(P) × (1 + waiting))     blocks of one step of P; no more than it takes
 *     arrived(b)   = max((pending + b - held(D)) ÷ link, computed(b) + its last step's blocks ÷ link)
 *     split(b)     = max(arrived(b), begins(D)) + (tokens - b blocks) × token(D) + step(D)
 *     between(w,n) = step(w) + min(n, chunk(w)) ÷ prefill rate                time between two tokens of those that run
 *     misses       = (waited + time to first token > target) + Σ over D, P: running, where `between` exceeds its target by this request
 *     cost         = worth(time to first token) + Σ over D, P: what it computes there × (running × harm + urgency × (waiting - awaiting) ÷ 2)
 *     harm         = 0.1 where `between` stays within the target, else 1
 *     urgency      = time since it came ÷ a third of the target, 1 at most; worth: its sum over the time to the first token
 *
 * What misses least is taken; of equals, what costs all least. `b` is one of 16 equal parts of the prompt's full blocks: where the link is
 * the bottleneck, fewer blocks travel and the decode side computes the rest while they do not. Streams that get their tokens in time are
 * hardly harmed: a decode side takes prompts itself while prefill has a queue. A first token that the next one does not follow within the target
 * is not given ahead: a stream that begins and stands still is one that misses it. A split has to cost a twentieth less than none: it can
 * fail in more ways. Time to first token is that of Mooncake's algorithm 1 (FAST'25) with the transfer hidden under
 * compute; that a worker which runs streams takes prefill as far as their target allows is TaiChi's (arXiv 2508.01989).
 */
import type { WorkerState } from '@kvtier/routing';
import { bringSecondsOf, computedTokensOf, roomS } from '@kvtier/routing';

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
  /** none: all that take prefill have as many legs as they may, or the coordinator has */
  'prefill-busy',
  /** none: the worker alone serves all best */
  'alone',
] as const;
export type HandOffReason = (typeof handOffReasons)[number];

export type SplitMode = 'predicted' | 'always' | 'never';

/** Of a worker at this moment. `match` is what it has at hand of the prompt. */
export interface Side extends WorkerState {
  readonly number: number;
  readonly name: string;
  readonly role: 'prefill' | 'decode' | 'both';
  /** It takes requests. */
  readonly isReady: boolean;
  readonly revision: string;
  /** All that two workers must have in common to share blocks, as one text. */
  readonly identity: string;
  /** Of the cache node beside it; null: it has none. */
  readonly node: string | null;
  /** Prompts that it computes for others now. */
  readonly legs: number;
  /** Of those that wait there: whose prompt others compute. They have next to nothing to wait for there. */
  readonly awaiting: number;
  /** Tokens that it computes in one step at most. */
  readonly stepTokens: number;
  /** Of a step that computes prompts alone, besides its tokens; 0: not known. */
  readonly prefillStepS: number;
}

export interface Question {
  readonly mode: SplitMode;
  readonly tokens: number;
  readonly blockTokens: number;
  /** Most tokens of the answer. */
  readonly maxTokens: number;
  readonly decode: Side;
  /** All other workers of the model. */
  readonly others: readonly Side[];
  /** Seconds since the request came. */
  readonly waitedS: number;
  /** Seconds: to the first token; between two tokens of those that run. */
  readonly ttftS: number;
  readonly itlS: number;
  /** Blocks a second to the decode side from another node; 0: not measured, taken for as fast as need be, since only a try measures it. */
  readonly linkBlocksPerS: number;
  /** Blocks of other hand-offs that have still to come over it. */
  readonly pendingBlocks: number;
  /** Legs that one worker may have; legs that the coordinator may still begin. */
  readonly legsPerWorker: number;
  readonly legsLeft: number;
  /** Seconds that first tokens came later than predicted, so far, of those that were predicted to take so long. */
  readonly late: Late;
}

export interface Late {
  aloneS(predictedS: number): number;
  splitS(predictedS: number): number;
}

/** What is expected of one way to serve the request. */
export interface Expected {
  /** Seconds to the first token, from now on; and without what is learned of how late they come. */
  readonly ttftS: number;
  readonly plainS: number;
  /** Longest seconds between two tokens of those that run beside it. */
  readonly itlS: number;
  /** Streams that it makes slower than their target. */
  readonly slowed: number;
  /** These, and the request itself where its first token is late. */
  readonly misses: number;
  readonly costS: number;
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

export interface Split extends Expected {
  readonly prefill: Side;
  /** Whole blocks of the prompt, from the first on. */
  readonly blocks: number;
  /** These are all, and others follow the first token in time: the prefill side computes the rest of the prompt, too, and gives that one. */
  readonly draws: boolean;
  /** Seconds from the prefill side's token to the decode side's next one. */
  readonly pauseS: number;
  /** Prompt tokens that the prefill side computes. */
  readonly computes: number;
  /** Blocks that travel; and of one step of the prefill side at most, so that they do while others are computed; 0: as it likes. */
  readonly travels: number;
  readonly stepBlocks: number;
  /** Seconds until the first block can be there, and the last one. */
  readonly firstS: number;
  readonly arrivedS: number;
}

const parts = 16;
const margin = 0.95;
/** Of a second that a stream comes later, while its tokens come in time. */
const harmInTime = 0.1;
/** Of the target: a first token that comes sooner than that is the less urgent the sooner it comes. */
const soon = 1 / 3;
/** As engines keep to a target: see pacing.ts of engine/scheduler. */
const [trust, leastShare] = [0.9, 1 / 4];
/** As many blocks a second as make a transfer nothing. */
const fast = 1e9;

export function decide(question: Question): Decision {
  const { mode, tokens, blockTokens, decode } = question;
  const alone = aloneOf(question);
  const none = (reason: HandOffReason): Decision => ({
    ...{ reason, split: undefined, expected: alone, alone },
    isLacking: decode.role === 'decode' && isLack(reason) && isWanted(question, alone),
  });
  if (mode === 'never') return none('never');
  const full = Math.floor((tokens - 1) / blockTokens);
  if (full < 1) return none('short');
  const held = Math.min(decode.match.blocks, full);
  if (held >= full) return none('held');
  const [candidates, why] = candidatesOf(question);
  if (candidates.length === 0) return none(why);
  let best: Split | undefined;
  for (const prefill of candidates) {
    for (let part = mode === 'always' ? parts : 1; part <= parts; part++) {
      const blocks = Math.ceil((full * part) / parts);
      if (blocks <= held) continue;
      const split = splitOf(question, prefill, blocks, held);
      if (best === undefined || isBetter(split, best)) best = split;
    }
  }
  const chosen = { ...best!, draws: best!.blocks === full && question.maxTokens > 1 && best!.pauseS <= question.itlS };
  if (mode === 'always') return { reason: 'always', split: chosen, expected: chosen, alone, isLacking: false };
  if (!pays(chosen, alone)) return none('alone');
  const isSooner = chosen.ttftS < alone.ttftS && chosen.slowed >= alone.slowed;
  const reason = isSooner ? 'sooner' : 'spares-streams';
  return { reason, split: chosen, expected: chosen, alone, isLacking: false };
}

/** Misses come first; of equals the one that is there sooner, then more blocks, then the smaller number: nothing is left to chance. */
function isBetter(a: Split, b: Split): boolean {
  if (a.misses !== b.misses) return a.misses < b.misses;
  if (a.costS !== b.costS) return a.costS < b.costS;
  if (a.blocks !== b.blocks) return a.blocks > b.blocks;
  return a.prefill.number < b.prefill.number;
}

/** Whether an idle worker that is as fast as the decode side would have been asked. */
function isWanted(question: Question, alone: Expected): boolean {
  const { mode, tokens, blockTokens, decode } = question;
  if (mode === 'always') return true;
  const idle = { waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0, loadAheadS: 0 };
  const prefill: Side = { ...decode, ...idle, number: -1, role: 'prefill', node: '' };
  const full = Math.floor((tokens - 1) / blockTokens);
  return pays(splitOf(question, prefill, full, Math.min(decode.match.blocks, full)), alone);
}

/** It misses less, or as much and costs a twentieth less. */
const pays = (split: Expected, alone: Expected): boolean =>
  split.misses < alone.misses || (split.misses === alone.misses && split.costS < alone.costS * margin);

const isLack = (reason: HandOffReason): boolean =>
  reason === 'no-prefill-worker' || reason === 'other-revision' || reason === 'no-node' || reason === 'prefill-busy';

/** Those that may compute for the decode side; the reason where there is none. */
function candidatesOf({ decode, others, legsPerWorker, legsLeft }: Question): readonly [Side[], HandOffReason] {
  let found = others.filter(({ number, role, isReady }) => isReady && role !== 'decode' && number !== decode.number);
  if (found.length === 0) return [found, 'no-prefill-worker'];
  found = found.filter(({ revision, identity }) => revision === decode.revision && identity === decode.identity);
  if (found.length === 0) return [found, 'other-revision'];
  found = decode.node === null ? [] : found.filter(({ node }) => node !== null);
  if (found.length === 0) return [found, 'no-node'];
  found = legsLeft < 1 ? [] : found.filter(({ legs }) => legs < legsPerWorker);
  return [found, 'prefill-busy'];
}

function aloneOf(question: Question): Expected {
  const { decode, late } = question;
  const computes = computedTokensOf(question, decode, decode);
  const bringS = bringSecondsOf(question, decode, decode);
  const begins = Math.max(beginsS(question, decode, true), decode.loadAheadS + bringS);
  const computeS = computes * tokenS(question, decode);
  const plainS = begins + computeS + stepS(decode);
  return expectedOf(question, plainS, late.aloneS(plainS), [[decode, computes, computeS]]);
}

function splitOf(question: Question, prefill: Side, blocks: number, held: number): Split {
  const { tokens, blockTokens, decode, linkBlocksPerS, pendingBlocks, late } = question;
  const isNear = prefill.node === decode.node;
  const link = isNear || linkBlocksPerS <= 0 ? fast : linkBlocksPerS;
  const toCompute = Math.max(blocks - Math.min(prefill.match.blocks, blocks), 0);
  const computes = toCompute * blockTokens;
  const travels = isNear ? 0 : blocks - held;
  const most = Math.max(Math.floor(prefill.stepTokens / blockTokens), 1);
  const stepBlocks = travels === 0 ? 0 : stepBlocksOf(prefill, toCompute, link, most);
  const moreSteps = stepBlocks === 0 ? 0 : Math.ceil(toCompute / stepBlocks) - Math.ceil(toCompute / most);
  const prefillS = computes * tokenS(question, prefill) + moreSteps * prefill.prefillStepS;
  const startS = toCompute === 0 ? 0 : beginsS(question, prefill, false);
  const lastBlocks = Math.min(stepBlocks || most, toCompute, travels);
  const wireS = travels === 0 ? 0 : (pendingBlocks + travels) / link;
  const arrivedS = Math.max(wireS, startS + prefillS + lastBlocks / link);
  const firstS =
    toCompute === blocks
      ? startS + Math.min(computes, (stepBlocks || most) * blockTokens) * tokenS(question, prefill)
      : 0;
  const tail = tokens - blocks * blockTokens;
  const tailS = tail * tokenS(question, decode);
  const plainS = Math.max(arrivedS, beginsS(question, decode, true)) + tailS + stepS(decode);
  // A step under way is as long as the streams' target, where prompts are computed beside them.
  const underWayS = decode.tokensAhead > 0 && decode.running > 0 ? question.itlS : stepS(decode);
  const pauseS = plainS - (startS + prefillS) + underWayS + stepS(decode);
  const expected = expectedOf(question, plainS, late.splitS(plainS), [
    [decode, tail, tailS],
    [prefill, computes, prefillS],
  ]);
  return { ...expected, prefill, blocks, draws: false, pauseS, computes, travels, stepBlocks, firstS, arrivedS };
}

/**
 * Each step costs `prefillStepS`, and what the last one computed travels when nothing is computed any more: with n steps
 * n × prefillStepS + blocks ÷ n ÷ link, which is least for n = √(blocks ÷ link ÷ prefillStepS). Who waits behind it pays for each step,
 * too.
 */
function stepBlocksOf({ prefillStepS, waiting }: Side, blocks: number, link: number, most: number): number {
  if (prefillStepS <= 0 || blocks === 0) return 0;
  const best = Math.max(Math.ceil(Math.sqrt(blocks * link * prefillStepS * (1 + waiting))), 1);
  return best < most ? best : 0;
}

function expectedOf(
  question: Question,
  plainS: number,
  lateS: number,
  work: readonly (readonly [side: Side, tokens: number, seconds: number])[],
): Expected {
  const { waitedS, ttftS: target, itlS: between } = question;
  const ttftS = plainS + lateS;
  let slowed = 0;
  const soonS = target * soon;
  let costS = worthS(waitedS + ttftS, soonS) - worthS(waitedS, soonS);
  const urgency = Math.min((waitedS + ttftS) / soonS, 1);
  let itlS = 0;
  for (const [side, tokens, seconds] of work) {
    if (tokens === 0) continue;
    costS += (seconds * urgency * Math.max(side.waiting - side.awaiting, 0)) / 2;
    if (side.running === 0) continue;
    const without = stepS(side);
    const beside = without + Math.min(tokens, chunkOf(question, side)) / side.prefillTokensPerS;
    itlS = Math.max(itlS, beside);
    costS += seconds * side.running * (beside <= between ? harmInTime : 1);
    // Those that are too slow already are not made so by this request.
    if (without <= between && beside > between) slowed += side.running;
  }
  return { ttftS, plainS, itlS, slowed, misses: slowed + (waitedS + ttftS > target ? 1 : 0), costS };
}

/** Of waiting so long for a first token, each moment as urgent as it is late: the less the sooner it would come anyway. */
const worthS = (waitS: number, soonS: number): number =>
  waitS < soonS ? (waitS * waitS) / (2 * soonS) : waitS - soonS / 2;

/** Seconds until it begins with what comes now; with room for all of the request, or for nothing but the prompt. */
function beginsS(question: Question, side: Side, isWhole: boolean): number {
  const { tokens, blockTokens, maxTokens } = question;
  const requests = side.waiting + side.running;
  const request = { tokens, blockTokens, maxTokens: isWhole ? maxTokens : 0, keys: noKeys, session: '' };
  const stepLeftS = requests === 0 ? 0 : stepS(side) / 2;
  return Math.max(side.tokensAhead * tokenS(question, side), stepLeftS, side.loadAheadS, roomS(request, side));
}
const noKeys = new Int32Array(0);

/** Seconds that one prompt token takes there, beside those that run. */
const tokenS = (question: Question, side: Side): number =>
  1 / side.prefillTokensPerS + (side.running === 0 ? 0 : stepS(side) / chunkOf(question, side));

/** Prompt tokens of one step there, beside those that run. Only workers that decode for others are told to keep to the target. */
function chunkOf({ itlS, blockTokens }: Question, side: Side): number {
  const leftS = itlS - stepS(side);
  if (side.role !== 'decode' || side.running === 0 || leftS <= 0) return side.stepTokens;
  const inTime = trust * Math.max(leftS, itlS * leastShare) * side.prefillTokensPerS;
  return Math.min(Math.max(inTime, blockTokens), side.stepTokens);
}

/** Of a step without prompts. */
const stepS = ({ stepS, running, stepPerRequestS }: Side): number => stepS + running * stepPerRequestS;

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
