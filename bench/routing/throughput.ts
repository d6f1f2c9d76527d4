/** Prompt tokens a second: of a run, and of what a cluster can do. */
import type { Hardware } from './hardware.ts';
import type { Job } from './worker.ts';

/**
 *     tokens ÷ max(last answer's end, when it was due)
 *
 * Due: had each request begun when it came, on a worker with a full batch that holds nothing of it. Who is never later than
 * that keeps up with the arrivals and has their rate: nobody has more, and none is told from another by whose answer was the last.
 */
export function throughput(jobs: readonly Job[], hardware: Hardware): number {
  let end = 1e-9;
  for (const job of jobs) end = Math.max(end, job.endedS, job.arrivedS + fullBatchS(job, hardware));
  return tokensOf(jobs) / end;
}

/** While a cluster runs empty, one long answer decides when it ends. */
const share = 0.9;

/** Of requests that all came at once: until so many of their tokens are answered. */
export function saturatedThroughput(jobs: readonly Job[]): number {
  const enough = share * tokensOf(jobs);
  let tokens = 0;
  for (const { inputTokens, endedS } of [...jobs].sort((a, b) => a.endedS - b.endedS)) {
    tokens += inputTokens;
    if (tokens >= enough) return tokens / Math.max(endedS, 1e-9);
  }
  return 0;
}

const tokensOf = (jobs: readonly Job[]): number => jobs.reduce((sum, { inputTokens }) => sum + inputTokens, 0);

function fullBatchS(
  { inputTokens, outputTokens }: Job,
  { prefillTokensPerS, stepS, stepPerRequestS, maxRunning }: Hardware,
): number {
  return inputTokens / prefillTokensPerS + outputTokens * (stepS + maxRunning * stepPerRequestS);
}
