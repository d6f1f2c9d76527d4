/**
 * A process that fills a disk tier, and on a line of stdin removes it all within a second, in batches as the store's expiry does;
 * then it says on stdout what it cost and dies by SIGKILL. Environment: KVTIER_TEST = {dir, blocks, segmentBytes, keepEvery}: of so
 * many blocks one stays; 0: none.
 */
import { once } from 'node:events';
import { readdirSync, writeSync } from 'node:fs';
import { dearPagesMs, threadUse } from '@kvtier/data-plane/testing';
import { DiskTier } from '../../disk/disk-tier.ts';
import { hashNamed, namespaceNamed, TestBench } from './objects.ts';

const settings = JSON.parse(process.env.KVTIER_TEST!) as {
  dir: string;
  blocks: number;
  segmentBytes: number;
  keepEvery: number;
};
const { dir, blocks, segmentBytes, keepEvery } = settings;
const batchBlocks = 256;
const payloadBytes = 3_800;
const space = namespaceNamed('removal');
const told: string[] = [];
const tell = (_: object, message: string): void => void told.push(message);
const bench = new TestBench(16 << 20, `${dir}-arena`);
const tier = await DiskTier.open({
  ...{ dir, segmentBytes, capacityBytes: Math.ceil((blocks * 4096 * 1.2) / segmentBytes + 3) * segmentBytes },
  ...{ arena: bench.arena, slots: bench.tier, log: { info: () => {}, warn: tell, error: tell } },
  timeoutMs: 20_000, // above a stall that is meant to be 9 s, on a machine that may be busy
});
const hashOf = (number: number) => hashNamed(number);
for (let from = 0; from < blocks; from += 512) {
  const hashes = Array.from({ length: Math.min(512, blocks - from) }, (_, i) => hashOf(from + i));
  const statuses = await bench.write(tier, space, hashes, payloadBytes);
  if (statuses.some((status) => status !== 'stored')) throw new Error(`not stored: ${told.join()}`);
}

/** Turns that may count, by what this thread had of a processor: what neighbours take is not ours. */
const longTurns: { readonly cpuMs: number; readonly pages: number }[] = [];
const leastMs = 20;
const peaks = { descriptors: 0, rssMb: 0, calls: 0, outOfService: 0 };
const names: string[][] = [];
for (let from = 0; from < blocks; from += batchBlocks) {
  const batch = Array.from({ length: Math.min(batchBlocks, blocks - from) }, (_, i) => from + i);
  names.push(batch.filter((number) => keepEvery === 0 || number % keepEvery !== 0).map(hashOf));
}
const device = tier.devices[0]!;
await new Promise((resolve) => setTimeout(resolve, 500)); // footers of the last segments
globalThis.gc?.();
writeSync(1, 'filled\n');
await once(process.stdin, 'data');
const startMs = performance.now();
let removedMs = 0;
let isOver = false;
let last = threadUse();
let turns = 0;
function watchTurns(): void {
  const now = threadUse();
  const turn = { cpuMs: now.cpuMs - last.cpuMs, pages: now.pages - last.pages };
  if (turn.cpuMs > leastMs) longTurns.push(turn);
  last = now;
  if (turns++ % 64 === 0) {
    peaks.descriptors = Math.max(peaks.descriptors, readdirSync('/proc/self/fd').length);
    peaks.rssMb = Math.max(peaks.rssMb, Math.round(process.memoryUsage.rss() / 1e6));
    peaks.calls = Math.max(peaks.calls, device.files?.openCount ?? 0);
    if (!tier.stats().inService) peaks.outOfService++;
    last = threadUse();
  }
  if (!isOver) setTimeout(() => setImmediate(watchTurns), 0);
}
watchTurns();
for (const [at, batch] of names.entries()) {
  tier.remove(space, batch as never, 'asked');
  const dueMs = ((at + 1) / names.length) * 900;
  if (performance.now() - startMs < dueMs) await new Promise((resolve) => setTimeout(resolve, 1));
  else await new Promise((resolve) => setImmediate(resolve));
}
removedMs = performance.now() - startMs;
const isDrained = (): boolean =>
  [...device.segments].every(({ erased, needsFooter, uses }) => !(erased?.length > 0) && !needsFooter && uses === 0);
while (!isDrained()) await new Promise((resolve) => setTimeout(resolve, 20));
isOver = true;
const ms = { removed: Math.round(removedMs), drained: Math.round(performance.now() - startMs) };
const { blocks: left } = tier.stats();
const dearPageMs = dearPagesMs(1);
/** Longest first. */
const longestMs = longTurns.map(({ cpuMs, pages }) => Math.round(cpuMs - pages * dearPageMs)).sort((a, b) => b - a);
writeSync(1, `${JSON.stringify({ ...peaks, longestMs: longestMs.slice(0, 3), left, ms, turns, told })}\n`);
process.kill(process.pid, 'SIGKILL');
