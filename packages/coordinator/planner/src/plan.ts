/**
 * How many workers a load needs, for prefill and for decode; pure.
 *
 *     prefill  demand    = prompt tokens a second × (1 − hit ratio)
 *              workers   = the least m ≥ demand ÷ (ceiling × rate), for which  s + W(m) ≤ time to first token
 *                          s = uncached tokens of a request ÷ rate,  W(m) = s × ρ^(√(2(m+1)) − 1) ÷ (m (1 − ρ)),  ρ = demand ÷ (m × rate)
 *     decode   demand    = tokens of answers a second
 *              streams   = the most n, for which  step + n × step per stream ≤ time between tokens; no more than run or have room at once
 *              workers   = demand ÷ (ceiling × n ÷ step(n))
 *
 * W(m) is the wait in front of m servers, as Sakasegawa approximates it (1977), with arrivals and prompts that vary as chance does; for a
 * fraction, too, from one server on: so that a little more load never needs less. A
 * prompt that alone takes longer than the target is not made faster by more workers: then the ceiling alone counts. The discount by the
 * hit ratio is Dynamo's, too (docs/handoff.md); what is cached needs no prefill, and its decode as much as any other.
 */

export interface LoadFigures {
  readonly requestsPerS: number;
  readonly promptTokensPerS: number;
  /** Share of prompt tokens that is not computed, 0 to 1. */
  readonly hitRatio: number;
  readonly outputTokensPerS: number;
}

/** Of one worker, as measured. */
export interface WorkerRates {
  readonly prefillTokensPerS: number;
  /** A step with n streams takes stepS + n × stepPerRequestS. */
  readonly stepS: number;
  readonly stepPerRequestS: number;
  /** Of a worker that has any. Where none tells the two apart (stepPerRequestS is 0): those that ran when a step took `stepS`. */
  readonly streams: number;
  /** Streams at once at most: places, and room for their blocks. */
  readonly maxStreams: number;
}

export interface Targets {
  /** Time to first token, and between tokens. */
  readonly firstTokenS: number;
  readonly betweenTokensS: number;
  /** Share of a worker's rate that may be in use, above 0 and below 1. */
  readonly ceiling: number;
}

export interface RolePlan {
  readonly demandTokensPerS: number;
  /** Of one worker that meets the targets. */
  readonly rateTokensPerS: number;
  /** With its fraction, for whoever averages it. 0: nothing comes. */
  readonly needed: number;
  /** `needed`, rounded up. */
  readonly workers: number;
  /** false: however many there are, the target is missed. */
  readonly isReachable: boolean;
}

export interface Plan {
  readonly prefill: RolePlan;
  readonly decode: RolePlan;
}

/** More are no plan, whatever comes. */
export const mostWorkers = 100_000;

export function planWorkers(load: LoadFigures, rates: WorkerRates, targets: Targets): Plan {
  return { prefill: planPrefill(load, rates, targets), decode: planDecode(load, rates, targets) };
}

function planPrefill(
  { requestsPerS, promptTokensPerS, hitRatio }: LoadFigures,
  { prefillTokensPerS: rate }: WorkerRates,
  { firstTokenS, ceiling }: Targets,
): RolePlan {
  const demand = promptTokensPerS * (1 - hitRatio);
  const least = bounded(demand / (ceiling * rate));
  const serviceS = requestsPerS > 0 ? demand / requestsPerS / rate : 0;
  const isReachable = serviceS <= firstTokenS;
  const isInTime = (workers: number): boolean => {
    const servers = Math.max(workers, 1);
    return serviceS + waitS(servers, demand / (servers * rate), serviceS) <= firstTokenS;
  };
  const needed = isReachable && least > 0 && !isInTime(least) ? leastFrom(Math.max(least, 1), isInTime) : least;
  return { demandTokensPerS: demand, rateTokensPerS: rate, needed, workers: Math.ceil(needed), isReachable };
}

/** The least number above `tooFew` that is enough, to a billionth. */
function leastFrom(tooFew: number, isEnough: (workers: number) => boolean): number {
  let enough = Math.min(2 * tooFew, mostWorkers);
  while (enough < mostWorkers && !isEnough(enough)) enough = Math.min(2 * enough, mostWorkers);
  for (let below = tooFew; enough - below > 1e-9 * enough; ) {
    const between = (below + enough) / 2;
    if (isEnough(between)) enough = between;
    else below = between;
  }
  // A billionth more than a whole number is that number.
  const whole = Math.floor(enough);
  return whole > tooFew && isEnough(whole) ? whole : enough;
}

/** Sakasegawa's approximation for m servers in use to a share of `used`, below 1. */
export const waitS = (servers: number, used: number, serviceS: number): number =>
  (serviceS * used ** (Math.sqrt(2 * (servers + 1)) - 1)) / (servers * (1 - used));

function planDecode(
  { outputTokensPerS: demand }: LoadFigures,
  rates: WorkerRates,
  { betweenTokensS, ceiling }: Targets,
): RolePlan {
  const { streams, isReachable } = streamsWithin(rates, betweenTokensS);
  const rate = streams / stepOf(rates, streams);
  const needed = bounded(demand / (ceiling * rate));
  return { demandTokensPerS: demand, rateTokensPerS: rate, needed, workers: Math.ceil(needed), isReachable };
}

/** The most streams whose steps are in time; 1 where not even one is. */
export function streamsWithin(rates: WorkerRates, betweenTokensS: number) {
  const most = Math.max(Math.floor(rates.maxStreams), 1);
  if (stepOf(rates, 1) > betweenTokensS) return { streams: 1, isReachable: false };
  const { base, each } = stepParts(rates);
  const inTime = each > 0 ? Math.floor((betweenTokensS - base) / each + 1e-9) : most;
  return { streams: Math.max(Math.min(inTime, most), 1), isReachable: true };
}

/** Never faster than it was seen: with the streams that it had a step took so long, with fewer it is taken for as much shorter. */
function stepParts({ stepS, stepPerRequestS, streams }: WorkerRates): { readonly base: number; readonly each: number } {
  if (stepPerRequestS > 0 || streams < 1) return { base: stepS, each: stepPerRequestS };
  return { base: 0, each: stepS / streams };
}

const leastStepS = 1e-6;
function stepOf(rates: WorkerRates, streams: number): number {
  const { base, each } = stepParts(rates);
  return Math.max(base + each * streams, leastStepS);
}

const bounded = (workers: number): number => (workers > 0 ? Math.min(workers, mostWorkers) : 0);
