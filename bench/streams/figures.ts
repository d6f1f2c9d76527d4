/**
 * What streams take through a coordinator, as figures. Straight, through a bare proxy and through it are three runs, in which no request
 * has a partner: so percentiles are compared with percentiles. The promise is of what is added: the difference of two percentiles, which
 * is a percentile of nothing, and is named as what it is.
 */
import { type Figure, time } from '../figures.ts';
import type { Streams } from './whole.ts';

/** Milliseconds that may be added at the 99th percentile: to first tokens, between tokens. */
const [mayFirstMs, mayGapMs] = [2, 1];
/** Times are counted by so much (clients.ts): less than this, or less than nothing, was not measured. */
const leastMs = 0.01;

type Way = 'straight' | 'proxied' | 'through';
type Times = { readonly [Name in 'first' | 'gaps']: Pick<Streams[Name], 'p99'> };

export function timeFigures(ways: Readonly<Record<Way, Times>>): Figure[] {
  const figures = (what: string, name: keyof Times, mayMs: number): Figure[] => {
    const ms = (way: Way): number => ways[way][name].p99;
    const addedMs = Math.max(ms('through') - ms('straight'), leastMs);
    return [
      time(`${what}_p99`, ms('through'), 'ms', ms('straight'), 'the p99 of the engines asked straight'),
      time(`${what}_than_proxy`, ms('through'), 'ms', ms('proxied'), 'the p99 through a bare proxy'),
      time(`added_${what}_p99`, addedMs, 'ms', mayMs, `${mayMs} ms; the difference of both p99`),
    ];
  };
  return [...figures('first_token', 'first', mayFirstMs), ...figures('between_tokens', 'gaps', mayGapMs)];
}
