/** npm run sim -- --feed: each seed twice, with room for all in the index and with too little. */
import { type FeedSimulationResult, simulateFeed } from '@kvtier/kv-index/testing';

const tight = { isTight: true, maxBytes: 512 * 1024 };

export async function runFeed(first: number, last: number, minutes: number): Promise<number> {
  let failed = 0;
  const sums = { batches: 0, lost: 0, repeated: 0, late: 0, restarts: 0, resets: 0, cuts: 0, snapshots: 0, gaps: 0 };
  let [quietPoints, compared, worstStaleMs, droppedBlocks, fullestShare] = [0, 0, 0, 0, 0];
  for (let seed = first; seed <= last; seed++) {
    for (const bound of [{}, tight]) {
      const result: FeedSimulationResult = await simulateFeed({ seed, minutes, ...bound });
      if (result.failure !== undefined) failed++;
      process.stdout.write(
        `seed ${seed}, an index ${'isTight' in bound ? 'too small' : 'with room'}: ${result.failure ?? 'kept all laws'}\n`,
      );
      for (const name of Object.keys(sums) as (keyof typeof sums)[]) sums[name] += result[name];
      quietPoints += result.quietPoints;
      compared += result.compared;
      worstStaleMs = Math.max(worstStaleMs, result.worstStaleMs);
      droppedBlocks += result.droppedBlocks;
      if ('isTight' in bound) fullestShare = Math.max(fullestShare, result.mostBytes / tight.maxBytes);
    }
  }
  const said = Object.entries(sums).map(([name, count]) => `${count} ${name}`);
  process.stdout.write(
    `${minutes} minutes each of seeds ${first} to ${last}, with room and without: ${said.join(', ')}\n` +
      `${quietPoints} quiet points, ${compared} blocks compared; a dropped block was credited for ${worstStaleMs} ms at most; ` +
      `the small index held ${(100 * fullestShare).toFixed(1)} % of its bound at most, and left out ${droppedBlocks} blocks\n` +
      `${failed === 0 ? 'kept all laws' : `${failed} failed`}\n`,
  );
  return failed === 0 ? 0 : 1;
}
