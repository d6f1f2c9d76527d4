/**
 * A hit that comes from both ends: its head is computed while the rest is loaded. The answer is the one of a worker without a node, and
 * stays it when the way to the other host is cut in the middle of either. When a head is worth it is the load planner's affair, which its
 * own tests look at; here it is told to have one whenever it can.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { SharingHosts, type Worker } from '../../bench/sharing-hosts.ts';
import { type Hosts, hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { modelDir } from '../faults/engine-rig.ts';

const missing = hostsMissing();
if (missing !== undefined) console.warn(`SKIPPED: hits from both ends, between hosts: ${missing}`);
const blockTokens = 16;
const promptTokens = 1_600;
const small = { kvBytes: 64 << 20, threads: 1 } as const;
const listed = 'kvtier_tier_blocks{tier="peer"}';
const heads = 'kvtier_engine_events_total{event="headLoads"}';

const folder = mkdtempSync(join(tmpdir(), 'kvb-'));
let cluster: Hosts<'a' | 'b'> | undefined;
let sharing: SharingHosts<'a' | 'b'> | undefined;
let first: Worker;
let other: Worker;
/** No node: the judge of what is right. */
let alone: Worker;

beforeAll(async () => {
  if (missing !== undefined) return;
  cluster = await hosts(['a', 'b'], { gbit: 0.25 }); // a load lasts long enough to be cut in its middle
  sharing = new SharingHosts(cluster, folder);
  const [atA, atB] = await Promise.all([sharing.node('a', [], 512 << 20), sharing.node('b', ['a'], 512 << 20)]);
  [first, other, alone] = await Promise.all([
    sharing.worker('a', modelDir, atA, small),
    sharing.worker('b', modelDir, atB, { ...small, loads: 'halves' }),
    sharing.worker('b', modelDir, null, small),
  ]);
}, 120_000);
afterAll(async () => {
  await cluster?.close();
  sharing?.sweep();
  rmSync(folder, { recursive: true, force: true });
});

let prompts = 0;
/** One that nobody holds: not of an earlier attempt either. */
const fresh = (): number[] => prompt(prompts++);

/** Prompt number `which`, of ordinary words. */
const prompt = (which: number): number[] =>
  Array.from(
    { length: promptTokens },
    (_, at) => 300 + ((Math.imul(which * promptTokens + at, 2_654_435_761) >>> 8) % 1_000),
  );

/** Computed at the other host, and known of here. Returns the right answer. */
async function warmed(asked: readonly number[]): Promise<readonly number[]> {
  const before = await other.metric(listed);
  await first.ask(asked, 4);
  await first.resetPrefixCache(); // done when all of it has gone down
  const blocks = asked.length / blockTokens;
  await vi.waitUntil(async () => (await other.metric(listed)) >= before + blocks, { timeout: 20_000, interval: 20 });
  return (await alone.ask(asked, 4)).tokenIds;
}

it.skipIf(missing !== undefined)('answers as without it, and passes over what came', async () => {
  for (let round = 0; round < 3; round++) {
    const asked = fresh();
    const right = await warmed(asked);
    const before = await other.metric(heads);
    const answer = await other.ask(asked, 4);
    expect(answer.tokenIds).toEqual(right);
    expect(await other.metric(heads)).toBe(before + 1);
    await other.resetPrefixCache();
    // And what it holds now: the head that it has computed, too.
    expect((await other.ask(asked, 4)).tokenIds).toEqual(right);
    await other.resetPrefixCache();
  }
});

it.skipIf(missing !== undefined)('whenever the way between the hosts is cut', async () => {
  // At once, or when the load has begun beside its head.
  for (const isUnderWay of [false, true, false, true]) {
    const asked = fresh();
    const right = await warmed(asked);
    const before = await other.metric(heads);
    const answer = other.ask(asked, 4);
    const hasBegun = async (): Promise<boolean> => (await other.metric(heads)) === before + 1;
    if (isUnderWay) await vi.waitUntil(hasBegun, { timeout: 20_000, interval: 1 });
    await cluster!.cut('a', 'b');
    expect((await answer).tokenIds).toEqual(right);
    await cluster!.heal('a', 'b');
    await other.resetPrefixCache();
  }
});
