/** Write-through runs behind the answers. Whoever is about to SIGKILL a system and wants its blocks on disk waits here first. */
import { metricValues, waitUntil } from './client.ts';

const quietMs = 300;

/**
 * The disk tier has every block that the arena has, and has had for a moment; `leastBlocks` of them at least: what an engine still has
 * to export, nobody else knows of. @throws KvError DEADLINE
 */
export async function waitForWriteDown(url: string, leastBlocks = 1, limitMs = 30_000): Promise<void> {
  let since = 0;
  await waitUntil('write-down of all blocks to disk', limitMs, async () => {
    const blocks = await metricValues(url, 'kvtier_tier_blocks');
    const arena = blocks.get('{tier="arena"}') ?? 0;
    const disk = blocks.get('{tier="disk"}') ?? 0;
    if (arena < leastBlocks || disk < arena) since = 0;
    else since ||= performance.now();
    return since > 0 && performance.now() - since >= quietMs;
  });
}
