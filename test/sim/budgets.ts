/** Law 3: what a node holds, and what it keeps waiting, is bounded. And law 5: what waits, somebody waits for. */
import type { SimulatedEngine } from './engine.ts';
import { limits, redisBytes, type SimNode, s3Bytes } from './node.ts';
import type { Servers } from './platform.ts';
import { Violation } from './world.ts';

/** In flight at once on one device, from one node, whatever is removed, written or made. */
const maxDiskCalls = 1;

function over(what: string, bytes: number, cap: number): void {
  if (bytes > cap) throw new Violation(`law 3: ${what}: ${bytes}, ${cap} allowed`);
}

/** At every instant. */
export function checkBudgets(nodes: readonly SimNode[], servers: Servers): void {
  const { redis, s3, disks } = servers;
  over('redis, by its ledger', redis.ledger?.used ?? 0, redisBytes);
  over('redis, values under the ledger', redis.ledger === undefined ? 0 : redis.valueBytes, redis.ledger?.used ?? 0);
  over('the bucket', s3.bytes, s3Bytes);
  for (const [name, { callsInFlight }] of disks.disks) {
    over(`${name}, calls to its file system`, Math.max(0, ...callsInFlight.values()), maxDiskCalls);
  }
  for (const node of nodes) {
    let bytes = 0;
    for (const name of node.diskNames()) bytes += disks.of(`/kvtier-sim/${name}/`).bytes;
    over(`${node.name}, its disks`, bytes, node.diskCapacityBytes);
  }
}

/** `nodes`: that are up; `engines`: that are alive. */
export function checkBounds(nodes: readonly SimNode[], engines: readonly SimulatedEngine[]): void {
  for (const { store, name, arena, plan } of nodes) {
    const { counters, tiers } = store.stats();
    const { bytes, capacityBytes } = arena.stats();
    over(`${name}, the arena`, bytes, capacityBytes);
    // One block may always start on each idle tier.
    over(
      `${name}, what is fetched`,
      counters['fetch.inflight_bytes']!,
      limits.maxFetchBytes! + plan.tiers.length * 6_000,
    );
    over(`${name}, what is prefetched`, counters['prefetch.unused_bytes']!, limits.maxPrefetchedBytes!);
    over(`${name}, uses to tell`, counters['touch.pending_blocks']!, limits.maxTouchBlocks!);
    for (const tier of plan.tiers) {
      over(`${name}, ${tier}: queue`, counters[`writedown.${tier}.pending_bytes`]!, limits.maxWriteDownBytes!);
    }
    for (const { tier, detail } of tiers) {
      over(`${name}, ${tier}: not written yet`, detail.write_dirty_bytes ?? 0, limits.maxDirtyBytes!);
    }
    over(`${name}, tenant small in the arena`, counters['quota.bytes.arena.small'] ?? 0, 20_000);
    over(`${name}, tenant small on disk`, counters['quota.bytes.disk.small'] ?? 0, 30_000);
  }
  for (const { holdings, parts } of engines) {
    const { reserved, loads, pins } = holdings.counts;
    over(`${parts.node.name}, loads of a session`, loads, limits.maxLoads!);
    over(`${parts.node.name}, reserved by a session`, reserved * parts.space.payloadBytes, limits.maxReservedBytes!);
    over(`${parts.node.name}, pinned by a session`, pins * parts.space.payloadBytes, limits.maxPinnedBytes!);
  }
}

/** Laws 3 and 5: what is awaited is bounded, and somebody waits for it. `engines`: all that are alive. */
export function checkWaits(nodes: readonly SimNode[], engines: readonly SimulatedEngine[]): void {
  for (const node of nodes) {
    const own = engines.filter(({ parts }) => parts.node === node);
    const counts = own.map(({ holdings }) => holdings.counts.awaited);
    const awaited = counts.reduce((sum, count) => sum + count, 0);
    const { 'await.blocks': said } = node.store.stats().counters;
    if (awaited > limits.maxAwaitedInAll! || Math.max(0, ...counts) > limits.maxAwaitedBlocks!)
      throw new Violation(`law 3: ${node.name}: ${counts.join(' + ')} blocks are awaited`);
    if (said !== awaited)
      throw new Violation(`law 5: ${node.name}: ${said} blocks are awaited, by its engines ${awaited}`);
  }
}
