/**
 * When a request's first token comes, served by the decode side alone or with another worker that computes `b` blocks of its prompt.
 *
 *     chunk(w)     = tokens of a step; of one that keeps to its streams' target, what that leaves (engine/scheduler's pacing.ts), as
 *                    far as the worker trusts its own rates
 *     token(w)     = 1 ÷ prefill rate + step(w) ÷ chunk(w)                     the latter only while streams run there
 *     begins(w)    = max(tokens ahead × token(w), rest of the step, loads ahead, room)
 *     alone        = max(begins(D), loads ahead + bring) + uncached(D) × token(D) + step(D)
 *     computed(b)  = begins(P) + (b - held(P)) × token(P)                                  also what P holds it says in a step of its own
 *     stepped(b)   = √((b - held(P)) × link × step without tokens(P) × (1 + waiting))     blocks of one step of P; no more than it takes
 *     arrived(b)   = max((pending + b - held(D)) ÷ link, computed(b) + its last step's blocks ÷ link)
 *     split(b)     = max(arrived(b), begins(D)) + (tokens - b blocks) × token(D) + step(D)
 *
 * Of a rest of a block, which engines compute before prompts that run, max(arrived(b), begins(D)) is
 *
 *     tail(b)      = max(arrived(b), room, min(tokens ahead × token(D), arrived(b) + half a step with prompts + their share of its own))
 *
 * Time to first token is that of Mooncake's algorithm 1 (FAST'25) with the transfer hidden under compute.
 */
import { bringSecondsOf, computedTokensOf, roomS } from '@kvtier/routing';
import type { Question, Side } from './question.ts';

/** As engines keep to a target: see pacing.ts of engine/scheduler. */
const leastShare = 1 / 4;
/** As many blocks a second as make a transfer nothing. */
const fast = 1e9;

export interface AloneTimes {
  /** Seconds to the first token, without what is learned of how late they come. */
  readonly plainS: number;
  /** Prompt tokens that it computes, and how long it does. */
  readonly computes: number;
  readonly computeS: number;
}

export interface SplitTimes extends AloneTimes {
  readonly prefill: Side;
  /** Whole blocks of the prompt, from the first on; and those of them that the decode side lacks. */
  readonly blocks: number;
  readonly lacks: number;
  /** Blocks that travel; and of one step of the prefill side at most, so that they do while others are computed; 0: as it likes. */
  readonly travels: number;
  readonly stepBlocks: number;
  /** Prompt tokens that are left for the decode side, and how long it computes them. */
  readonly tail: number;
  readonly tailS: number;
  /** Seconds until the prefill side can say that a block is there, and until the last one is. */
  readonly firstS: number;
  readonly arrivedS: number;
  /** Nobody waits for the computing: to bring all over takes longer than until all is computed, and its last step is there. */
  readonly isLinkBound: boolean;
  /** Until the prefill side has computed all that it is to; from then on to the decode side's next token, at the latest. */
  readonly earlyS: number;
  readonly pauseS: number;
}

export function aloneTimes(question: Question): AloneTimes {
  const { decode } = question;
  const computes = computedTokensOf(question, decode, decode);
  const bringS = bringSecondsOf(question, decode, decode);
  const begins = Math.max(beginsS(question, decode, true), decode.loadAheadS + bringS);
  const computeS = computes * tokenS(question, decode);
  return { plainS: begins + computeS + stepS(decode), computes, computeS };
}

/**
 * `draws`: the prefill side computes what is behind the blocks, too, with the last of them. Asked of each worker for each request, so one
 * plain literal, as in sides.ts.
 */
