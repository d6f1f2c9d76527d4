/**
 * That a run of streams was whole: no error, no answer that stands still, and as many tokens as its clients had to get. Whatever is
 * missing took no time: percentiles of the rest say nothing of it, and are better for it.
 */
import { KvError } from '@kvtier/errors';
import type { Percentiles } from './counting.ts';

export interface Streams {
  readonly tokens: number;
  readonly answers: number;
  readonly errors: Readonly<Record<string, number>>;
  /** Answers that stood still at the end (`stillMsAt`). */
  readonly hanging: number;
  /**
   * From asking to the first token; from the engine's writing to the client's reading; between two tokens of one answer. What was awaited
   * at the end counts as long as it was awaited.
   */
  readonly first: Percentiles;
  readonly way: Percentiles;
  readonly gaps: Percentiles;
  /** Of the clients' process. */
  readonly cpuS: number;
}

interface Asked {
  readonly clients: number;
  /** Of each answer. */
  readonly tokensPerS: number;
  readonly seconds: number;
}

/**
 * Of clients x rate x seconds. Waits for first tokens take from it, most where answers are short, and timers of engines that share two busy
 * cores are late: on such a machine a run of short answers, none of which hung, had 0.63. With less the machine is too slow for what is asked.
 */
const leastShare = 0.5;

/** An answer without a token for so long hangs: ten steps of its engine, and what a busy machine or a collection may hold up. */
export const stillMsAt = (tokensPerS: number): number => 2_000 + 10_000 / tokensPerS;

/** @throws KvError IO with all that is wrong */
export function checkWhole(
  way: string,
  { tokens, errors, hanging }: Pick<Streams, 'tokens' | 'errors' | 'hanging'>,
  { clients, tokensPerS, seconds }: Asked,
): void {
  const all = clients * tokensPerS * seconds;
  const wrong: string[] = [];
  if (Object.keys(errors).length > 0) wrong.push(JSON.stringify(errors));
  if (hanging > 0) {
    const stillS = stillMsAt(tokensPerS) / 1_000;
    wrong.push(`of ${clients} answers ${hanging} stood still at the end, for ${stillS} s and longer`);
  }
  if (tokens < leastShare * all)
    wrong.push(`${tokens} tokens came of ${all}; where none hangs ask for less with --clients or --rate`);
  if (wrong.length > 0) throw new KvError('IO', `bench streams, ${way}: ${wrong.join('; ')}`);
}
