/**
 * What one engine has computed, another one loads and answers the same: beside the same node from its arena, on another host from the
 * node there; and both still answer when the way between the hosts is cut.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { loadTokenizer } from '@kvtier/api-server';
import { DemoTable } from '@kvtier/cli';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { SharingHosts, type Worker } from '../../bench/sharing-hosts.ts';
import { type Hosts, hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { modelDir } from '../faults/engine-rig.ts';

const missing = hostsMissing();
if (missing !== undefined) console.warn(`SKIPPED: sharing between hosts: ${missing}`);
const blockTokens = 16;
const small = { kvBytes: 64 << 20, threads: 1, loads: 'always' } as const;
const listed = 'kvtier_tier_blocks{tier="peer"}';

const folder = mkdtempSync(join(tmpdir(), 'kvs-'));
const tokenizer = loadTokenizer(modelDir);
let cluster: Hosts<'a' | 'b'> | undefined;
let first: Worker;
let beside: Worker;
let other: Worker;
/** No node: the judge of what is right. */
let alone: Worker;

let sharing: SharingHosts<'a' | 'b'> | undefined;
beforeAll(async () => {
  if (missing !== undefined) return;
  cluster = await hosts(['a', 'b'], { gbit: 10 });
  sharing = new SharingHosts(cluster, folder);
  const [atA, atB] = await Promise.all([sharing.node('a', ['b'], 64 << 20), sharing.node('b', ['a'], 64 << 20)]);
  [first, beside, other, alone] = await Promise.all([
    sharing.worker('a', modelDir, atA, small),
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

const prompt = (table: number, row = 1): number[] =>
  tokenizer.encode(new DemoTable(40, 2_000 + table).question(row, 'age').prompt, { addSpecialTokens: false });
/** Whole blocks of both prompts from their beginning, but for the last token of the second. */
function shared(a: readonly number[], b: readonly number[]): number {
  const end = a.findIndex((id, at) => id !== b[at]);
  return Math.floor(Math.min(end === -1 ? a.length : end, b.length - 1) / blockTokens) * blockTokens;
}

it.skipIf(missing !== undefined)('workers of one host share one node', async () => {
  const [asked, again] = [prompt(1, 1), prompt(1, 2)];
  const right = await alone.ask(again, 6);
  await first.ask(asked, 6);
  await first.resetPrefixCache(); // done when all of it has gone down
  const answer = await beside.ask(again, 6);
  expect(answer.byTier).toEqual({ arena: shared(asked, again) });
  expect(answer.tokenIds).toEqual(right.tokenIds);
});

it.skipIf(missing !== undefined)('workers of two hosts share what their nodes hold', async () => {
  const [asked, again] = [prompt(2, 1), prompt(2, 2)];
  const right = await alone.ask(again, 6);
  await vi.waitUntil(async () => (await other.metric(listed)) > 0, { timeout: 20_000, interval: 20 });
  const before = await other.metric(listed);
  await first.ask(asked, 6);
  const blocks = Math.floor(asked.length / blockTokens);
  await vi.waitUntil(async () => (await other.metric(listed)) >= before + blocks, { timeout: 20_000, interval: 20 });
  const answer = await other.ask(again, 6);
  expect(answer.byTier).toEqual({ peer: shared(asked, again) });
  expect(answer.tokenIds).toEqual(right.tokenIds);
  // and from its own arena from now on
  await other.resetPrefixCache();
  expect((await other.ask(again, 6)).byTier).toEqual({
    arena: Math.floor((again.length - 1) / blockTokens) * blockTokens,
  });
});

it.skipIf(missing !== undefined)('a way that is cut costs nothing but what would have come by it', async () => {
  const asked = prompt(3);
  const right = await alone.ask(asked, 6);
  await vi.waitUntil(async () => (await other.metric(listed)) > 0, { timeout: 20_000, interval: 20 });
  const before = await other.metric(listed);
  await first.ask(asked, 6);
  const blocks = Math.floor(asked.length / blockTokens);
  await vi.waitUntil(async () => (await other.metric(listed)) >= before + blocks, { timeout: 20_000, interval: 20 });
  await cluster!.cut('a', 'b');
  const answer = await other.ask(asked, 6);
  expect(answer.byTier).toEqual({});
  expect(answer.tokenIds).toEqual(right.tokenIds);
  await cluster!.heal('a', 'b');
  await vi.waitUntil(async () => (await other.metric(listed)) >= before + blocks, { timeout: 60_000, interval: 20 });
});
