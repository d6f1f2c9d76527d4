/** Opens a disk tier as a fresh process does at a restart. `DIR CAPACITY`; prints `{ms, blocks}`. */
import { unlinkSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { ArenaTier, DiskTier } from '@kvtier/tiers';

const [dir, capacityBytes] = process.argv.slice(2);
const arenaBytes = 16 << 20;
const path = `/dev/shm/kvtier-bench-open-${process.pid}`;
const arena = native.arenaCreate(path, arenaBytes, 1);
unlinkSync(path); // the mapping is enough
const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
const log = { info: () => {}, warn: () => {}, error: () => {} };
const startMs = performance.now();
const tier = await DiskTier.open({ dir: dir!, capacityBytes: Number(capacityBytes), arena, slots, log });
const ms = performance.now() - startMs;
process.stdout.write(`${JSON.stringify({ ms, blocks: tier.stats().blocks })}\n`);
await tier.close();
native.arenaClose(arena);
