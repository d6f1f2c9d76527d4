/**
 * Over a link about as fast as the executor a hit comes from both ends: its head is computed while the rest is loaded. The answer is the
 * one of a worker without a node, and stays it when the way to the other host is cut in the middle of either.
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
  cluster = await hosts(['a', 'b'], { gbit: 1 });
  sharing = new SharingHosts(cluster, folder);
  const [atA, atB] = await Promise.all([sharing.node('a', [], 512 << 20), sharing.node('b', ['a'], 512 << 20)]);
  [first, other, alone] = await Promise.all([
    sharing.worker('a', modelDir, atA, small),
    sharing.worker('b', modelDir, atB, small),
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
  // Until it has computed something, all is loaded.
  for (let which = 0; which < 3; which++) await other.ask(fresh(), 4);
  // Whether a head is worth it follows what steps and loads take: on a busy machine only now and then.
  for (let nth = 0; nth < 8 || (nth < 40 && (await other.metric(heads)) === 0); nth++) {
    const asked = fresh();
    const right = await warmed(asked);
    const answer = await other.ask(asked, 4);
    expect(answer.tokenIds).toEqual(right);
    await other.resetPrefixCache();
    // And what it holds now: the head that it has computed, too.
    expect((await other.ask(asked, 4)).tokenIds).toEqual(right);
    await other.resetPrefixCache();
  }
  expect(await other.metric(heads)).toBeGreaterThan(0);
});

it.skipIf(missing !== undefined)('whenever the way between the hosts is cut', async () => {
  const before = await other.metric(heads);
  for (let which = 20; which < 30; which++) {
    const asked = fresh();
    const right = await warmed(asked);
    const begun = await other.metric(heads);
    let isAnswered = false;
    const answer = other.ask(asked, 4).finally(() => {
      isAnswered = true;
    });
    // Every other time at once; else when the load has begun beside its head, where there is one.
    if (which % 2 === 1)
      await vi.waitUntil(async () => isAnswered || (await other.metric(heads)) > begun, {
        timeout: 20_000,
        interval: 1,
      });
    await cluster!.cut('a', 'b');
    expect((await answer).tokenIds).toEqual(right);
    await cluster!.heal('a', 'b');
    await other.resetPrefixCache();
  }
  expect(await other.metric(heads)).toBeGreaterThan(before);
});
