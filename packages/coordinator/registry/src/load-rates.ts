/**
 * How fast a worker brings blocks in from each medium, as far as it goes without its own word. A worker tells what it has measured, and what
 * its planner expected of loads that it passed by; before the first of either it counts as the others of its model do, and before
 * any of them has, as `untried` times as fast as it computes: a medium that nobody is sent to is never measured.
 */

/** Only a try shows how fast it is. */
const untried = 4;

/** What those that have measured a medium bring in from it, on average; 0: none has. By the numbers of `media` media. */
export function usualLoads(media: number, measured: Iterable<readonly number[]>): number[] {
  const sums = new Array<number>(media).fill(0);
  const counts = new Array<number>(media).fill(0);
  for (const rates of measured) {
    for (let medium = 0; medium < media; medium++) {
      const perS = rates[medium] ?? 0;
      if (!(perS > 0)) continue;
      sums[medium]! += perS;
      counts[medium]!++;
    }
  }
  return sums.map((sum, medium) => (counts[medium] === 0 ? 0 : sum / counts[medium]!));
}

/** Of one worker. `usual`: of those of its model; undefined: it has no cache node, and brings in what it has measured alone. */
export function expectedLoads(
  measured: readonly number[],
  usual: readonly number[] | undefined,
  computedBlocksPerS: number,
): readonly number[] {
  if (usual === undefined) return measured;
  // Medium 0 is the GPU: what lies there is not brought in.
  return usual.map((perS, medium) => (medium === 0 ? 0 : measured[medium] || perS || untried * computedBlocksPerS));
}
