/** A peer that is killed or stopped in mid-transfer: no wrong block, no read that hangs, and it is back without a restart. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { stopProcess } from '../../../../../infra/stopped.ts';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { PeerLoops } from './peer-loops.ts';
import type { PeerTier } from './peer-tier.ts';
import { fetchingTier, loopsOf, sharedSecret, until } from './testing/peer-pair.ts';

const payloadBytes = 1 << 20;
const blockCount = 16;
const space = namespaceNamed('one');
const hashes = Array.from({ length: blockCount }, (_, i) => hashNamed(i));
const [program] = await bundled(new URL('./testing/peer-giver.ts', import.meta.url));

let bench: TestBench;
let children: ChildProcess[];
let loops: PeerLoops;
let tier: PeerTier | undefined;
beforeEach(() => {
  bench = new TestBench(64 << 20);
  children = [];
  loops = loopsOf(bench, sharedSecret());
});
afterEach(async () => {
  await tier?.close();
  await loops.close();
  for (const child of children) {
    child.kill('SIGKILL');
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  }
  bench.dispose();
});

async function start(port: number): Promise<{ child: ChildProcess; port: number }> {
  const args = [program, bench.dir, String(port), String(blockCount), String(payloadBytes)];
  const child = spawn(process.execPath, args, { stdio: ['pipe', 'pipe', 'inherit'] });
  children.push(child);
  const [text] = (await once(child.stdout!, 'data')) as [Buffer];
  return { child, port: Number(text.toString()) };
}

const allThere = (one: PeerTier) => () =>
  one.lookup(space, hashes) === blockCount && one.stats().detail!.usable_peers === 1;

/** At last: on a busy machine a read may take longer than these tiers wait. */
const allRead = (one: PeerTier): Promise<void> =>
  vi.waitFor(
    async () => expect(await bench.read(one, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready')),
    { timeout: 20_000 },
  );

it.each(['SIGKILL', 'SIGSTOP'] as const)('%s in mid-transfer', async (signal) => {
  const first = await start(0);
  const one = fetchingTier(bench, loops, [first.port], { readLimitMs: 1000 });
  tier = one;
  await until('the peer is there', allThere(one));
  const readings = Array.from({ length: 2 }, () => bench.read(one, space, hashes, payloadBytes));
  if (signal === 'SIGSTOP') await stopProcess(first.child.pid!);
  else {
    first.child.kill(signal);
    await once(first.child, 'exit');
  }
  for (const statuses of await Promise.all(readings)) {
    for (const status of statuses) expect(['ready', 'failed', 'missing']).toContain(status);
  }
  const during = await bench.read(one, space, hashes, payloadBytes);
  for (const status of during) expect(['failed', 'missing']).toContain(status);
  await until('its blocks are gone', () => one.lookup(space, hashes) === 0);
  if (signal === 'SIGSTOP') first.child.kill('SIGCONT');
  else await start(first.port);
  await until('it is back', allThere(one));
  await allRead(one);
  one.checkIntegrity();
});

it('an own standstill drops no healthy peer', async () => {
  const first = await start(0);
  const lines: string[] = [];
  const log = {
    ...silentLog,
    info: (_: object, line: string) => lines.push(line),
    warn: (_: object, line: string) => lines.push(line),
  };
  const one = fetchingTier(bench, loops, [first.port], { readLimitMs: 1000, log });
  tier = one;
  await until('the peer is there', allThere(one));
  // Twice as long as a peer may be silent.
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 3000);
  await new Promise((resolve) => setTimeout(resolve, 700));
  expect(lines).toEqual(['connected to a peer']);
  await allRead(one);
});

it('SIGKILL of one of two givers in mid-transfer: the other one delivers all', async () => {
  const [first, second] = [await start(0), await start(0)];
  const one = fetchingTier(bench, loops, [first.port, second.port], { readLimitMs: 20_000 });
  tier = one;
  await until(
    'both are there',
    () => one.stats().detail!.usable_peers === 2 && one.lookup(space, hashes) === blockCount,
  );
  await until('both have told all', () => one.stats().detail!.listed_peers === 2);
  const readings = Array.from({ length: 2 }, () => bench.read(one, space, hashes, payloadBytes));
  first.child.kill('SIGKILL');
  for (const statuses of await Promise.all(readings)) expect(statuses).toEqual(hashes.map(() => 'ready'));
  await until('it is seen to be gone', () => one.stats().detail!.connected_peers === 1);
  expect(await bench.read(one, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready'));
  one.checkIntegrity();
});