export function splitTimes(
  question: Question,
  prefill: Side,
  blocks: number,
  held: number,
  draws: boolean,
): SplitTimes {
  const { tokens, blockTokens, decode, linkBlocksPerS, pendingBlocks } = question;
  const isNear = prefill.node === decode.node;
  const link = isNear || linkBlocksPerS <= 0 ? fast : linkBlocksPerS;
  const toCompute = Math.max(blocks - Math.min(prefill.match.blocks, blocks), 0);
  const tail = tokens - blocks * blockTokens;
  const computes = toCompute * blockTokens + (draws ? tail : 0);
  const travels = isNear ? 0 : blocks - held;
  const most = Math.max(Math.floor(prefill.maxStepTokens / blockTokens), 1);
  const stepBlocks = travels === 0 ? 0 : stepBlocksOf(prefill, toCompute, link, most);
  const moreSteps = stepBlocks === 0 ? 0 : Math.ceil(toCompute / stepBlocks) - Math.ceil(toCompute / most);
  const computeS = computes * tokenS(question, prefill) + moreSteps * prefill.prefillStepS;
  const startS = beginsS(question, prefill, false);
  const earlyS = startS + computeS;
  const lastBlocks = Math.min(stepBlocks || most, toCompute, travels);
  const wireS = travels === 0 ? 0 : (pendingBlocks + travels) / link;
  const computedS = earlyS + lastBlocks / link;
  const arrivedS = Math.max(wireS, computedS);
  // Of what it holds it says nothing before: that lies in its engine, and its node is offered it with the first step.
  const firstS = startS + Math.min(toCompute, stepBlocks || most) * blockTokens * tokenS(question, prefill);
  const tailS = tail * tokenS(question, decode);
  const lastS = tailS + stepS(decode);
  const isLong = tail > blockTokens;
  const begunS = isLong ? Math.max(arrivedS, beginsS(question, decode, true)) : tailBeginsS(question, arrivedS, 1 / 2);
  const latestS = isLong ? begunS : tailBeginsS(question, arrivedS, 1);
  const plainS = begunS + lastS;
  const pauseS = latestS + stepS(decode) + lastS - earlyS;
  return {
    plainS,
    computes,
    computeS,
    prefill,
    blocks,
    lacks: blocks - held,
    travels,
    stepBlocks,
    tail,
    tailS,
    firstS,
    arrivedS,
    isLinkBound: wireS > computedS,
    earlyS,
    pauseS,
  };
}

/** Seconds until a rest of a block is computed: `part` of the step under way comes first, and prompts that run fill its own. */
function tailBeginsS(question: Question, arrivedS: number, part: number): number {
  const { decode } = question;
  const aheadS = decode.tokensAhead * tokenS(question, decode);
  const promptsS = chunkOf(question, decode) / decode.prefillTokensPerS;
  const besideS = part * (stepS(decode) + promptsS) + promptsS;
  return Math.max(arrivedS, roomOfS(question, decode, true), Math.min(aheadS, arrivedS + besideS));
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

/** Seconds until it begins with what comes now; with room for all of the request, or for nothing but the prompt. */
function beginsS(question: Question, side: Side, isWhole: boolean): number {
  const stepLeftS = side.waiting + side.running === 0 ? 0 : stepS(side) / 2;
  const aheadS = side.tokensAhead * tokenS(question, side);
  return Math.max(aheadS, stepLeftS, side.loadAheadS, roomOfS(question, side, isWhole));
}

function roomOfS({ tokens, blockTokens, maxTokens }: Question, side: Side, isWhole: boolean): number {
  return roomS({ tokens, blockTokens, maxTokens: isWhole ? maxTokens : 0, keys: noKeys, session: '' }, side);
}
const noKeys = new Int32Array(0);

/** Seconds that one prompt token takes there, beside those that run. */
const tokenS = (question: Question, side: Side): number =>
  1 / side.prefillTokensPerS + (side.running === 0 ? 0 : stepS(side) / chunkOf(question, side));

/** Prompt tokens of one step there, beside those that run. Only workers that decode for others are told to keep to the target. */
export function chunkOf({ itlS, blockTokens }: Question, side: Side): number {
  const leftS = itlS - stepS(side);
  if (side.role !== 'decode' || side.running === 0 || leftS <= 0) return side.maxStepTokens;
  const inTime = side.pacingTrust * Math.max(leftS, itlS * leastShare) * side.prefillTokensPerS;
  return Math.min(Math.max(inTime, blockTokens), side.maxStepTokens);
}

/** Of a step without prompts. */
export const stepS = ({ stepS, running, stepPerRequestS }: Side): number => stepS + running * stepPerRequestS;
