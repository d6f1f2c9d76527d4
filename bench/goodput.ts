/**
 * What is served in time of a load, and the load from which on not all of it is: for systems that are asked for more than they can do.
 *
 *     goodput = answers in time ÷ max(time in which requests came, last answer's end)
 *
 * In time: the first token, and each pause behind it, as wanted. What is still decoded when no more requests come is not served within the
 * time in which they came: who begins all at once and ends long afterwards is no faster for it.
 */
import { KvError } from '@kvtier/errors';
import { isInTime, type Targets, type Timed } from './pd-load.ts';

/** A request that has ended. */
export interface Ended {
  /** Since the load began. */
  readonly endMs: number;
  /** undefined: it was told to come again. */
  readonly answer: Pick<Timed, 'ttftMs' | 'gapsMs'> | undefined;
}

export interface Served {
  readonly asked: number;
  readonly inTime: number;
  /** Whose first token came late; whose first token came in time, and a later one did not. */
  readonly late: number;
  readonly paused: number;
  readonly refused: number;
  /** Answers in time a second. */
  readonly goodPerS: number;
}

/** Of requests that came within `ms`. */
export function served(all: readonly Ended[], targets: Targets, ms: number): Served {
  const answers = all.flatMap(({ answer }) => answer ?? []);
  const inTime = answers.filter((answer) => isInTime(answer, targets)).length;
  const late = answers.filter(({ ttftMs }) => ttftMs > targets.ttftMs).length;
  const lastMs = all.reduce((last, { answer, endMs }) => (answer === undefined ? last : Math.max(last, endMs)), ms);
  return {
    ...{ asked: all.length, inTime, late, paused: answers.length - inTime - late },
    ...{ refused: all.length - answers.length, goodPerS: (inTime / lastMs) * 1_000 },
  };
}

/** As test/sim/goodput.long.test.ts has it. */
const [step, enoughShare] = [1.2, 0.855];
const mostSteps = 12;

/**
 * Requests a second that saturate a system: as many as it answers at most, in time or not (`mostPerS`), or the first step beyond of which
 * more than a seventh is not served in time. Never less: what misses its targets while half of a system rests is no sign of saturation.
 * @throws KvError CONFIG when no load is too much
 */
export async function saturation(mostPerS: number, serve: (perS: number) => Promise<Served>): Promise<number> {
  let perS = mostPerS;
  for (let at = 0; ; at++, perS *= step) {
    const all = await serve(perS);
    if (all.inTime < enoughShare * all.asked) return perS;
    if (at < mostSteps) continue;
    const said = `${perS.toFixed(2)} requests a second are not too much: ${says(all)}; ask for more SECONDS`;
    throw new KvError('CONFIG', `bench overload: ${said}`);
  }
}

export const says = ({ asked, inTime, late, paused, refused }: Served): string =>
  `${asked} asked, ${inTime} in time, ${late} late, ${paused} with a longer pause, ${refused} told to come again`;
